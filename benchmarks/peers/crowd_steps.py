"""The steps of one of several processes at once: get ready, store, restore."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.peers.timed import imported, maker, opened
from benchmarks.rows import Shape, check, empty, extend, tokens

_ready: dict[str, Any] = {}


def ready(adapter: str, number: int, shape: dict[str, int], count: int) -> dict[str, Any]:
    """Make a conversation of its own, and import what the peer needs."""
    kind = Shape(**shape)
    make = maker(adapter, lambda: empty(kind))
    imported(adapter)
    caches = make()
    extend(caches, kind, count, number)
    _ready.update(number=number, shape=kind, count=count, caches=caches, make=make)
    return {}


def open_over(adapter: str, folder: str) -> dict[str, Any]:
    """Open the store that is written to, as a server does when it starts."""
    _ready["peer"] = opened(adapter, folder, _ready["make"])
    return {}


def store(_: str) -> dict[str, Any]:
    """Store it until all is written; wall-clock times."""
    peer, ids = _ready.pop("peer"), tokens(_ready["count"], _ready["number"]).tolist()
    start = time.time()
    peer.store(ids, _ready["caches"])
    peer.settle()
    done = time.time()
    peer.close()
    return {"start": start, "done": done}


def restore(adapter: str, folder: str) -> dict[str, Any]:
    """Open the store again, and restore what it stored; the bits are compared after the clock."""
    kind, number, count = _ready["shape"], _ready["number"], _ready["count"]
    ids = np.append(tokens(count, number), 1).tolist()
    start = time.time()
    peer = opened(adapter, folder, _ready["make"])
    caches, offset = peer.restore(ids)
    done = time.time()
    exact = False
    if caches is not None and offset == count:
        try:
            exact = check(caches, kind, 0, count, number) == kind.nbytes(count)
        except AssertionError:
            exact = False
    peer.close()
    return {"start": start, "done": done, "offset": offset, "exact": exact}
