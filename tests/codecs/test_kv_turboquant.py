from __future__ import annotations

from functools import partial
from typing import ClassVar

import mlx.core as mx
import pytest

from kvkeep.caches.turboquant import TurboQuantKVCache
from kvkeep.codecs.kv_turboquant import CODEC
from kvkeep.errors import BadScheme, MalformedCache
from tests.codecs.contract import Example, InPlaceContract, Rows
from tests.codecs.shuttle import give, take

WIDE = Rows(k_width=128, v_width=64)


def trim(count):
    def cut(cache):
        assert cache.trim(count) == count
        return cache

    return cut


def unknown_history():
    cache = TurboQuantKVCache()
    del cache.minimum_resumable_offset
    return cache


def set_fields(**fields):
    """A cache of 5 tokens with these attributes set by hand."""

    def make():
        cache = TurboQuantKVCache()
        cache.update_and_fetch(*WIDE.at(0, 5))
        for name, value in fields.items():
            setattr(cache, name, value)
        return cache

    return make


def two_requests():
    cache = TurboQuantKVCache()
    cache.update_and_fetch(mx.ones((2, 2, 5, 64)), mx.ones((2, 2, 5, 64)))
    return cache


class TestKVTurboQuant(InPlaceContract):
    codec = CODEC
    attributes = ("offset", "k_bits", "v_bits", "k_dtype", "v_dtype", "deferred_rotation")
    examples: ClassVar = {
        "one token": Example(TurboQuantKVCache, (1,), WIDE),
        "decoded": Example(TurboQuantKVCache, (4, 1, 1), WIDE),
        "full": Example(TurboQuantKVCache, (256,), WIDE),
        "two steps": Example(TurboQuantKVCache, (250, 12), WIDE),
        "trimmed": Example(TurboQuantKVCache, (300,), WIDE, after=trim(171)),
        "narrowest": Example(partial(TurboQuantKVCache, 2, 2), (3,), WIDE),
        "five bits": Example(partial(TurboQuantKVCache, 5, 5), (3,), WIDE),
        "widest": Example(partial(TurboQuantKVCache, 8, 8), (3,), Rows(1, 512, 256)),
        "deferred": Example(partial(TurboQuantKVCache, deferred_rotation=True), (3,), WIDE),
        "two dtypes": Example(TurboQuantKVCache, (3,), Rows(2, 64, 64, mx.float16, mx.float32)),
        "history unknown": Example(unknown_history, (12, 1), WIDE),
    }
    empty: ClassVar = {
        "new": TurboQuantKVCache,
        "trimmed to nothing": lambda: trim(5)(set_fields()()),
    }
    batches: ClassVar = {"two requests": two_requests}
    malformed: ClassVar = {
        "offset beyond the arrays": (set_fields(offset=257), "claims 257 positions"),
        "negative offset": (set_fields(offset=-1), "offset is -1"),
        "other bits of keys": (set_fields(k_bits=4), r"k.indices of 32 uint32 .* at 4 bits has 16"),
        "other bits of values": (set_fields(v_bits=8), r"v.packed of 6 uint32 .* at 8 bits has 16"),
        "bits not a number": (set_fields(k_bits=None), "k_bits is None"),
        "no zeros": (lambda: set_fields(keys=set_fields()().keys[:2])(), "keys is not indices"),
        "values are rows": (set_fields(values=mx.ones((1, 2, 256, 8))), "values is not packed"),
        "no values": (set_fields(values=None), "only one of keys and values"),
        "unequal": (lambda: set_fields(values=_longer())(), "unequal length"),
        "scales of another dtype": (
            lambda: set_fields(keys=_as(None, mx.float32, None))(),
            "k.scales of 4 float32 per row.*has 4 float16",
        ),
        "no dtype": (set_fields(k_dtype=None), "k_dtype is None"),
        "rows of integers": (set_fields(v_dtype=mx.int32), "v_dtype is mlx.core.int32"),
    }

    def trimmed(self, example, live, p):
        live.trim(live.offset - p)
        return live

    def roomy(self):
        example = Example(TurboQuantKVCache, (600,), Rows(8, 256, 256))
        return example, self.live(example)

    def feed(self, example, cache, start, count):
        """What a deferred read sums counts as well."""
        keys, values = example.rows.at(start, start + count)
        read = cache.append_window(keys, values)
        return read.keys, read.values

    @pytest.mark.parametrize("recorded", [None, "40", True, -1, 54, 40.0])
    def test_unknown_history_fails_closed(self, recorded):
        cache = TurboQuantKVCache()
        cache.update_and_fetch(*WIDE.at(0, 53))
        cache.minimum_resumable_offset = recorded
        facts = CODEC.describe(cache)
        assert (facts.floor, facts.boundary) == (53, 53)

    @pytest.mark.parametrize("recorded", [0, 40, 53])
    def test_a_recorded_boundary_survives_the_round_trip(self, recorded):
        cache = TurboQuantKVCache()
        cache.update_and_fetch(*WIDE.at(0, 53))
        cache.minimum_resumable_offset = recorded
        parcel = take(CODEC, cache)
        assert (parcel.facts.floor, parcel.facts.boundary) == (recorded, recorded)
        rebuilt = give(CODEC, parcel, 53, snapshot=True)
        rebuilt.update_and_fetch(*WIDE.at(53, 60))
        assert CODEC.describe(rebuilt).floor == recorded

    def test_never_builds_below_the_boundary(self):
        cache = set_fields(minimum_resumable_offset=4)()
        with pytest.raises(MalformedCache, match="encoded from 4 on cannot resume at 3"):
            give(CODEC, take(CODEC, cache), 3, snapshot=False)

    def test_parameters_name_widths_head_sizes_and_dtypes(self):
        assert dict(CODEC.describe(set_fields()()).params) == {
            "k_bits": 8,
            "k_dtype": "bfloat16",
            "k_head_size": 128,
            "v_bits": 3,
            "v_dtype": "bfloat16",
            "v_head_size": 64,
            "deferred_rotation": False,
        }

    @pytest.mark.parametrize(
        ("changed", "error", "problem"),
        [
            ({"k_bits": 3}, BadScheme, "keys of 3 bits"),
            ({"v_bits": None}, MalformedCache, "v_bits is None"),
            ({"k_dtype": "eval"}, MalformedCache, "k_dtype is 'eval'"),
            ({"v_dtype": 3}, MalformedCache, "v_dtype is 3"),
        ],
    )
    def test_hostile_parameters_build_nothing(self, changed, error, problem):
        live = set_fields()()
        facts = CODEC.describe(live)
        with pytest.raises(error, match=problem):
            CODEC.build({**facts.params, **changed}, None, 5, CODEC.planes(live), {}, 0)


def _as(*dtypes):
    planes = set_fields()().keys
    return [x if d is None else x.astype(d) for x, d in zip(planes, dtypes, strict=True)]


def _longer():
    cache = set_fields()()
    return [mx.concatenate([x, x], axis=2) for x in cache.values]
