"""The steps on one plain cache: store, append and restore, each in a process of its own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.peers.timed import imported, maker, opened, stored
from benchmarks.rows import Shape, check, empty, extend, one_token, tokens


def store(adapter: str, folder: str, shape: dict[str, int], count: int) -> dict[str, Any]:
    """Store ``count`` tokens in a new folder."""
    kind = Shape(**shape)
    imported(adapter)
    make = maker(adapter, lambda: empty(kind))
    peer, caches = opened(adapter, folder, make), make()
    extend(caches, kind, count, 0)
    return stored(peer, folder, tokens(count, 0).tolist(), caches)


def append(
    adapter: str, folder: str, shape: dict[str, int], count: int, new: int, number: int
) -> dict[str, Any]:
    """Restore ``count`` tokens, read ``new`` ones more, and store all of them."""
    kind = Shape(**shape)
    imported(adapter)
    peer = opened(adapter, folder, maker(adapter, lambda: empty(kind)))
    prompt = np.concatenate([tokens(count, 0), tokens(new, 1 + number)])
    caches, offset = peer.restore(np.append(prompt[:count], 1).tolist())
    assert caches is not None, "nothing came back"
    extend(caches, kind, count, 0)
    extend(caches, kind, count + new, 1 + number)
    return {**stored(peer, folder, prompt.tolist(), caches), "offset": offset}


def held(adapter: str, folder: str, shape: dict[str, int], count: int) -> dict[str, Any]:
    """Store caches that have room, read a token at once, and tell the share of layers it copied.

    MLX writes a token in place unless someone else holds the buffer: then it copies the layer.
    """
    kind = Shape(**shape)
    imported(adapter)
    make = maker(adapter, lambda: empty(kind))
    peer, caches = opened(adapter, folder, make), make()
    extend(caches, kind, count, 0)
    assert all(cache.keys.shape[2] > count for cache in caches), "no room"
    before = [_address(cache.keys) for cache in caches]
    ids = tokens(count, 0).tolist()
    start = time.perf_counter()
    peer.store(ids, caches)
    caller = time.perf_counter() - start
    one_token(caches, kind)
    after = [_address(cache.keys) for cache in caches]
    peer.settle()
    peer.close()
    copied = sum(a != b for a, b in zip(before, after, strict=True)) / len(caches)
    return {"caller": caller, "copied": copied}


def _address(array: Any) -> int:
    """Where the bytes of an evaluated array lie. Nothing is held afterwards."""
    import mlx.core as mx

    bits = array.view(mx.uint16)
    mx.eval(bits)
    at: int = np.asarray(memoryview(bits)).ctypes.data
    return at


def restore(
    adapter: str, folder: str, shape: dict[str, int], count: int, shared: int = 0
) -> dict[str, Any]:
    """Restore what a prompt shares with ``count`` stored tokens, all of it or ``shared``."""
    kind = Shape(**shape)
    prompt = np.append(tokens(count, 0), 1)
    if shared:
        prompt[shared:] = 2
    ids = prompt.tolist()
    make = maker(adapter, lambda: empty(kind))
    imported(adapter)
    start = time.perf_counter()
    peer = opened(adapter, folder, make)
    caches, offset = peer.restore(ids)
    seconds = time.perf_counter() - start
    compared = 0
    wrong = False
    if offset:
        try:
            compared = check(caches or [], kind, 0, min(offset, count), 0)
        except AssertionError:
            wrong = True
    return {"seconds": seconds, "offset": offset, "compared": compared, "wrong": wrong}
