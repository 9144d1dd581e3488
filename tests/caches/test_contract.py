from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvkeep.caches.adapters import adapt
from kvkeep.caches.chunked_quant import ChunkedQuantizedKVCache
from kvkeep.caches.contract import (
    Cache,
    Composed,
    OwnsRead,
    PlannedPrefill,
    floor_of,
    max_append_of,
)
from kvkeep.caches.delayed import DelayedKVCache
from kvkeep.caches.quantized import DenseQuantizedKVCache
from kvkeep.caches.reads import DenseRead, PackedRead
from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache
from kvkeep.codecs import codec_for
from kvkeep.codecs.base import Composite
from kvkeep.errors import BadScheme, UnknownCache
from tests.codecs.contract import Rows, same_bits
from tests.codecs.shuttle import bits

WIDE = Rows(k_width=64, v_width=64)


def quantized_from_token_zero():
    cache = QuantizedKVCache(32, 4)
    cache.minimum_resumable_offset = 0
    return cache


OURS = {
    "dense": partial(DenseQuantizedKVCache, 4, 32),
    "ring": partial(RotatingQuantizedKVCache, 16, 4, 4, 32),
    "chunked": partial(ChunkedQuantizedKVCache, 16, 4, 32),
    "delayed": partial(DelayedKVCache, 4, 32, 12),
    "delayed, dense": partial(DelayedKVCache, 4, 32, 12, dense=True),
    "delayed ring": lambda: DelayedKVCache(4, 32, 12, source=RotatingKVCache(16, 4)),
    "delayed chunk": lambda: DelayedKVCache(4, 32, 12, source=ChunkedKVCache(16)),
}
MLX_LM = {
    "kv": KVCache,
    "kv-quant": quantized_from_token_zero,
    "kv-rotating": partial(RotatingKVCache, 16, 4),
    "kv-chunked": partial(ChunkedKVCache, 16),
    "kv-concat": ConcatenateKVCache,
}
ALL = {**OURS, **MLX_LM}
PLAN = (7, 1, 1, 6, 1, 1, 1, 9, 1)
"""Appends before and after the start of the delayed ones; rings and chunks overflow."""


def fed(make, counts=PLAN):
    cache = make()
    for count in counts:
        feed(cache, count)
    return cache


def feed(cache, count):
    cut_front(cache)
    return cache.update_and_fetch(*WIDE.at(cache.offset, cache.offset + count))


def cut_front(cache):
    held = getattr(cache, "caches", [cache])[0]
    if hasattr(held, "maybe_trim_front"):
        held.maybe_trim_front()


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_everything_satisfies_the_contract(make):
    cache = adapt(make())
    assert isinstance(cache, Cache)
    assert isinstance(cache, OwnsRead)
    assert cache.bytes_per_token() == cache.offset == cache.minimum_resumable_offset == 0
    assert isinstance(cache, Composed) == isinstance(cache, PlannedPrefill)
    assert isinstance(cache, PlannedPrefill) == cache.kind.startswith("delayed")


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
@pytest.mark.parametrize("counts", [(1,), (7, 1), (12,), (41,), PLAN])
def test_the_contract_and_the_codec_agree(make, counts):
    cache = fed(make, counts)
    seen = adapt(cache)
    held = cache
    codec = codec_for(cache)
    if isinstance(codec, Composite):
        assert codec.spelled([codec_for(cache.caches[0]).kind]) == seen.kind
        [held] = codec.children(cache)
        codec = codec_for(held)
    else:
        assert codec.kind == seen.kind
    facts = codec.describe(held)
    assert seen.offset == facts.offset
    assert seen.minimum_resumable_offset == facts.floor
    assert seen.bytes_per_token() == facts.bytes_per_token > 0


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
@pytest.mark.parametrize("counts", [(), (5,), (12,), PLAN])
def test_ours_satisfy_mlx_lm_s_protocol(make, counts):
    cache = fed(make, counts)
    assert cache.empty() == (not counts)
    assert cache.nbytes >= cache.bytes_per_token() * cache.size()
    assert 0 <= cache.size() <= cache.offset == sum(counts)
    again = type(cache).from_state(cache.state)
    mx.eval(cache.state)
    compared = 0
    for count in (1, 5, 1):
        compared += same_bits(feed(again, count), feed(cache, count))
        assert again.minimum_resumable_offset == cache.minimum_resumable_offset
    assert compared > 0


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
@pytest.mark.parametrize("counts", [(9,), (9, 1, 1)])
def test_a_trim_drops_the_newest(make, counts):
    cache, shorter = fed(make, counts), fed(make, (sum(counts) - 4,))
    seen = adapt(cache)
    assert seen.is_trimmable()
    floor = seen.minimum_resumable_offset
    assert seen.trim(4) == 4
    assert seen.minimum_resumable_offset == floor
    assert same_bits(feed(cache, 1), feed(shorter, 1)) > 0
    assert seen.trim(100) == sum(counts) - 3
    assert seen.offset == 0


