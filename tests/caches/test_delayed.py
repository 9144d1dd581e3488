from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from kvkeep.caches import make
from kvkeep.caches.delayed import DelayedKVCache
from kvkeep.caches.quantized import DenseQuantizedKVCache
from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache
from kvkeep.errors import BadScheme
from tests.architectures import build
from tests.caches.runs import PROMPT, equal_steps, forward, generated
from tests.codecs.contract import Rows, same_bits

WIDE = Rows(k_width=64, v_width=32)


def feed(cache, count):
    return cache.update_and_fetch(*WIDE.at(cache.offset, cache.offset + count))


def delayed(start, **options):
    return DelayedKVCache(4, 32, start, **options)


def boundary(start, chunks):
    """Where a run in these chunks converts, by the rule of mlx-lm."""
    offset = 0
    for chunk in chunks:
        offset += chunk
        if offset >= start:
            return offset
    return None


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.mark.parametrize("bits", [4, 8, 3])
@pytest.mark.parametrize("start", [0, 1, 16, 17, 39, 40, 45, 1000])
def test_equals_converting_afterwards_at_every_step(llama, start, bits):
    mine = make(llama, f"affine:{bits}:32@{start}")
    theirs = make_prompt_cache(llama)
    steps = equal_steps(
        generated(llama, mine),
        generated(llama, theirs, kv_bits=bits, kv_group_size=32, quantized_kv_start=start),
    )
    assert steps == 12
    # It begins the forward of a thirteenth answer.
    chunks = (16, 16, 7, *[1] * 13)
    compared = 0
    for ours, its in zip(mine, theirs, strict=True):
        assert ours.converted == isinstance(its, QuantizedKVCache) == (start < 1000)
        assert ours.offset == its.offset == sum(chunks)
        compared += same_bits(
            mx_cut(ours.caches[0].keys, ours.offset), mx_cut(its.keys, its.offset)
        )
        if ours.converted:
            assert ours.minimum_resumable_offset == boundary(start, chunks)
            assert ours.caches[0].minimum_resumable_offset == boundary(start, chunks)
    assert compared > 0


def mx_cut(side, offset):
    return [x[:, :, :offset] for x in (side if isinstance(side, tuple | list) else (side,))]


def test_start_0_is_not_quantized_from_token_zero(llama):
    """The first chunk is read in full precision, so its answers are those without a scheme."""
    chunk = PROMPT[:16]
    plain = forward(llama, make(llama, "bf16"), chunk)
    later = make(llama, "affine:4:32@0")
    at_once = make(llama, "affine:4:32")
    assert np.array_equal(forward(llama, later, chunk), plain)
    assert not np.array_equal(forward(llama, at_once, chunk), plain)
    assert [cache.minimum_resumable_offset for cache in later] == [16, 16]
    assert [cache.minimum_resumable_offset for cache in at_once] == [0, 0]


@pytest.mark.parametrize(
    ("start", "chunks", "expected"),
    [
        (0, (1,), 1),
        (0, (7, 3), 7),
        (512, (312, 250), 562),
        (512, (512,), 512),
        (512, (511, 1), 512),
        (512, (511,), None),
    ],
)
@pytest.mark.parametrize("source", [KVCache, lambda: RotatingKVCache(16, 4)])
def test_boundary_and_floor(start, chunks, expected, source):
    cache = delayed(start, source=source())
    for chunk in chunks:
        limit = cache.max_append()
        assert limit == (None if cache.converted else max(0, start - cache.offset))
        feed(cache, chunk)
    assert cache.converted == (expected is not None)
    if expected is not None:
        assert cache.minimum_resumable_offset == expected
        assert cache.caches[0].minimum_resumable_offset == expected
        assert cache.max_append() is None


@pytest.mark.parametrize("dense", [False, True])
def test_the_converting_append_is_read_in_full_precision(dense):
    cache, plain = delayed(12, dense=dense), KVCache()
    feed(cache, 5)
    plain.update_and_fetch(*WIDE.at(0, 5))
    read = feed(cache, 9)
    assert cache.converted
    assert not hasattr(cache, "bits")
    assert same_bits(read, plain.update_and_fetch(*WIDE.at(5, 14))) > 0
    after = feed(cache, 1)
    assert hasattr(cache, "bits") != dense
    held = cache.caches[0]
    assert type(held) is (DenseQuantizedKVCache if dense else QuantizedKVCache)
    assert isinstance(after[0], mx.array) == dense


def test_is_irreversible():
    """A verify window that crosses the start converts, though its tail is rejected."""
    cache = delayed(12)
    feed(cache, 10)
    feed(cache, 5)
    assert cache.trim(4) == 4
    assert (cache.offset, cache.converted, cache.minimum_resumable_offset) == (11, True, 15)
    feed(cache, 1)
    assert cache.converted
    assert cache.trim(100) == 12
    feed(cache, 3)
    assert cache.converted


def test_one_layer_at_a_time(llama):
    """When a layer converts, no earlier one still holds its plain rows besides."""
    caches = make(llama, "affine:4:32@8")
    order = []
    for number, cache in enumerate(caches):
        convert = cache._convert

        def noted(plain, number=number, convert=convert):
            order.append((number, [c.converted for c in caches]))
            return convert(plain)

        cache._convert = noted
    forward(llama, caches, PROMPT[:9])
    assert order == [(0, [False, False]), (1, [True, False])]


