"""Stores with real lookups and snapshots of caches that follow from their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvkeep
from kvkeep.prefixstore.event import Event
from kvkeep.prefixstore.events import Gaps, append, read_events
from tests.faults import rows

NOW = 1_790_000_000.0
SPACE = bytes(range(16))


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[kvkeep.Store]:
    with kvkeep.open(path, max_bytes="1GB", **options) as store:
        yield store


def space_of(store: kvkeep.Store, kind: str = "plain", name: str = "m", salt: str | None = None):
    return store.space(
        identity={"name": name, "kind": kind}, layout=rows.caches(kind, [1, 2, 3]), salt=salt
    )


def keep(space: kvkeep.Space, kind: str, tokens: Any, **more: Any):
    return space.snapshot(tokens, rows.caches(kind, tokens), **more)


def event(what: str = "lookup", at: float = 0.0, reason: str = "full", **more: Any) -> Event:
    """An event ``at`` seconds after a fixed time."""
    return Event(what, NOW + at, more.pop("space", SPACE), reason, **more)


def write(store: kvkeep.Store, *events: Event) -> None:
    """Put events into the ring of an open store, as the writer does."""
    with store.env.begin(write=True) as txn:
        append(txn, events)


def ring(store: kvkeep.Store, since: float = 0.0) -> tuple[list[Event], Gaps]:
    """Every event of the ring, and what the reading could not vouch for."""
    gaps = Gaps()
    with store.env.begin() as txn:
        return [e for _, e in read_events(txn, since, gaps)], gaps
