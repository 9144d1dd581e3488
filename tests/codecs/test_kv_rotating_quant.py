from __future__ import annotations

from functools import partial
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache
from kvkeep.codecs.kv_rotating_quant import CODEC
from kvkeep.errors import MalformedCache
from tests.codecs.contract import Example, InPlaceContract, Rows
from tests.codecs.shuttle import bits, give, take

SIZE = 16
WIDE = Rows(k_width=64, v_width=32)
HISTORIES = {
    "one token": (1,),
    "not full, decoded": (5, 1, 1),
    "full, by a prefill": (16,),
    "over, by a chunk": (10, 10),
    "long prefill": (41,),
    "long prefill in chunks": (20, 21, 9),
    "rotated by one": (16, 1),
    "rotated twice": (16, *(1,) * 40),
    "rotated, a chunk, rotated": (16, *(1,) * 5, 7, 1, 1, 1),
}


def ring(keep=4, size=SIZE, width=4):
    return RotatingQuantizedKVCache(size, keep, bits=width, group_size=32)


def converted(at=40, keep=0, width=8):
    """A ring that was plain up to ``at``."""
    plain = RotatingKVCache(SIZE, keep)
    plain.update_and_fetch(*WIDE.at(0, at))
    cache = ring(keep, width=width)
    cache.take_over(plain)
    return cache


def too_long(counts):
    return counts[-1] > 1 and sum(counts) > SIZE


def set_fields(counts=(5,), **fields):
    def make():
        cache = ring()
        for count in counts:
            cache.update_and_fetch(*WIDE.at(cache.offset, cache.offset + count))
        for name, value in fields.items():
            setattr(cache, name, value)
        return cache

    return make


def trim(count):
    def cut(cache):
        assert cache.is_trimmable()
        assert cache.trim(count) == count
        return cache

    return cut


def cut_too_late():
    cache = set_fields((16, 1, 1))()
    assert not cache.is_trimmable()
    cache.trim(2)
    return cache


def two_requests():
    cache = ring()
    cache.update_and_fetch(mx.ones((2, 2, 5, 64)), mx.ones((2, 2, 5, 64)))
    return cache


class TestKVRotatingQuant(InPlaceContract):
    codec = CODEC
    attributes = ("offset", "packed_bits", "group_size", "max_size", "keep", "_idx", "boundary")
    examples: ClassVar = {
        **{
            name: Example(ring, counts, WIDE, regrows=too_long(counts))
            for name, counts in HISTORIES.items()
        },
        "keep 0, rotated": Example(partial(ring, 0), (41, *(1,) * 5), WIDE),
        "trimmed": Example(ring, (9, 1, 1), WIDE, after=trim(4)),
        "grows in steps": Example(partial(ring, 4, 600), (256,), WIDE),
        "3 bits": Example(partial(ring, width=3), (20, 1), WIDE),
        "float32": Example(ring, (20,), Rows(2, 64, 64, mx.float32, mx.float32), regrows=True),
        "converted and rotated": Example(partial(converted, 12), (1,) * 9, WIDE),
        "converted, a chunk": Example(converted, (3, 12), WIDE, regrows=True),
    }
    empty: ClassVar = {"new": ring, "trimmed": lambda: trim(5)(set_fields()())}
    batches: ClassVar = {"two requests": two_requests}
    malformed: ClassVar = {
        "negative offset": (set_fields(offset=-1), "offset is -1"),
        "no index": (set_fields(_idx=None), "_idx is None"),
        "index elsewhere": (set_fields(_idx=4), "write index 4"),
        "index beyond the ring": (set_fields((16, 1), _idx=17), "write index 17"),
        "keeps everything": (set_fields(keep=SIZE), "keeps 16 of 16"),
        "other bits": (set_fields(packed_bits=8), "not 8 bits in groups of 32"),
        "not quantized": (set_fields(keys=mx.ones((1, 2, 16, 8))), "keys is not packed, scales"),
        "no values": (set_fields(values=None), "only one of keys and values"),
        "trimmed to full": (cut_too_late, "trimmed after it wrapped"),
    }

    def roomy(self):
        example = Example(partial(ring, 4, 640), (640, 1, 1), Rows(8, 256, 256))
        return example, self.live(example)

    @pytest.mark.parametrize("at", [12, 16, 40])
    def test_the_boundary_is_the_floor_of_a_conversion(self, at):
        cache = converted(at)
        facts = CODEC.describe(cache)
        assert (facts.boundary, facts.floor) == (at, at)
        for _ in range(20):
            cache.update_and_fetch(*WIDE.at(cache.offset, cache.offset + 1))
        facts = CODEC.describe(cache)
        assert (facts.boundary, facts.floor) == (at, at + 20)
        assert cache.minimum_resumable_offset == facts.floor

    def test_never_builds_below_the_boundary(self):
        parcel = take(CODEC, converted(14))
        with pytest.raises(MalformedCache, match="converted at 14 cannot resume at 13"):
            give(CODEC, parcel, 13, snapshot=False)

    @pytest.mark.parametrize("recorded", [None, "12", True, -1, 13])
    def test_unknown_history_fails_closed(self, recorded):
        cache = converted(12)
        cache.boundary = recorded
        facts = CODEC.describe(cache)
        assert (facts.boundary, facts.floor) == (12, 12)

    @pytest.mark.parametrize("keep", [0, 4])
    @pytest.mark.parametrize("counts", HISTORIES.values(), ids=HISTORIES)
    def test_slots_are_those_of_the_plain_ring(self, counts, keep):
        """What lies in each slot is what the plain ring holds there, quantized."""
        plain, cache, compared = RotatingKVCache(SIZE, keep), ring(keep), 0
        for count in counts:
            rows = WIDE.at(plain.offset, plain.offset + count)
            plain.update_and_fetch(*rows)
            cache.update_and_fetch(*rows)
            slots = min(plain.offset, plain.keys.shape[2])
            for mine, its in ((cache.keys, plain.keys), (cache.values, plain.values)):
                wanted = mx.quantize(its[:, :, :slots], group_size=32, bits=4)
                for a, b in zip(mine, wanted, strict=True):
                    assert np.array_equal(bits(a[:, :, :slots]), bits(b))
                    compared += b.size
            assert (cache.offset, cache._idx) == (plain.offset, plain._idx)
        assert compared > 0

    @pytest.mark.parametrize(
        "meta",
        [{"slots": 16, "index": 3}, {"slots": 15, "index": 15}, {"slots": -1, "index": 5}, {}],
    )
    def test_refuses_metadata_of_no_ring(self, meta):
        with pytest.raises(MalformedCache):
            CODEC.place({"max_size": 16, "keep": 4}, meta, 30)
