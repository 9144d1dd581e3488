from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from kvkeep.codecs.kv import CODEC
from tests.codecs.contract import Example, InPlaceContract, Rows


def trim(count):
    def cut(cache):
        assert cache.trim(count) == count
        return cache

    return cut


def set_fields(**fields):
    """A cache of 5 tokens with these attributes set by hand."""

    def make():
        cache = KVCache()
        cache.update_and_fetch(*Rows().at(0, 5))
        for name, value in fields.items():
            setattr(cache, name, value)
        return cache

    return make


def from_a_batch(cache):
    other = KVCache()
    other.update_and_fetch(*Rows().at(500, 509))
    return BatchKVCache.merge([cache, other]).extract(0)


def two_requests():
    cache = KVCache()
    cache.update_and_fetch(mx.ones((2, 2, 5, 8)), mx.ones((2, 2, 5, 8)))
    return cache


class TestKV(InPlaceContract):
    codec = CODEC
    attributes = ("offset",)
    examples: ClassVar = {
        "one token": Example(KVCache, (1,)),
        "one short of full": Example(KVCache, (255,)),
        "full": Example(KVCache, (250, 6)),
        "one over": Example(KVCache, (256, 1)),
        "decoded": Example(KVCache, (20, 1, 1, 1)),
        "two steps": Example(KVCache, (300, 230)),
        "trimmed": Example(KVCache, (300,), after=trim(171)),
        "trimmed to a step": Example(KVCache, (300,), after=trim(44)),
        "latent widths": Example(KVCache, (12,), Rows(heads=1, k_width=32, v_width=8)),
        "no values": Example(KVCache, (12, 1), Rows(heads=1, v_width=0)),
        "two dtypes": Example(KVCache, (12,), Rows(k_dtype=mx.float16, v_dtype=mx.float32)),
        "row of a batch": Example(KVCache, (5,), after=from_a_batch),
        "from a file's state": Example(
            KVCache, (30, 1), after=lambda cache: KVCache.from_state(cache.state)
        ),
    }
    empty: ClassVar = {
        "new": KVCache,
        "trimmed to nothing": lambda: trim(5)(set_fields()()),
    }
    batches: ClassVar = {
        "two requests": two_requests,
        "an offset per request": set_fields(offset=mx.array([5, 5])),
    }
    malformed: ClassVar = {
        "offset beyond the arrays": (set_fields(offset=257), "claims 257 positions but holds 256"),
        "negative offset": (set_fields(offset=-1), "offset is -1"),
        "offset is an array": (set_fields(offset=mx.array(5)), "offset is array"),
        "offset is a bool": (set_fields(offset=True), "offset is True"),
        "no values": (set_fields(values=None), "only one of keys and values"),
        "no keys": (set_fields(keys=None, values=None), "claims 5 positions but holds no keys"),
        "unequal": (set_fields(values=mx.ones((1, 2, 300, 4))), r"unequal length: \[256, 300\]"),
        "three axes": (set_fields(keys=mx.ones((2, 256, 8))), "an array of 3 axes"),
        "no array": (set_fields(keys=(1, 2)), "holds tuple"),
    }

    def trimmed(self, example, live, p):
        live.trim(live.offset - p)
        return live

    def roomy(self):
        example = Example(KVCache, (600,), Rows(heads=8, k_width=64, v_width=64))
        return example, self.live(example)
