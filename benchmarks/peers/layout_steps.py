"""The steps on the other layouts: all of them in one process that stores, and one that restores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pagecache
from benchmarks.layouts import CHUNK, LAYOUTS
from benchmarks.peers.kinds import difference, extend
from benchmarks.peers.timed import imported, maker, opened, stored
from benchmarks.rows import tokens


def store(adapter: str, folder: str, layouts: list[str], count: int) -> dict[str, Any]:
    """Store ``count`` tokens of each layout, and then ``CHUNK`` more of the same conversation."""
    imported(adapter)
    return {
        layout: _tried(_store, adapter, f"{folder}/{layout}", layout, count) for layout in layouts
    }


def restore(adapter: str, folder: str, layouts: list[str], count: int) -> dict[str, Any]:
    """Restore all of each layout, warm, and say how it differs."""
    imported(adapter)
    return {
        layout: _tried(_restore, adapter, f"{folder}/{layout}", layout, count + CHUNK)
        for layout in layouts
    }


def _tried(step: Any, *arguments: Any) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = step(*arguments)
        return answer
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _store(adapter: str, folder: str, layout: str, count: int) -> dict[str, Any]:
    make = maker(adapter, LAYOUTS[layout][0])
    caches = make()
    prompt = tokens(count + CHUNK, 0).tolist()
    answer, start = {}, 0
    for name, stop in (("first", count), ("next", count + CHUNK)):
        peer = opened(adapter, folder, make)
        if not start:
            peer.begin(caches)
        extend(caches, layout, start, stop)
        answer[name] = stored(peer, folder, prompt[:stop], caches)
        peer.close()
        start = stop
    return answer


def _difference(found: list[Any], want: list[Any], layout: str) -> str:
    """As ``difference``; what cannot be read on is not what was stored."""
    try:
        return difference(found, want, layout)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _restore(adapter: str, folder: str, layout: str, count: int) -> dict[str, Any]:
    make = maker(adapter, LAYOUTS[layout][0])
    ids = np.append(tokens(count, 0), 1).tolist()
    for file in Path(folder).rglob("*"):
        if file.is_file() and file.stat().st_size:
            pagecache.warm(file)
    start = time.perf_counter()
    peer = opened(adapter, folder, make)
    caches, offset = peer.restore(ids)
    seconds = time.perf_counter() - start
    why = ""
    if caches is not None and offset:
        want = make()
        # In the same chunks as it was stored: a ring keeps what its last chunk needed.
        for at in range(0, offset, CHUNK):
            extend(want, layout, at, min(at + CHUNK, offset))
        why = _difference(caches, want, layout)
    peer.close()
    return {"seconds": seconds, "offset": offset, "differs": why}
