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


@pytest.fixture
def small(monkeypatch):
    """Chunks of 16 tokens."""
    monkeypatch.setattr("kvkeep.prefixstore.recipe.CHUNK_BYTES", 1)


@pytest.fixture
def raw(monkeypatch):
    """Nothing is compressed, so that the bytes of rows follow from how many there are."""
    monkeypatch.setattr("kvkeep.persistence.encoding.SMALLEST", 1 << 40)
