"""Caches for prompt-cache files, their comparison to the last bit, and files of older versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from tests.codecs.shuttle import bits
from tests.hooks import make_prompt_files
from tests.hooks.make_prompt_files import rows

FIELDS = {
    KVCache: ("keys", "values", "offset"),
    ConcatenateKVCache: ("keys", "values", "offset"),
    QuantizedKVCache: ("keys", "values", "offset", "group_size", "bits"),
    RotatingKVCache: ("keys", "values", "offset", "keep", "max_size", "_idx"),
    ChunkedKVCache: ("keys", "values", "offset", "chunk_size", "start_position"),
    ArraysCache: ("cache", "left_padding", "lengths"),
    CacheList: ("caches",),
}
"""Every attribute that a cache of that class has; a new one must show up here."""


def quantized(*counts: int, group_size: int = 32, bit_count: int = 8) -> QuantizedKVCache:
    cache = QuantizedKVCache(group_size=group_size, bits=bit_count)
    for seed, count in enumerate(counts):
        cache.update_and_fetch(rows(count, 64, seed), rows(count, 64, seed + 50))
    return cache


def trimmed(cache: Any, count: int) -> Any:
    assert cache.trim(count) == count
    return cache


def field(cache: Any, name: str) -> Any:
    """An attribute; of keys and values only the slots that hold something."""
    value = getattr(cache, name)
    if name not in ("keys", "values") or value is None:
        return value
    slots = cache.offset - getattr(cache, "start_position", 0)
    if isinstance(value, list | tuple):
        return [plane[..., :slots, :] for plane in value]
    return value[..., :slots, :]


def same(a: Any, b: Any, where: str = "") -> int:
    """Assert that two caches or fields are equal to the bit; how many elements were compared."""
    if isinstance(a, mx.array):
        assert isinstance(b, mx.array), where
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert (bits(a) == bits(b)).all(), where
        return a.size
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple), where
        assert len(a) == len(b), where
        return sum(same(x, y, f"{where}.{i}") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    assert type(a) is type(b), where
    if type(a) in FIELDS:
        assert set(vars(a)) == set(vars(b)) == set(FIELDS[type(a)]), where
        return sum(same(field(a, f), field(b, f), f"{where}.{f}") for f in FIELDS[type(a)])
    assert a == b, where
    return 1


def stored(name: str) -> Path:
    return make_prompt_files.FOLDER / f"mlx_lm_{name}.safetensors"
