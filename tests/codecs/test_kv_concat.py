from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache

from kvkeep.codecs.kv_concat import CODEC
from tests.codecs.contract import Example, RowContract, Rows, same_bits
from tests.codecs.shuttle import give, take


def set_fields(**fields):
    def make():
        cache = ConcatenateKVCache()
        cache.update_and_fetch(*Rows().at(0, 5))
        for name, value in fields.items():
            setattr(cache, name, value)
        return cache

    return make


def two_requests():
    cache = ConcatenateKVCache()
    cache.update_and_fetch(mx.ones((2, 2, 5, 8)), mx.ones((2, 2, 5, 8)))
    return cache


class TestKVConcat(RowContract):
    codec = CODEC
    attributes = ("offset",)
    examples: ClassVar = {
        "one token": Example(ConcatenateKVCache, (1,)),
        "prefill": Example(ConcatenateKVCache, (300,)),
        "decoded": Example(ConcatenateKVCache, (20, 1, 1)),
        "unequal heads": Example(ConcatenateKVCache, (9,), Rows(heads=4, v_heads=1)),
    }
    empty: ClassVar = {"new": ConcatenateKVCache, "trimmed to nothing": set_fields(offset=0)}
    batches: ClassVar = {"two requests": two_requests}
    malformed: ClassVar = {
        "offset beyond the arrays": (set_fields(offset=6), "claims 6 positions but holds 5"),
        "negative offset": (set_fields(offset=-1), "offset is -1"),
        "no values": (set_fields(values=None), "only one of keys and values"),
        "unequal": (set_fields(values=mx.ones((1, 2, 7, 4))), "unequal length"),
    }

    def test_after_a_trim_only_the_offset_counts(self):
        example = Example(ConcatenateKVCache, (12,))
        cache = self.live(example)
        cache.trim(5)
        parcel = take(CODEC, cache)
        assert parcel.positions == list(range(7))
        rebuilt = give(CODEC, parcel, 7, snapshot=True)
        cold = self.run(example, (7,))
        assert same_bits(rebuilt.keys_and_values(), cold.keys_and_values()) > 0
        assert self.follow(example, 7, [cold, rebuilt], (1, 4, 1)) > 0
        # The live cache itself goes wrong here, which is why it is not the reference.
        self.feed(example, cache, 7, 1)
        assert cache.offset == 13
