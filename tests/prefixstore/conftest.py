from __future__ import annotations

import pytest

from tests.prefixstore.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    """The store's time, which stands still until a test moves it."""
    clock = Clock()
    for module in ("events", "lapsed", "ledger", "pins", "publish", "prepare", "room", "ttl"):
        monkeypatch.setattr(f"kvkeep.prefixstore.{module}.time", clock, raising=False)
    return clock
