"""The steps that several measurements share: store and restore one large cache, both ways.

Each runs in a fresh process (``Bench.step``) and returns numbers. The clock starts after the
imports and stops before the bits are compared. ``first_tokens`` are the seconds of the first
three positions that are appended to what was restored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Answer
from benchmarks.rows import Shape, check, empty, extend, one_token, tokens

IDENTITY = {"benchmark": "rows of random bits"}
BUDGET = "8GB"


def open_space(folder: str, shape: Shape) -> tuple[Any, Any]:
    """A store and the space that every benchmark uses."""
    from kvkeep.prefixstore.store import open_store

    store = open_store(folder, max_bytes=BUDGET)
    return store, store.space(identity=IDENTITY, layout=empty(shape))


def load_imports() -> None:
    """Import what both ways need, so that no clock counts it."""
    import mlx_lm.models.cache  # noqa: F401

    import kvkeep.persistence.pages
    import kvkeep.prefixstore.store  # noqa: F401


def load_mlx_lm(file: str) -> list[Any]:
    """``load_prompt_cache``, and evaluate."""
    import mlx.core as mx
    from mlx_lm.models import cache as mlx_lm_cache

    load: Callable[[str], list[Any]] = mlx_lm_cache.load_prompt_cache
    caches = load(file)
    mx.eval([(cache.keys, cache.values) for cache in caches])
    return caches


def save_mlx_lm(file: str, caches: list[Any]) -> Answer:
    """``save_prompt_cache``; seconds until it returns, and until the file is on the disk."""
    from mlx_lm.models.cache import save_prompt_cache

    start = time.perf_counter()
    save_prompt_cache(file, caches)
    saved = time.perf_counter() - start
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    durable = time.perf_counter() - start
    return {"caller": saved, "durable": durable, "bytes": Path(file).stat().st_size}


def store_kvkeep(folder: str, shape: dict[str, int], count: int, seed: int = 0) -> Answer:
    """Snapshot a cache of ``count`` tokens into a store."""
    load_imports()
    kind = Shape(**shape)
    caches = empty(kind)
    extend(caches, kind, count, seed)
    store, space = open_space(folder, kind)
    os.sync()
    start = time.perf_counter()
    receipt = space.snapshot(tokens(count, seed), caches)
    caller = time.perf_counter() - start
    receipt.wait()
    durable = time.perf_counter() - start
    assert receipt.stored, receipt.reason
    store.close()
    return {"caller": caller, "durable": durable, "bytes": receipt.bytes_written}


def store_mlx_lm(file: str, shape: dict[str, int], count: int, seed: int = 0) -> Answer:
    """Save the same cache with ``save_prompt_cache``."""
    load_imports()
    kind = Shape(**shape)
    caches = empty(kind)
    extend(caches, kind, count, seed)
    os.sync()
    return save_mlx_lm(file, caches)


def restore_kvkeep(
    folder: str, shape: dict[str, int], count: int, seed: int = 0, shared: int = 0
) -> Answer:
    """Open the store and resume; checksums are always verified.

    With ``shared`` the prompt leaves what is stored after that many tokens.
    """
    load_imports()
    kind = Shape(**shape)
    prompt = np.append(tokens(count, seed), 1)
    if shared:
        prompt[shared:] = 2
    start = time.perf_counter()
    store, space = open_space(folder, kind)
    opened = time.perf_counter() - start
    hit = space.resume(prompt)
    seconds = time.perf_counter() - start
    assert hit.caches is not None, hit.decision
    first = [one_token(hit.caches, kind) for _ in range(3)]
    compared = check(hit.caches, kind, 0, hit.offset, seed)
    store.close()
    return {
        "seconds": seconds,
        "open": opened,
        "offset": hit.offset,
        "compared": compared,
        "first_tokens": first,
    }


def restore_mlx_lm(
    file: str, shape: dict[str, int], count: int, seed: int = 0, shared: int = 0
) -> Answer:
    """``load_prompt_cache`` and evaluate; with ``shared``, then trim to that many tokens."""
    load_imports()
    from mlx_lm.models.cache import trim_prompt_cache

    kind = Shape(**shape)
    start = time.perf_counter()
    caches = load_mlx_lm(file)
    if shared:
        trim_prompt_cache(caches, count - shared)
    seconds = time.perf_counter() - start
    first = [one_token(caches, kind) for _ in range(3)]
    compared = check(caches, kind, 0, shared or count, seed)
    return {"seconds": seconds, "compared": compared, "first_tokens": first}


def write_plain(file: str, nbytes: int) -> Answer:
    """Write ``nbytes`` random bytes into a file, 8 MiB at a time, and fsync."""
    block = np.random.default_rng(0).bytes(8 << 20)
    os.sync()
    start = time.perf_counter()
    with Path(file).open("wb", buffering=0) as out:
        for at in range(0, nbytes, len(block)):
            out.write(block[: nbytes - at])
        os.fsync(out.fileno())
    return {"seconds": time.perf_counter() - start}


def copy_memory(nbytes: int) -> Answer:
    """Copy ``nbytes`` into memory that nobody has touched, and once more into the same."""
    source = np.ones(nbytes, np.uint8)
    target = np.empty(nbytes, np.uint8)
    start = time.perf_counter()
    target[...] = source
    fresh = time.perf_counter() - start
    start = time.perf_counter()
    target[...] = source
    return {"fresh": fresh, "touched": time.perf_counter() - start}