@pytest.mark.parametrize("cuts", [(), (10,), (14,), (10, 14, 15)])
def test_a_split_forward_does_not_move_the_boundary(llama, cuts):
    """A chunk of 16 is planned, and read in parts for siblings that part inside it."""
    caches = make(llama, "affine:4:32@9")
    forward(llama, caches, PROMPT[:4])
    edges = [4, *cuts, 20]
    for cache in caches:
        cache.plan(20)
    for start, stop in pairwise(edges):
        assert not any(cache.converted for cache in caches)
        forward(llama, caches, PROMPT[start:stop])
    assert [cache.minimum_resumable_offset for cache in caches] == [20, 20]
    unplanned = make(llama, "affine:4:32@9")
    for start, stop in pairwise([0, *edges]):
        forward(llama, unplanned, PROMPT[start:stop])
    expected = edges[1]
    assert [cache.minimum_resumable_offset for cache in unplanned] == [expected] * 2


def test_two_siblings_commit_their_own_boundaries(llama):
    """The second takes over the first's rows in the middle of its chunk, and plans its own end."""
    first, second = make(llama, "affine:4:32@9"), make(llama, "affine:4:32@9")
    for cache in first:
        cache.plan(20)
    forward(llama, first, PROMPT[:12])
    for cache, other in zip(first, second, strict=True):
        keys, values = cache.keys_and_values()
        other.caches[0].update_and_fetch(mx.array(keys), mx.array(values))
        other.plan(15)
    forward(llama, second, PROMPT[12:15])
    forward(llama, first, PROMPT[12:20])
    assert [c.minimum_resumable_offset for c in first] == [20, 20]
    assert [c.minimum_resumable_offset for c in second] == [15, 15]


def test_a_plan_lies_ahead():
    cache = delayed(12)
    feed(cache, 5)
    with pytest.raises(BadScheme, match="cannot end at 4; 5 positions are held"):
        cache.plan(4)


def test_lent_rows_are_those_of_the_last_append():
    cache, kept = delayed(12, lent=True), delayed(12)
    for x in (cache, kept):
        feed(x, 5)
    read = feed(cache, 9)
    feed(kept, 9)
    assert same_bits(cache.keys_and_values(), read) > 0
    # Without borrowers nothing keeps the plain rows alive; what is given out are the planes.
    dense = kept.keys_and_values()
    assert [x.shape for x in dense] == [x.shape for x in read]
    assert not np.array_equal(np.array(dense[0].view(mx.uint16)), np.array(read[0].view(mx.uint16)))
    read = feed(cache, 1)
    assert same_bits(cache.keys_and_values(), read) > 0


@pytest.mark.parametrize("source", [KVCache, lambda: RotatingKVCache(16, 4)])
@pytest.mark.parametrize("counts", [(), (5,), (30,)])
def test_its_state_makes_it_again(source, counts):
    cache = delayed(12, source=source())
    for count in counts:
        feed(cache, count)
    again = DelayedKVCache.from_state(cache.state)
    assert again.minimum_resumable_offset == cache.minimum_resumable_offset
    assert (again.offset, again.converted, again.kind) == (
        cache.offset,
        cache.converted,
        cache.kind,
    )
    compared = 0
    for count in (1, 9, 1):
        compared += same_bits(feed(again, count), feed(cache, count))
    assert compared > 0
    assert again.minimum_resumable_offset == cache.minimum_resumable_offset


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"start": -1}, "start of -1 is no offset; valid are 0 and above"),
        ({"start": 2.5}, "start of 2.5 is no offset"),
        ({"start": True}, "start of True is no offset"),
        ({"bits": 7}, "no width 7; valid are 2, 3, 4, 5, 6, 8"),
        ({"group_size": 48}, "no group size 48; valid are 32, 64, 128"),
        ({"source": object()}, "object is not converted later; valid are KVCache"),
    ],
)
def test_refuses_what_cannot_be(options, problem):
    with pytest.raises(BadScheme, match=problem):
        DelayedKVCache(**options)
    with pytest.raises(ValueError, match=problem):
        DelayedKVCache(**options)


def test_a_window_is_converted_as_it_lies():
    cache, plain = delayed(20, source=RotatingKVCache(16, 4)), RotatingKVCache(16, 4)
    for count in (9, *(1,) * 11):
        feed(cache, count)
        plain.update_and_fetch(*WIDE.at(plain.offset, plain.offset + count))
    held = cache.caches[0]
    assert type(held) is RotatingQuantizedKVCache
    assert (held.offset, held._idx) == (plain.offset, plain._idx) == (20, 8)
    assert same_bits(held.keys, mx.quantize(plain.keys, group_size=32, bits=4)) > 0
    assert same_bits(held.values, mx.quantize(plain.values, group_size=32, bits=4)) > 0


def test_at_most_one_layer_is_held_twice():
    rows = Rows(8, 256, 256)
    caches = [DelayedKVCache(8, 64, 600) for _ in range(6)]
    for cache in caches:
        cache.update_and_fetch(*rows.at(0, 599))
    mx.eval([cache.state for cache in caches])
    plain = caches[0].nbytes
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    queries = rows.at(599, 600)[0]
    for cache in caches:
        # As in a model, each layer reads what the one before it computed.
        keys, values = cache.update_and_fetch(queries, rows.at(599, 600)[1])
        queries = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1, mask=None)
    del keys, values
    mx.eval(queries, [cache.state for cache in caches])
    assert all(cache.converted for cache in caches)
    assert mx.get_peak_memory() - before < 1.5 * plain
    assert mx.get_active_memory() < before - 2 * plain
