"""Caches whose every byte follows from the tokens, so that any process can check them.

Row *i* is a function of the tokens up to *i*, as in a model: two conversations have equal
rows exactly as far as their tokens are equal. A state is a function of all tokens before it.

>>> first, second = (prefixes(tokens_of(c, 200)) for c in (0, 1))
>>> int((first == second).sum())
150
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

KINDS = ("plain", "window", "recurrent")
CONVERSATIONS = 16
HEADS, WIDTH, WINDOW = 2, 16, 48

_ODD = np.uint64(0x9E3779B97F4A7C15)
_ODD_TOO = np.uint64(0xBF58476D1CE4E5B9)


def tokens_of(conversation: int, length: int) -> np.ndarray:
    """Tokens of a conversation: 64 shared with 15 others, 150 with three others."""
    at = np.arange(length)
    group = np.where(at < 64, 0, np.where(at < 150, 1 + conversation // 4, 100 + conversation))
    return (at * 7919 + group * 104729 + at * group * 31) % 32000


def prefixes(tokens: Any) -> np.ndarray:
    """For each position a 64-bit number that follows from the tokens up to it."""
    ids = np.asarray(tokens).astype(np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(ids), _ODD, np.uint64))
        return _mixed(np.cumsum(ids * powers))


def rows(tokens: Any, layer: int, plane: int) -> np.ndarray:
    """The bits of a bfloat16 plane, uint16 ``[1, HEADS, N, WIDTH]``; layer 1 compresses well."""
    columns = np.arange(HEADS * WIDTH, dtype=np.uint64).reshape(1, HEADS, 1, WIDTH)
    seeds = _mixed(columns + np.uint64(1000 * (2 * layer + plane) + 1)) | np.uint64(1)
    with np.errstate(over="ignore"):
        bits = (prefixes(tokens)[None, None, :, None] * seeds) >> np.uint64(48)
    return (bits & 0x03FF | 0x3C00 if layer else bits).astype(np.uint16)


def state(tokens: Any, slot: int) -> np.ndarray:
    """The float32 bits of a recurrent state after ``tokens``, uint32 ``[1, 300]``."""
    columns = np.arange(300, dtype=np.uint64) + np.uint64(7 + 1000 * slot)
    with np.errstate(over="ignore"):
        mixed = _mixed(prefixes(tokens)[-1:] * (columns | np.uint64(1)) + columns)
    return (mixed >> np.uint64(40)).astype(np.uint32)[None]


def caches(kind: str, tokens: Any) -> list[Any]:
    """Live caches that cover ``tokens``; empty ones for no tokens."""
    first, second = _empty(kind)
    if len(tokens):
        first.keys, first.values = _planes(tokens, 0)
        first.offset = len(tokens)
        if kind == "recurrent":
            second.cache = [_floats(state(tokens, 0)), _floats(state(tokens, 1))]
        else:
            held = slice(-WINDOW if kind == "window" else None, None)
            second.keys, second.values = (x[..., held, :] for x in _planes(tokens, 1))
            second.offset = len(tokens)
            if kind == "window":
                second._idx = second.keys.shape[2]
                second.minimum_resumable_offset = 0
    mx.eval([x for cache in (first, second) for x in _arrays(cache)])
    return [first, second]


def wrong(kind: str, tokens: Any, offset: int, restored: list[Any]) -> str:
    """What is not as it must be in caches restored at ``offset``; nothing where all bits are."""
    tokens = tokens[:offset]
    first, second = restored
    if first.offset != offset:
        return f"offset {first.offset} instead of {offset}"
    pairs = [(first.keys, rows(tokens, 0, 0)), (first.values, rows(tokens, 0, 1))]
    if kind == "recurrent":
        pairs += [(second.cache[slot], state(tokens, slot)) for slot in (0, 1)]
    else:
        held = min(offset, WINDOW if kind == "window" else offset)
        for plane, array in enumerate((second.keys, second.values)):
            array = second._temporal_order(array) if kind == "window" else array
            array = array[..., -held:, :] if kind == "window" else array
            pairs.append((array, rows(tokens, 1, plane)[..., -held:, :]))
    for number, (array, bits) in enumerate(pairs):
        if array is None:
            return f"array {number} is missing"
        if kind != "recurrent" or number < 2:
            array = array[..., : bits.shape[2], :]
        if not np.array_equal(bits_of(array), bits):
            return f"array {number} has other bits at offset {offset}"
    return ""


def bits_of(array: Any) -> np.ndarray:
    """The raw bits of an MLX array."""
    return np.array(array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size]))


def _empty(kind: str) -> tuple[Any, Any]:
    from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

    if kind == "recurrent":
        return KVCache(), ArraysCache(2)
    return KVCache(), RotatingKVCache(WINDOW) if kind == "window" else KVCache()


def _planes(tokens: Any, layer: int) -> list[Any]:
    return [mx.array(rows(tokens, layer, plane)).view(mx.bfloat16) for plane in (0, 1)]


def _floats(bits: np.ndarray) -> Any:
    return mx.array(bits).view(mx.float32)


def _arrays(cache: Any) -> list[Any]:
    if hasattr(cache, "keys"):
        return [] if cache.keys is None else [cache.keys, cache.values]
    return [x for x in cache.cache if x is not None]


def _mixed(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * _ODD_TOO
        return x ^ (x >> np.uint64(27))
