"""Cache lists of several shapes whose every bit follows from the tokens.

Fed through mlx-lm's own updates, as a model would: the first ``prefill`` tokens at once, the
rest one by one. The slow obvious readers here share no code with the codecs.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from tests.faults.rows import bits_of, prefixes, rows, state

WINDOW, KEEP = 8, 3
BITS, GROUP = 4, 32

SHAPES = {
    "plain": ("kv", "kv"),
    "ring": ("kv", "ring"),
    "kept": ("kept", "kept"),
    "recurrent": ("kv", "arrays"),
    "nested": (("arrays", "kv"), "ring"),
    "arrays": ("arrays",),
    "delayed": ("kv", "quant"),
}
STATEFUL = {"recurrent", "nested", "arrays"}
RINGS = {"ring", "kept", "nested"}
BOUNDARIES = (5, 9)


def make(shape, tokens, prefill=None, boundary=None):
    """Live caches that cover ``tokens``; empty ones without tokens.

    ``boundary`` is where ``delayed`` caches were quantized; before it they are plain.
    """
    caches, _ = _build(SHAPES[shape], tokens, prefill or len(tokens), boundary, 0)
    mx.eval([array for cache in flat(caches) for array in arrays_of(cache)])
    return caches


def space_of(store, shape="plain", **options):
    """The space of a shape."""
    return store.space(identity={"shape": shape}, layout=make(shape, ()), **options)


def flat(caches):
    """The leaves of a cache list."""
    return [leaf for cache in caches for leaf in getattr(cache, "caches", [cache])]


def arrays_of(cache):
    """Every array that a leaf holds."""
    if isinstance(cache, ArraysCache):
        return [x for x in cache.cache if x is not None]
    if isinstance(cache, QuantizedKVCache):
        return [*cache.keys, *cache.values] if cache.keys is not None else []
    return [cache.keys, cache.values] if cache.keys is not None else []


def append(caches, tokens):
    """Feed the last of ``tokens`` to every leaf but recurrent ones; what attention would read."""
    read = []
    for layer, cache in enumerate(flat(caches)):
        if isinstance(cache, KVCache | RotatingKVCache):
            read += cache.update_and_fetch(*_planes(tokens, layer, len(tokens) - 1))
    mx.eval(read)
    return [bits_of(x) for x in read]


def words(tokens, layer, plane, boundary):
    """The bits of one quantized plane: packed words, scales and biases for K, then for V."""
    seed = np.uint64((boundary * 64 + layer * 8 + plane) * 2 + 1)
    with np.errstate(over="ignore"):
        mixed = prefixes(tokens) * seed * np.uint64(0x9E3779B97F4A7C15)
    if plane % 3:
        return (mixed >> np.uint64(48)).astype(np.uint16).reshape(1, 1, -1, 1)
    columns = np.arange(BITS, dtype=np.uint64) * np.uint64(7)
    packed = (mixed[:, None] >> columns).astype(np.uint32)
    return packed.reshape(1, 1, -1, BITS)


def problem(shape, tokens, restored, boundary=None):
    """What is wrong with caches that were restored to cover ``tokens``; nothing if nothing is.

    ``boundary`` is what the first quantized leaf must say, where there is one.
    """
    for layer, (kind, cache) in enumerate(zip(_kinds(shape), flat(restored), strict=True)):
        found = _CHECKS[kind](cache, tokens, layer, boundary)
        if found:
            return f"layer {layer} ({type(cache).__name__}): {found}"
    return ""


def held_by_ring(cache):
    """The position in each slot of a ring, -1 for none: by playing it back."""
    slots = cache.keys.shape[2]
    if cache.offset <= slots:
        return np.array([i if i < cache.offset else -1 for i in range(slots)])
    positions = list(range(cache.keep))
    newest = list(range(cache.offset - (slots - cache.keep), cache.offset))
    turn = slots - cache._idx
    return np.array(positions + newest[turn:] + newest[:turn])


def _kinds(shape):
    for kind in SHAPES[shape]:
        yield from kind if isinstance(kind, tuple) else (kind,)


def _build(kinds, tokens, prefill, boundary, layer):
    out = []
    for kind in kinds:
        if isinstance(kind, tuple):
            inner, layer = _build(kind, tokens, prefill, boundary, layer)
            out.append(CacheList(*inner))
            continue
        out.append(_leaf(kind, tokens, prefill, boundary, layer))
        layer += 1
    return out, layer


def _leaf(kind, tokens, prefill, boundary, layer):
    length = len(tokens)
    if kind == "arrays":
        cache = ArraysCache(3)
        if length:
            cache[1], cache[2] = (mx.array(state(tokens, slot)) for slot in (1, 2))
        return cache
    if kind == "quant" and boundary is not None and length >= boundary:
        return _quantized(tokens, layer, boundary)
    if kind in ("ring", "kept"):
        cache = RotatingKVCache(WINDOW, KEEP if kind == "kept" else 0)
        cache.minimum_resumable_offset = 0
    else:
        cache = KVCache()
    if length:
        cache.update_and_fetch(*_planes(tokens[:prefill], layer))
    for stop in range(prefill + 1, length + 1):
        cache.update_and_fetch(*_planes(tokens[:stop], layer, stop - 1))
    return cache


def _quantized(tokens, layer, boundary):
    cache = QuantizedKVCache(GROUP, BITS)
    planes = [mx.array(words(tokens, layer, plane, boundary)) for plane in range(6)]
    planes = [x if i % 3 == 0 else x.view(mx.bfloat16) for i, x in enumerate(planes)]
    cache.keys, cache.values, cache.offset = tuple(planes[:3]), tuple(planes[3:]), len(tokens)
    cache.minimum_resumable_offset = boundary
    return cache


def _planes(tokens, layer, start=0):
    return [mx.array(rows(tokens, layer, p)[..., start:, :]).view(mx.bfloat16) for p in (0, 1)]


def _check_kv(cache, tokens, layer, boundary):
    if type(cache) is not KVCache or cache.offset != len(tokens):
        return f"offset {cache.offset} for {len(tokens)} tokens"
    for plane, array in enumerate((cache.keys, cache.values)):
        if not np.array_equal(bits_of(array)[..., : len(tokens), :], rows(tokens, layer, plane)):
            return f"plane {plane} has other bits"
    return ""


def _check_ring(cache, tokens, layer, boundary):
    if type(cache) is not RotatingKVCache or cache.offset != len(tokens):
        return f"offset {cache.offset} for {len(tokens)} tokens"
    at = held_by_ring(cache)
    needed = {*range(min(cache.keep, len(tokens)))}
    needed |= {*range(max(0, len(tokens) - cache.max_size + cache.keep), len(tokens))}
    if len(tokens) <= cache.max_size:
        needed = {*range(len(tokens))}
    if not needed <= set(at.tolist()):
        return f"positions {sorted(needed - set(at.tolist()))} are not in the ring"
    for plane, array in enumerate((cache.keys, cache.values)):
        wanted = rows(tokens, layer, plane)[..., at[at >= 0], :]
        if not np.array_equal(bits_of(array)[..., at >= 0, :], wanted):
            return f"plane {plane} has other bits"
    return ""


def _check_arrays(cache, tokens, layer, boundary):
    if cache[0] is not None:
        return "slot 0 is set"
    for slot in (1, 2):
        if not np.array_equal(np.array(cache[slot]), state(tokens, slot)):
            return f"slot {slot} is not the state of {len(tokens)} tokens"
    return ""


def _check_quant(cache, tokens, layer, boundary):
    if type(cache) is KVCache:
        return _check_kv(cache, tokens, layer, boundary) if boundary is None else "not quantized"
    if (cache.bits, cache.group_size, cache.offset) != (BITS, GROUP, len(tokens)):
        return f"offset {cache.offset} for {len(tokens)} tokens"
    if cache.minimum_resumable_offset != boundary:
        return f"boundary {cache.minimum_resumable_offset}, not {boundary}"
    for plane, array in enumerate((*cache.keys, *cache.values)):
        wanted = words(tokens, layer, plane, boundary)
        got = np.array(array if array.dtype == mx.uint32 else array.view(mx.uint16))
        if not np.array_equal(got[..., : len(tokens), :], wanted):
            return f"plane {plane} has other bits"
    return ""


_CHECKS = {
    "kv": _check_kv,
    "ring": _check_ring,
    "kept": _check_ring,
    "arrays": _check_arrays,
    "quant": _check_quant,
}