@pytest.mark.parametrize("name", ["ring", "chunked", "kv-rotating", "kv-chunked", "delayed ring"])
def test_a_window_that_lost_positions_is_not_trimmable(name):
    assert not adapt(fed(ALL[name])).is_trimmable()


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_reads_outlive_later_appends(make):
    """Each read answers the same before and after the others, a trim and a conversion."""
    reading, plain = make(), make()
    seen, reads, answers, compared = adapt(reading), [], [], 0
    for step, count in enumerate(PLAN):
        start = reading.offset
        cut_front(plain)
        mask = mask_of(plain, count)
        rows = WIDE.at(start, start + count)
        read = (seen.append_decode if count == 1 else seen.append_window)(*rows)
        queries = queries_at(step, count)
        held = plain.update_and_fetch(*rows)
        wanted = scaled_dot_product_attention(
            mx.array(queries), *held, cache=plain, scale=0.1, mask=mask
        )
        assert np.array_equal(bits(read.attend(queries, 0.1)), bits(wanted))
        reads.append((read, queries))
        answers.append(bits(wanted))
        compared += wanted.size
    if seen.is_trimmable():
        seen.trim(3)
    for (read, queries), answer in zip(reads, answers, strict=True):
        for _ in range(2):
            assert np.array_equal(bits(read.attend(queries, 0.1)), answer)
    assert compared > 0


