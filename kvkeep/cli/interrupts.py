"""Ctrl-C between two steps of long work, so that what is done can be kept."""

from __future__ import annotations

import signal
import threading
from typing import Any, Self

from kvkeep.cli.output import note


class Stopping:
    """While it is entered, a first Ctrl-C is noted in ``asked``; a second one ends at once.

    Only a program's main thread hears signals; in any other it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        note("\nStopping after the step in hand; Ctrl-C again stops at once.")
