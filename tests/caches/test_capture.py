"""Captures: the owner's read to the bit, copies of their own, and nothing of the cache alive."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvkeep.caches import reads
from kvkeep.caches.capture import PADDING, capture
from kvkeep.caches.delayed import DelayedKVCache
from kvkeep.caches.paged import PagedKVCache
from kvkeep.caches.quantized import DenseQuantizedKVCache
from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache
from kvkeep.caches.turboquant import TurboQuantKVCache
from kvkeep.errors import EmptyCache, UnknownCache

WIDTH, HEADS, SCALE = 64, 2, 0.125
RING = 24


def random(seed, *shape, dtype=mx.float32):
    return mx.array(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def rows(seed, count, batch=1):
    return random(seed, batch, HEADS, count, WIDTH), random(seed + 1, batch, HEADS, count, WIDTH)


def bits(capture):
    planes = tree_flatten([capture.keys, capture.values])
    places = (capture.offsets, capture.starts, capture.ends, capture.positions)
    return [np.array(x.view(mx.uint8)) for x in (*(x for _, x in planes), *places)]


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def fed(cache, *counts, batch=1):
    for number, count in enumerate(counts):
        cache.update_and_fetch(*rows(10 * number + count, count, batch))
    return cache


MAKERS = {
    "kv": KVCache,
    "kv-concat": ConcatenateKVCache,
    "kv-quant": lambda: QuantizedKVCache(group_size=32, bits=4),
    "kv-quant, read densely": lambda: DenseQuantizedKVCache(bits=4, group_size=32),
    "kv-rotating": lambda: RotatingKVCache(RING),
    "kv-rotating, keeping": lambda: RotatingKVCache(RING, keep=3),
    "kv-rotating-quant": lambda: RotatingQuantizedKVCache(RING, bits=8, group_size=32),
    "kv-chunked": lambda: ChunkedKVCache(64),
    "kv-turboquant": TurboQuantKVCache,
    "kv-paged": lambda: PagedKVCache(8),
    "kv-paged, one block": lambda: PagedKVCache(512),
    "delayed": lambda: DelayedKVCache(bits=4, group_size=32, start=1000),
    "delayed, converted": lambda: DelayedKVCache(bits=4, group_size=32, start=5),
    "delayed ring, converted": lambda: DelayedKVCache(
        bits=4, group_size=32, start=5, source=RotatingKVCache(RING)
    ),
    "delayed, lent": lambda: DelayedKVCache(bits=4, group_size=32, start=41, lent=True),
}


COUNTS = ((7, 1), (40, 1), (40, 1, 1), (1, 6), (30, 5))
APART = {
    # What converts in the last append is read once more as it was, and lent only if asked to.
    ("delayed, converted", (1, 6)),
    ("delayed ring, converted", (1, 6)),
    # mlx-lm's mask counts slots, and forgets the kept positions in a forward of several.
    ("kv-rotating, keeping", (30, 5)),
}


@pytest.mark.parametrize(
    ("kind", "counts"), [(k, c) for k in MAKERS for c in COUNTS if (k, c) not in APART]
)
def test_a_borrower_reads_what_the_owner_reads(kind, counts):
    cache = fed(MAKERS[kind](), *counts[:-1])
    mask = reads.mask_of(cache, counts[-1])
    read = cache.update_and_fetch(*rows(99, counts[-1]))
    queries = random(7, 1, 2 * HEADS, counts[-1], WIDTH)
    held = capture(cache)
    window = RING if "ring" in kind or "rotating" in kind else None
    found = held.attend(queries, SCALE, window=window)
    expected = scaled_dot_product_attention(
        mx.array(queries), *read, cache=cache, scale=SCALE, mask=mask
    )
    assert_same([np.array(found)], [np.array(expected)])
    assert_same([np.array(held.attend(queries, SCALE, window=window))], [np.array(found)])
    assert held.offsets.tolist() == [sum(counts)]


def positions(capture):
    return capture.positions.tolist()


def test_positions_say_what_lies_in_each_slot():
    assert positions(capture(fed(KVCache(), 3))) == [[0, 1, 2]]
    ring = fed(RotatingKVCache(4), *[1] * 6)
    assert positions(capture(ring)) == [[4, 5, 2, 3]]
    assert positions(capture(fed(RotatingKVCache(4, keep=1), *[1] * 6))) == [[0, 4, 5, 3]]
    assert positions(capture(fed(RotatingKVCache(4), 7))) == [[0, 1, 2, 3, 4, 5, 6]]
    chunked = fed(ChunkedKVCache(4), 7)
    chunked.maybe_trim_front()
    assert positions(capture(chunked)) == [[3, 4, 5, 6]]
    concatenated = fed(ConcatenateKVCache(), 7)
    concatenated.trim(4)
    held = capture(concatenated)
    assert (positions(held), held.keys.shape[2]) == ([[0, 1, 2]], 3)


def test_rows_of_a_batch_have_their_own_places():
    cache = fed(BatchKVCache([2, 0, 4]), 6, 1, batch=3)
    held = capture(cache)
    assert held.offsets.tolist() == [5, 7, 3]
    assert held.starts.tolist() == [2, 0, 4]
    assert held.ends.tolist() == [7, 7, 7]
    assert positions(held)[0] == [PADDING, PADDING, 0, 1, 2, 3, 4]
    assert positions(held)[2] == [PADDING] * 4 + [0, 1, 2]
    assert {x.dtype for x in (held.offsets, held.starts, held.ends, held.positions)} == {mx.int32}
    queries = random(3, 3, 2 * HEADS, 1, WIDTH)
    mask = cache.make_mask(0 + 1)[..., : cache._idx]
    read = reads.DenseRead(*cache.keys_and_values(), mask)
    assert_same([np.array(held.attend(queries, SCALE))], [np.array(read.attend(queries, SCALE))])
    # Padding is never visible: a row reads as it does alone.
    for row in range(3):
        alone = capture(cache.extract(row)).attend(queries[row : row + 1], SCALE)
        np.testing.assert_allclose(
            np.array(held.attend(queries, SCALE))[row], np.array(alone)[0], atol=1e-6
        )


def plainly(held, queries, ahead, window):
    """Attention in float64, one query and one head at a time, by positions."""
    keys, values = (np.array(x, np.float64) for x in held.rows())
    out = np.zeros((*queries.shape[:3], values.shape[-1]))
    length, group = queries.shape[2], queries.shape[1] // keys.shape[1]
    seen = 0
    for b, h, i in np.ndindex(*queries.shape[:3]):
        at = held.offsets[b].item() - length + ahead + i
        lies = np.array(held.positions[b])
        visible = (lies >= 0) & (lies <= at)
        if window is not None:
            visible &= (lies > at - window) | (lies < held.keep)
        scores = keys[b, h // group][visible] @ np.array(queries[b, h, i], np.float64) * SCALE
        weights = np.exp(scores - scores.max())
        out[b, h, i] = weights / weights.sum() @ values[b, h // group][visible]
        seen += visible.sum()
    assert seen
    return out


CASES = {
    "kv": lambda: fed(KVCache(), 11),
    "kv-quant": lambda: fed(QuantizedKVCache(group_size=32, bits=8), 11),
    "ring": lambda: fed(RotatingKVCache(8, keep=2), 9, *[1] * 5),
    "ring after a prefill": lambda: fed(RotatingKVCache(8), 12),
    "batch": lambda: fed(BatchKVCache([3, 0]), 8, 1, 1, batch=2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("window", [None, 4, 8])
def test_a_query_sees_the_positions_up_to_its_own(case, length, window):
    held = capture(CASES[case]())
    queries = random(5, held.offsets.size, 2 * HEADS, length, WIDTH)
    for ahead in (0, 1, length, length + 2):
        if window is not None and ahead >= window:
            continue
        found = held.attend(queries, SCALE, ahead=ahead, window=window)
        np.testing.assert_allclose(
            np.array(found), plainly(held, queries, ahead, window), rtol=1e-3, atol=1e-4
        )


def test_sinks_take_weight():
    held, sinks = capture(fed(KVCache(), 9)), mx.array([0.5, -1.0, 2.0, 0.0])
    queries = random(5, 1, 4, 1, WIDTH)
    assert not np.allclose(held.attend(queries, SCALE, sinks=sinks), held.attend(queries, SCALE))
    with pytest.raises(ValueError, match="no attention sinks"):
        capture(fed(QuantizedKVCache(group_size=32), 9)).attend(queries, SCALE, sinks=sinks)


@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_that_happens_later_changes_it(kind):
    """Appends in place and past the buffer, a trim, a conversion, and a write by hand."""
    cache = fed(MAKERS[kind](), 20)
    held = capture(cache)
    before = bits(held)
    fed(cache, 1, 1, 300)
    cache.trim(2)
    fed(cache, 1)
    if isinstance(cache, KVCache):
        cache.to_quantized(group_size=32, bits=4)
    for _, plane in tree_flatten(cache.state):
        if isinstance(plane, mx.array):
            plane[...] = 0
    mx.eval([x for _, x in tree_flatten(cache.state) if isinstance(x, mx.array)])
    assert_same(bits(held), before)


def test_the_counters_of_a_batch_are_copies():
    cache = fed(BatchKVCache([2, 0]), 6, batch=2)
    held = capture(cache)
    before = bits(held)
    cache.prepare(right_padding=[1, 0])
    cache.finalize()
    fed(cache, 3, batch=2)
    cache.filter([1])
    assert_same(bits(held), before)


def test_a_conversion_in_place_changes_what_is_read_and_not_the_capture():
    cache = fed(DelayedKVCache(bits=4, group_size=32, start=21), 20)
    held = capture(cache)
    before = bits(held)
    fed(cache, 1, 1)
    assert cache.converted
    assert capture(cache).bits == 4
    assert held.bits is None
    assert_same(bits(held), before)
    np.testing.assert_array_equal(held.rows()[0], rows(20, 20)[0])


def test_it_keeps_nothing_of_the_cache_alive():
    megabyte = 1 << 20
    cache = KVCache()
    cache.update_and_fetch(*(mx.zeros((1, 1, 8192, 256)) for _ in range(2)))
    cache.trim(8000)
    mx.eval(cache.keys, cache.values)
    before = mx.get_active_memory()
    held = capture(cache)
    mx.eval(held.keys, held.values, held.positions)
    assert held.nbytes == 2 * 192 * 256 * 4
    assert mx.get_active_memory() - before < megabyte
    # The next append writes into the cache's buffers: a held one would be copied whole.
    row = mx.zeros((1, 1, 1, 256))
    mx.eval(row)
    mx.reset_peak_memory()
    at_rest = mx.get_active_memory()
    mx.eval(cache.update_and_fetch(row, row)[0][..., :1, :1], cache.keys, cache.values)
    assert mx.get_peak_memory() - at_rest < megabyte
    del cache
    assert before - mx.get_active_memory() > 14 * megabyte


def test_it_can_be_made_inside_a_trace():
    def step(keys, queries):
        cache = KVCache()
        cache.update_and_fetch(keys, keys)
        return capture(cache, evaluate=False).attend(queries, SCALE)

    keys, queries = random(1, 1, HEADS, 5, WIDTH), random(2, 1, 4, 1, WIDTH)
    found, expected = mx.compile(step)(keys, queries), step(keys, queries)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-6)


@pytest.mark.parametrize(
    ("cache", "error", "match"),
    [
        (KVCache(), EmptyCache, "KVCache covers no token"),
        (ArraysCache(2), UnknownCache, "ArraysCache holds no keys and values"),
        (CacheList(KVCache()), UnknownCache, "CacheList holds no keys and values"),
        (object(), UnknownCache, "object holds no keys and values"),
        (fed(BatchRotatingKVCache(8, [0, 0]), 3, batch=2), UnknownCache, "as a batch"),
    ],
)
def test_what_cannot_be_captured_is_named(cache, error, match):
    with pytest.raises(error, match=match):
        capture(cache)
