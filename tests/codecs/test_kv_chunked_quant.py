from __future__ import annotations

from functools import partial
from typing import ClassVar

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache

from kvkeep.caches.chunked_quant import ChunkedQuantizedKVCache
from kvkeep.codecs.kv_chunked_quant import CODEC
from kvkeep.errors import MalformedCache
from tests.codecs.contract import Example, InPlaceContract, Rows
from tests.codecs.shuttle import give, take

CHUNK = 16
WIDE = Rows(k_width=64, v_width=32)
chunked = partial(ChunkedQuantizedKVCache, CHUNK, bits=4, group_size=32)


def converted(at=40):
    plain = ChunkedKVCache(CHUNK)
    plain.update_and_fetch(*WIDE.at(0, at))
    cache = chunked()
    cache.take_over(plain)
    return cache


def trim(count):
    def cut(cache):
        assert cache.trim(count) == count
        return cache

    return cut


def set_fields(counts=(5,), **fields):
    def make():
        cache = chunked()
        for count in counts:
            cache.maybe_trim_front()
            cache.update_and_fetch(*WIDE.at(cache.offset, cache.offset + count))
        for name, value in fields.items():
            setattr(cache, name, value)
        return cache

    return make


def two_requests():
    cache = chunked()
    cache.update_and_fetch(mx.ones((2, 2, 5, 64)), mx.ones((2, 2, 5, 64)))
    return cache


def front_cut(cache):
    cache.maybe_trim_front()
    return cache


class TestKVChunkedQuant(InPlaceContract):
    codec = CODEC
    attributes = ("offset", "packed_bits", "group_size", "chunk_size", "start_position", "boundary")
    examples: ClassVar = {
        "one token": Example(chunked, (1,), WIDE),
        "not full": Example(chunked, (5, 1, 1), WIDE),
        "over": Example(chunked, (17,), WIDE, regrows=True),
        "front cut": Example(chunked, (41, 7), WIDE, regrows=True),
        "decoded": Example(chunked, (41, 1, 1, 1), WIDE, regrows=True),
        "cut and not yet fed": Example(chunked, (41,), WIDE, after=front_cut),
        "trimmed, nothing cut": Example(chunked, (41,), WIDE, after=trim(30)),
        "converted just now": Example(converted, (), WIDE, regrows=True),
        "converted": Example(partial(converted, 12), (1, 9), WIDE, regrows=True),
    }
    empty: ClassVar = {"new": chunked, "trimmed": lambda: trim(5)(set_fields()())}
    batches: ClassVar = {"two requests": two_requests}
    malformed: ClassVar = {
        "negative offset": (set_fields(offset=-1), "offset is -1"),
        "start beyond": (set_fields(start_position=6), r"holds \[6, 5\)"),
        "no chunk": (set_fields(chunk_size=0), "of 0 positions"),
        "too few": (set_fields((41, 1), offset=40), "trimmed after its front was cut"),
        "other bits": (set_fields(packed_bits=8), "not 8 bits in groups of 32"),
        "not quantized": (set_fields(keys=mx.ones((1, 2, 16, 8))), "keys is not packed, scales"),
    }

    def feed(self, example, cache, start, count):
        cache.maybe_trim_front()
        return super().feed(example, cache, start, count)

    def trimmed(self, example, live, p):
        if not live.is_trimmable():
            return None
        live.trim(live.offset - p)
        return live

    def roomy(self):
        example = Example(partial(ChunkedQuantizedKVCache, 900), (600,), Rows(8, 256, 256))
        return example, self.live(example)

    def test_the_boundary_is_the_floor_of_a_conversion(self):
        facts = CODEC.describe(converted())
        assert (facts.boundary, facts.floor) == (40, 40)

    def test_never_builds_below_the_boundary(self):
        with pytest.raises(MalformedCache, match="converted at 40 cannot resume at 39"):
            give(CODEC, take(CODEC, converted()), 39, snapshot=False)