def mask_of(cache, count):
    held = getattr(cache, "caches", [cache])[0]
    if hasattr(held, "chunk_size"):
        seen = np.arange(held.start_position, held.offset + count)
        mine = np.arange(held.offset, held.offset + count)[:, None]
        return mx.array((seen <= mine) & (seen // held.chunk_size == mine // held.chunk_size))
    return cache.make_mask(count, return_array=False, window_size=None)


def queries_at(step, count):
    return mx.random.normal((1, 4, count, 64), mx.bfloat16, key=mx.random.key(step))


def test_sinks_are_read_densely_and_refused_by_planes():
    sinks = mx.array([0.5, -1.0, 2.0, 0.0], mx.bfloat16)
    rows, queries = WIDE.at(0, 5), queries_at(0, 5)
    cache = DenseQuantizedKVCache(8, 32)
    read = cache.append_window(*rows)
    assert isinstance(read, DenseRead)
    with_sinks = read.attend(queries, 0.1, sinks=sinks)
    wanted = mx.fast.scaled_dot_product_attention(
        queries, *cache.keys_and_values(), scale=0.1, mask="causal", sinks=sinks
    )
    assert np.array_equal(bits(with_sinks), bits(wanted))
    assert not np.array_equal(bits(with_sinks), bits(read.attend(queries, 0.1)))
    packed = adapt(QuantizedKVCache(32, 8)).append_window(*rows)
    assert isinstance(packed, PackedRead)
    with pytest.raises(ValueError, match="knows no attention sinks"):
        packed.attend(queries, 0.1, sinks=sinks)


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_the_method_is_the_phase(make):
    cache = adapt(make())
    with pytest.raises(ValueError, match="takes one position per row, not 3"):
        cache.append_decode(*WIDE.at(0, 3))
    assert cache.offset == 0


def test_masks_of_a_ring_are_those_of_the_plain_ring():
    plain, cache, compared = RotatingKVCache(16), RotatingQuantizedKVCache(16, 0, 4, 32), 0
    for count in PLAN:
        for length in (1, 4):
            for window in (None, 10):
                mine, its = (c.make_mask(length, window_size=window) for c in (cache, plain))
                assert type(mine) is type(its)
                if isinstance(its, mx.array):
                    assert np.array_equal(np.array(mine), np.array(its))
                    compared += its.size
        feed(plain, count)
        feed(cache, count)
    assert compared > 0


def test_the_mask_of_a_window_hides_what_lies_before_it():
    cache = RotatingQuantizedKVCache(16, 0, 8, 32)
    feed(cache, 20)
    mask = np.array(cache.make_mask(3, return_array=True))
    assert np.array_equal(mask, np.array(create_causal_mask(3, 15, window_size=16)))


@pytest.mark.parametrize(
    "cache", [object(), BatchKVCache([0, 1]), type("Mine", (), {"offset": 3})()]
)
def test_a_class_without_a_kind_fails_closed(cache):
    with pytest.raises(UnknownCache, match=type(cache).__name__):
        adapt(cache)


def test_recurrent_state_has_no_offset_and_no_bytes_per_token():
    cache = adapt(ArraysCache(2))
    assert (cache.kind, cache.bytes_per_token(), cache.is_trimmable()) == ("arrays", 0, False)
    assert cache.max_append() is None
    with pytest.raises(UnknownCache, match="no offset of its own"):
        _ = cache.offset


def test_a_list_answers_for_all_that_is_inside():
    inner = [DelayedKVCache(4, 32, 12), KVCache(), RotatingKVCache(16, 4)]
    cache = adapt(CacheList(*inner))
    assert cache.kind == "list(delayed(kv,kv-quant),kv,kv-rotating)"
    for each in inner:
        feed(each, 9)
    assert (cache.offset, cache.max_append(), cache.minimum_resumable_offset) == (9, 3, 0)
    for each in inner:
        feed(each, 4)
    assert (cache.max_append(), cache.minimum_resumable_offset) == (None, 13)
    assert cache.bytes_per_token() == sum(adapt(each).bytes_per_token() for each in inner)
    assert cache.is_trimmable()
    assert cache.trim(2) == 2
    assert {each.offset for each in inner} == {11}
    feed(inner[2], 9)
    assert not cache.is_trimmable()
    state = adapt(CacheList(ArraysCache(1), inner[1]))
    assert (state.kind, state.offset, state.minimum_resumable_offset) == ("list(arrays,kv)", 11, 11)


def test_a_model_s_floor_and_limit():
    caches = [adapt(x) for x in (DelayedKVCache(4, 32, 12), DelayedKVCache(4, 32, 20), KVCache())]
    assert (floor_of(caches), max_append_of(caches)) == (0, 12)
    for cache in caches:
        feed(getattr(cache, "cache", cache), 15)
    assert (floor_of(caches), max_append_of(caches)) == (15, 5)
    assert (floor_of([]), max_append_of([])) == (0, None)


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_it_costs_what_its_planes_hold(make):
    """Memory per token, as said, is what is allocated for many of them."""
    cache = fed(make, (15,))
    keys, values = getattr(cache, "caches", [cache])[0].state[:2]
    slots = keys[0].shape[2]
    assert cache.nbytes == cache.bytes_per_token() * slots
    # 4 bits a value and two halves a group of 32, for keys and values of two heads of 64.
    assert cache.bytes_per_token() == 2 * 2 * (64 // 2 + 2 * 2 * 2)
    assert sum(plane.nbytes for side in (keys, values) for plane in side) == cache.nbytes


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: DenseQuantizedKVCache(7, 32), "no width 7"),
        (lambda: DenseQuantizedKVCache(True, 32), "no width True"),
        (lambda: RotatingQuantizedKVCache(16, 16), "ring of 16 positions cannot keep 16"),
        (lambda: RotatingQuantizedKVCache(16, -1), "cannot keep -1"),
        (lambda: ChunkedQuantizedKVCache(0), "chunk of 0 positions"),
    ],
)
def test_what_cannot_be_is_refused(make, problem):
    with pytest.raises(BadScheme, match=problem):
        make()


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
@pytest.mark.parametrize(("k", "v", "side"), [(48, 64, "Keys"), (64, 80, "Values")])
def test_a_head_that_is_no_whole_groups_is_refused_at_once(make, k, v, side):
    """Also by a delayed cache, long before it converts."""
    cache = make()
    problem = f"{side} of head size .* no whole groups of 32; no valid group size divides it"
    with pytest.raises(BadScheme, match=problem):
        cache.update_and_fetch(mx.ones((1, 2, 3, k)), mx.ones((1, 2, 3, v)))
    assert (cache.offset, cache.empty()) == (0, True)
    feed(cache, 3)
    assert cache.offset == 3
