from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C as a terminal has it: what a shell runs in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
