from __future__ import annotations

from functools import partial
from typing import ClassVar

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from kvkeep.codecs.kv_quant import CODEC
from kvkeep.errors import MalformedCache
from tests.codecs.contract import Example, InPlaceContract, Rows
from tests.codecs.shuttle import give, take

WIDE = Rows(k_width=64, v_width=32)


def from_token_zero(group_size=32, bits=4):
    cache = QuantizedKVCache(group_size, bits)
    cache.minimum_resumable_offset = 0
    return cache


def converted(at=40, group_size=32, bits=8, *, recorded=True):
    """What ``kv_bits`` with ``quantized_kv_start`` leaves, with and without a record of it."""
    plain = KVCache()
    plain.update_and_fetch(*WIDE.at(0, at))
    cache = plain.to_quantized(group_size, bits)
    if recorded:
        cache.minimum_resumable_offset = at
    return cache


def trim(count):
    def cut(cache):
        assert cache.trim(count) == count
        return cache

    return cut


def set_fields(**fields):
    def make():
        cache = from_token_zero()
        cache.update_and_fetch(*WIDE.at(0, 5))
        for name, value in fields.items():
            setattr(cache, name, value)
        return cache

    return make


def two_requests():
    cache = QuantizedKVCache(32, 4)
    cache.update_and_fetch(mx.ones((2, 2, 5, 64)), mx.ones((2, 2, 5, 64)))
    return cache


class TestKVQuant(InPlaceContract):
    codec = CODEC
    attributes = ("offset", "bits", "group_size")
    examples: ClassVar = {
        "one token": Example(from_token_zero, (1,), WIDE),
        "8 bits": Example(partial(from_token_zero, 32, 8), (20, 1, 1), WIDE),
        "2 bits": Example(partial(from_token_zero, 32, 2), (20,), WIDE),
        "full": Example(from_token_zero, (256,), WIDE),
        "two steps": Example(from_token_zero, (300, 230), WIDE),
        "trimmed": Example(from_token_zero, (300,), WIDE, after=trim(171)),
        "float32": Example(from_token_zero, (20,), Rows(2, 64, 64, mx.float32, mx.float32)),
        "converted": Example(converted, (12, 1), WIDE),
        "converted just now": Example(converted, (), WIDE),
        "converted, 3 bits": Example(partial(converted, bits=3), (), WIDE),
        "history unknown": Example(partial(converted, recorded=False), (), WIDE),
    }
    empty: ClassVar = {
        "new": QuantizedKVCache,
        "trimmed to nothing": lambda: trim(5)(set_fields()()),
    }
    batches: ClassVar = {"two requests": two_requests}
    malformed: ClassVar = {
        "offset beyond the arrays": (set_fields(offset=257), "claims 257 positions"),
        "negative offset": (set_fields(offset=-1), "offset is -1"),
        "other bits": (set_fields(bits=8), "not 8 bits in groups of 32"),
        "other groups": (set_fields(group_size=64), "not 4 bits in groups of 64"),
        "bits not a number": (set_fields(bits=None), "bits is None"),
        "not quantized": (set_fields(keys=mx.ones((1, 2, 256, 8))), "keys is not packed, scales"),
        "no biases": (
            lambda: set_fields(keys=set_fields()().keys[:2])(),
            "keys is not packed, scales, biases",
        ),
        "unequal": (lambda: set_fields(values=_longer())(), "unequal length"),
        "words that are floats": (
            lambda: set_fields(keys=_as(mx.float32, None, None))(),
            "float32 words, bfloat16 scales and bfloat16 biases",
        ),
        "scales unlike biases": (
            lambda: set_fields(keys=_as(None, mx.float16, None))(),
            "uint32 words, float16 scales and bfloat16 biases",
        ),
    }

    def trimmed(self, example, live, p):
        live.trim(live.offset - p)
        return live

    def roomy(self):
        rows = Rows(8, 256, 256)
        example = Example(from_token_zero, (600,), rows)
        return example, self.live(example)

    @pytest.mark.parametrize("recorded", [None, "40", True, -1, 54, 40.0])
    def test_unknown_history_fails_closed(self, recorded):
        cache = converted(recorded=False)
        cache.update_and_fetch(*WIDE.at(40, 53))
        if recorded is not None:
            cache.minimum_resumable_offset = recorded
        facts = CODEC.describe(cache)
        assert (facts.floor, facts.boundary) == (53, 53)

    @pytest.mark.parametrize("recorded", [0, 40, 53])
    def test_a_recorded_boundary_survives_the_round_trip(self, recorded):
        cache = converted(recorded=False)
        cache.update_and_fetch(*WIDE.at(40, 53))
        cache.minimum_resumable_offset = recorded
        parcel = take(CODEC, cache)
        assert (parcel.facts.floor, parcel.facts.boundary) == (recorded, recorded)
        rebuilt = give(CODEC, parcel, 53, snapshot=True)
        rebuilt.update_and_fetch(*WIDE.at(53, 60))
        assert CODEC.describe(rebuilt).floor == recorded

    def test_never_builds_below_the_boundary(self):
        parcel = take(CODEC, converted())
        with pytest.raises(MalformedCache, match="converted at 40 cannot resume at 39"):
            give(CODEC, parcel, 39, snapshot=False)

    def test_a_trim_below_the_boundary_is_unknown_history(self):
        cache = trim(10)(converted())
        assert CODEC.describe(cache).floor == 30


def _as(*dtypes):
    planes = set_fields()().keys
    return [x if d is None else x.astype(d) for x, d in zip(planes, dtypes, strict=True)]


def _longer():
    cache = set_fields()()
    return [mx.concatenate([x, x], axis=2) for x in cache.values]
