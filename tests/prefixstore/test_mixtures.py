"""Cache lists whose layers differ: in kind, precision, width, dtype, number, or beyond reason."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

import kvkeep
from kvkeep import Reason
from kvkeep.errors import (
    BatchCache,
    EmptyCache,
    MalformedCache,
    OffsetMismatch,
    Refused,
    UnknownCache,
)
from kvkeep.hooks.prefill import convert, vouch
from kvkeep.prefixstore.recipe import kind_tree
from tests.codecs.contract import Rows, same_bits
from tests.conformance import models
from tests.conformance.live import forward, leaves

F32, BF16 = mx.float32, mx.bfloat16


class Feeder:
    """A list of caches and the rows that each gets; no model, so that anything goes."""

    def __init__(self, *parts):
        self.caches = [cache for cache, _ in parts]
        self.rows = [rows for _, rows in parts]
        vouch(self.caches)

    def feed(self, caches, start, count):
        """What every leaf returns for the next ``count`` positions."""
        out = []
        for cache, rows in zip(leaves(caches), self.rows, strict=True):
            if isinstance(cache, ArraysCache):
                out.append(recurrence(cache, start, count))
            elif isinstance(cache, LayerCache):
                out.append(cache.update_window(rows.at(start, start + count)[0][:, 0]))
            else:
                if isinstance(cache, ChunkedKVCache):
                    cache.maybe_trim_front()
                out.append(cache.update_and_fetch(*rows.at(start, start + count)))
        mx.eval(out)
        return out


def recurrence(cache, start, count):
    """A float32 sum and a count in int64; the slot between them stays ``None``."""
    total = mx.zeros((1, 2, 8)) if cache[0] is None else cache[0]
    for p in range(start, start + count):
        total = total * 0.7 + p
    seen = mx.zeros((1, 1), mx.int64) if cache[2] is None else cache[2]
    cache[0], cache[2] = total, seen + count
    return total


def everything():
    """One cache of every kind, of different widths and dtypes."""
    return Feeder(
        (KVCache(), Rows(2, 16, 16)),
        (KVCache(), Rows(1, 32, 0)),
        (QuantizedKVCache(group_size=32, bits=4), Rows(2, 64, 32)),
        (RotatingKVCache(max_size=12), Rows(2, 16, 20, F32, F32)),
        (RotatingKVCache(max_size=9, keep=3), Rows(1, 8, 8, BF16, F32)),
        (ChunkedKVCache(chunk_size=10), Rows(2, 16, 16)),
        (ConcatenateKVCache(), Rows(4, 24, 20, F32, BF16, v_heads=2)),
        (ArraysCache(3), None),
        (LayerCache(window_size=12), Rows(1, 16, 16)),
    )


def nested():
    """The same in lists, one in another."""
    feeder = everything()
    a, b, c, d, e, f, g, h, i = feeder.caches
    feeder.caches = [CacheList(h, a), CacheList(CacheList(b, c), d), CacheList(e), f, g, i]
    order = (7, 0, 1, 2, 3, 4, 5, 6, 8)
    feeder.rows = [feeder.rows[n] for n in order]
    return feeder


def stateless():
    """Every kind that can be resumed between snapshots."""
    feeder = everything()
    feeder.caches, feeder.rows = feeder.caches[:7], feeder.rows[:7]
    return feeder


@pytest.mark.parametrize("mixture", [everything, nested, stateless])
@pytest.mark.parametrize("counts", [(1,), (5, 3), (12,), (7, 9, 1, 1), (30, 1, 1, 1)], ids=str)
def test_every_kind_in_one_list_goes_on_bit_for_bit(mixture, counts, tmp_path):
    feeder, offset = mixture(), 0
    for count in counts:
        feeder.feed(feeder.caches, offset, count)
        offset += count
    tokens = list(range(offset))
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=feeder.caches)
        assert space.snapshot(tokens, feeder.caches).stored
    with kvkeep.open(tmp_path) as store:
        hit = store.space(identity={}, layout=feeder.caches).resume([*tokens, 0])
    assert (hit.offset, hit.decision.reason) == (offset, Reason.FULL)
    assert [type(x) for x in leaves(hit.caches)] == [type(x) for x in leaves(feeder.caches)]
    compared = 0
    for count in (1, 4, 1, 15, 1):
        alike = [feeder.feed(caches, offset, count) for caches in (feeder.caches, hit.caches)]
        compared += same_bits(*alike)
        offset += count
    assert compared > 1000


def test_a_cut_mixture_goes_on_like_one_that_stopped_there(tmp_path):
    feeder = stateless()
    feeder.feed(feeder.caches, 0, 11)
    tokens, compared = list(range(11)), 0
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=feeder.caches)
        assert space.snapshot(tokens, feeder.caches).stored
        for p in range(1, 12):
            other = stateless()
            other.feed(other.caches, 0, p)
            hit = space.resume([*tokens[:p], 99])
            assert (hit.offset, hit.decision.reason) == (p, Reason.FULL)
            for at in range(p, p + 6):
                compared += same_bits(
                    other.feed(other.caches, at, 1), feeder.feed(hit.caches, at, 1)
                )
    assert compared > 1000


def quantize_layers(caches, boundaries, offset):
    """Convert the layers whose boundary is ``offset``, as mlx-lm would, and note it."""
    for layer, boundary in boundaries.items():
        if boundary == offset:
            one = [caches[layer]]
            convert(one, bits=4, group_size=32, start=offset)
            caches[layer] = one[0]


MIXED_PRECISION = {
    "every second layer": ("llama", {0: 20, 2: 20}, 20, "kv-quant,kv,kv-quant,kv"),
    "at different offsets": ("llama", {0: 12, 1: 20, 2: 24}, 24, "kv-quant,kv-quant,kv-quant,kv"),
    "beside rings": (
        "gemma3_text",
        {1: 20, 3: 20},
        20,
        "kv-rotating,kv-quant,kv-rotating,kv-quant",
    ),
    "beside states": ("olmo_hybrid", {3: 20}, 20, "arrays,kv,arrays,kv-quant"),
}


@pytest.mark.parametrize("case", MIXED_PRECISION)
def test_layers_of_mixed_precision(case, tmp_path):
    name, boundaries, floor, kinds = MIXED_PRECISION[case]
    model = models.build(name, head_dim=32)
    tokens = np.random.default_rng(5).integers(0, 97, 48)
    caches, live = make_prompt_cache(model), {}
    vouch(caches)
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=caches)
        for start, stop in ((0, 12), (12, 20), (20, 24), *((p, p + 1) for p in range(24, 48))):
            live[start] = forward(model, caches, tokens[start:stop])[0]
            quantize_layers(caches, boundaries, stop)
            if stop in (24, 26, 40):
                assert space.snapshot(tokens[:stop], caches).stored
        assert ",".join(kind_tree(caches)) == kinds
    compared = 0
    with kvkeep.open(tmp_path) as store:
        space = store.space(identity={}, layout=make_prompt_cache(model))
        for p in range(24, 41):
            hit = space.resume(tokens[: p + 1])
            if p in (24, 26, 40):
                assert hit.offset == p
            for at in range(hit.offset, hit.offset + 4) if p == hit.offset else ():
                if case != "beside rings" or p in (24, 26, 40):
                    got = forward(model, hit.caches, tokens[at : at + 1])[0]
                    assert np.array_equal(got, live[at]), at
                    compared += 1
        below = space.explain([*tokens[: floor - 1].tolist(), 1000, 1001])
        assert (below.offset, below.matched) == (0, floor - 1)
        assert Reason.BELOW_FLOOR in {limit.reason for limit in below.limits}
        assert {layer.kind for layer in below.limits} <= set(kinds.split(","))
    assert compared >= 12


def test_mlx_lm_cannot_quantize_a_ring_and_the_list_says_so():
    model = models.build("gemma3_text", head_dim=32)
    caches = make_prompt_cache(model)
    forward(model, caches, np.arange(5))
    with pytest.raises(Refused, match="cannot quantize a RotatingKVCache"):
        convert(caches, 4, 32, 0)


@pytest.mark.parametrize(
    ("name", "caches", "layers"),
    [("gemma4_text", 4, 6), ("gemma3n", 2, 4), ("nemotron_h", 4, 6), ("nemotron-nas", 2, 4)],
)
def test_fewer_caches_than_layers(name, caches, layers, tmp_path):
    model = models.build(name)
    live = make_prompt_cache(model)
    assert (len(live), len(model.layers)) == (caches, layers)
    forward(model, live, np.arange(17))
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=live)
        assert space.snapshot(range(17), live).stored
        hit = space.resume(range(18))
        with pytest.raises(Refused, match="the space was made for"):
            space.snapshot(range(17), live[:-1])
    assert (hit.offset, len(hit.caches)) == (17, caches)
    for p in range(17, 22):
        ahead = [forward(model, x, np.array([p]))[0] for x in (live, hit.caches)]
        assert np.array_equal(*ahead)


def test_states_in_float32_beside_rows_in_bfloat16(tmp_path):
    model = models.build("granitemoehybrid", num_local_experts=0)
    live = make_prompt_cache(model)
    forward(model, live, np.arange(9))
    dtypes = {x.dtype for c in live if isinstance(c, ArraysCache) for x in c.cache}
    assert dtypes == {F32, BF16}
    assert {c.keys.dtype for c in live if isinstance(c, KVCache)} == {BF16}
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=live)
        assert space.snapshot(range(9), live).stored
        hit = space.resume(range(10))
    assert same_bits(
        [c.cache for c in live if isinstance(c, ArraysCache)],
        [c.cache for c in hit.caches if isinstance(c, ArraysCache)],
    )


class Strange:
    offset = 11


def batch():
    cache = BatchKVCache([0, 0])
    cache.update_and_fetch(mx.ones((2, 1, 11, 4)), mx.ones((2, 1, 11, 4)))
    return cache


def put(**fields):
    """Set fields of the layer, by value or from the old one."""

    def change(cache):
        for name, value in fields.items():
            old = getattr(cache, name)
            setattr(cache, name, value(old) if callable(value) else value)
        return cache

    return change


def doubled(x):
    return mx.concatenate([x, x], axis=0)


def slot(value):
    def change(cache):
        cache[0] = value(cache[0])
        return cache

    return change


CONTRADICTIONS = {
    "offset beyond the arrays": (0, put(offset=300), MalformedCache, "kv", "claims 300"),
    "keys without values": (0, put(values=None), MalformedCache, "kv", "only one of keys and"),
    "two requests in one layer": (
        1,
        put(keys=doubled, values=doubled),
        BatchCache,
        "kv",
        "holds 2 requests",
    ),
    "words of another dtype": (
        2,
        put(keys=lambda k: (k[0].astype(F32), *k[1:])),
        MalformedCache,
        "kv-quant",
        "float32 words",
    ),
    "other bits": (2, put(bits=8), MalformedCache, "kv-quant", "not 8 bits"),
    "write index outside the ring": (3, put(_idx=40), MalformedCache, "kv-rotating", "index 40"),
    "a ring trimmed once it had wrapped": (
        4,
        put(offset=9, _idx=9),
        MalformedCache,
        "kv-rotating",
        "at offset 9",
    ),
    "a chunk that starts behind its end": (
        5,
        put(start_position=12),
        MalformedCache,
        "kv-chunked",
        r"\[12, 11\)",
    ),
    "arrays of unequal length": (
        6,
        put(values=lambda v: v[:, :, 1:]),
        MalformedCache,
        "kv-concat",
        "10",
    ),
    "two requests in a state": (7, slot(doubled), BatchCache, "arrays", "2 requests"),
    "a state that is no array": (7, slot(lambda _: 3), MalformedCache, "arrays", "no array"),
    "padding of a batch": (7, put(lengths=mx.array([11])), BatchCache, "arrays", "of a batch"),
    "a window cut short": (
        8,
        put(window=lambda x: x[:, 1:]),
        MalformedCache,
        "kv-compressed",
        "a window of 10 of 12",
    ),
    "a layer that was never used": (0, lambda _: KVCache(), EmptyCache, "kv", "covers no token"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.parametrize("inside", [False, True])
def test_contradictions_are_refused_by_layer_and_kind(name, inside, tmp_path):
    layer, change, error, kind, problem = CONTRADICTIONS[name]
    feeder = everything()
    feeder.feed(feeder.caches, 0, 11)
    caches = feeder.caches
    caches[layer] = change(caches[layer])
    path = str(layer)
    if inside:
        caches[layer], path = CacheList(KVCache(), caches[layer]), f"{layer}.1"
        caches[layer].caches[0].update_and_fetch(*Rows().at(0, 11))
    refuses(caches, error, rf"^Layer {path} \({kind}\): .*{problem}", tmp_path)


@pytest.mark.parametrize("inside", [False, True])
def test_a_class_without_a_codec_is_named_where_a_space_is_opened(inside, tmp_path):
    caches = [KVCache(), CacheList(KVCache(), Strange()) if inside else Strange()]
    named = rf"^Layer 1{'.1' * inside}: No codec .*Strange"
    with (
        kvkeep.open(tmp_path, max_bytes="1GB") as store,
        pytest.raises(UnknownCache, match=named),
    ):
        store.space(identity={}, layout=caches)


def refuses(caches, error, message, folder):
    """Assert that nothing of ``caches`` is stored, and why."""
    with kvkeep.open(folder, max_bytes="1GB") as store:
        space = store.space(identity={})
        with pytest.raises(error, match=message):
            space.snapshot(range(11), caches)
        assert (store.used_bytes, store.spaces(), store.conversations()) == (0, [], [])
        assert space.resume(range(12)).offset == 0


def test_layers_at_different_offsets_are_named(tmp_path):
    feeder = everything()
    feeder.feed(feeder.caches, 0, 11)
    feeder.caches[6].update_and_fetch(*feeder.rows[6].at(11, 12))
    refuses(
        feeder.caches,
        OffsetMismatch,
        r"layer 0 \(kv\) at 11, layer 6 \(kv-concat\) at 12",
        tmp_path,
    )


@pytest.mark.parametrize(
    ("strange", "error", "message"),
    [
        (Strange, UnknownCache, r"Layer 3: No codec claims the class tests.*\.Strange"),
        (batch, BatchCache, r"Layer 3: .*BatchKVCache holds the rows"),
    ],
)
def test_what_no_codec_claims_is_named(strange, error, message, tmp_path):
    feeder = everything()
    feeder.feed(feeder.caches, 0, 11)
    feeder.caches[3] = strange()
    refuses(feeder.caches, error, message, tmp_path)


def test_a_cut_that_a_layer_cannot_follow_names_it(tmp_path):
    feeder = everything()
    feeder.feed(feeder.caches, 0, 11)
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={})
        with pytest.raises(OffsetMismatch, match=r"layer 7 \(arrays\) cannot be cut there"):
            space.snapshot(range(10), feeder.caches)
        kept = copy.copy(feeder.caches[:7])
        assert space.snapshot(range(10), kept).tokens_new == 10
