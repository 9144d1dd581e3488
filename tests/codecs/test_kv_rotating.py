from __future__ import annotations

from functools import partial
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache

from kvkeep.codecs.kv_rotating import CODEC
from kvkeep.errors import MalformedCache
from tests.codecs.contract import Example, InPlaceContract, Rows
from tests.codecs.shuttle import bits, give, take

SIZE = 16
HISTORIES = {
    "one token": (1,),
    "fewer than are kept": (3,),
    "not full": (5,),
    "not full, decoded": (5, 1, 1),
    "one short of full": (15,),
    "full, by a prefill": (16,),
    "full, by decoding": (9, 1, 1, 1, 1, 1, 1, 1),
    "over, by a chunk": (10, 10),
    "long prefill": (41,),
    "long prefill in chunks": (20, 21, 9),
    "rotated by one": (16, 1),
    "rotated": (41, *(1,) * 5),
    "rotated to the end": (16, *(1,) * 16),
    "rotated twice": (16, *(1,) * 40),
    "rotated, then a chunk": (16, *(1,) * 5, 7),
    "rotated, a chunk, rotated": (16, *(1,) * 5, 7, 1, 1, 1),
}


def ring(keep, size=SIZE, *, known=False):
    """A maker of blank rings, whose history is known if ``known``."""

    def blank():
        cache = RotatingKVCache(size, keep)
        if known:
            cache.minimum_resumable_offset = 0
        return cache

    return blank


def too_long(counts):
    """Whether the last update was a chunk that left more than ``SIZE`` slots."""
    return counts[-1] > 1 and sum(counts) > SIZE


def set_fields(counts=(5,), keep=4, **fields):
    def make():
        cache = RotatingKVCache(SIZE, keep)
        for count in counts:
            cache.update_and_fetch(*Rows().at(cache.offset, cache.offset + count))
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


def from_a_batch(row, decoded=0):
    """A row of a batch, after the batch decoded some tokens together."""

    def extract(cache):
        other = RotatingKVCache(SIZE)
        other.update_and_fetch(*Rows().at(500, 523))
        batch = BatchRotatingKVCache.merge([cache, other])
        for i in range(decoded):
            k, v = Rows().at(cache.offset + i, cache.offset + i + 1)
            batch.update_and_fetch(mx.concatenate([k, k]), mx.concatenate([v, v]))
        return batch.extract(row)

    return extract


def two_requests():
    cache = RotatingKVCache(SIZE)
    cache.update_and_fetch(mx.ones((2, 2, 5, 8)), mx.ones((2, 2, 5, 8)))
    return cache


def cut_too_late(counts, count):
    """A cache that was trimmed although it had wrapped."""

    def make():
        cache = set_fields(counts)()
        assert not cache.is_trimmable()
        cache.trim(count)
        return cache

    return make


class TestKVRotating(InPlaceContract):
    codec = CODEC
    attributes = ("offset", "max_size", "keep", "_idx")
    examples: ClassVar = {
        **{f"keep 0, {name}": Example(ring(0), counts) for name, counts in HISTORIES.items()},
        **{
            f"keep 4, {name}": Example(ring(4), counts, regrows=too_long(counts))
            for name, counts in HISTORIES.items()
        },
        **{
            f"known history, {name}": Example(ring(0, known=True), counts, regrows=too_long(counts))
            for name, counts in HISTORIES.items()
        },
        "trimmed": Example(ring(4), (9, 1, 1), after=trim(4)),
        "row of a batch": Example(ring(0), (5,), after=from_a_batch(0)),
        "row of a batch, wrapped": Example(ring(0), (33,), after=from_a_batch(0)),
        "row of a batch that decoded": Example(ring(0), (13,), after=from_a_batch(0, 6)),
        "grows in steps": Example(ring(4, 600), (256,)),
        "grows once more": Example(ring(4, 600), (500, 1, 1)),
        "last step is short": Example(ring(0, 300), (299,)),
    }
    empty: ClassVar = {
        "new": partial(RotatingKVCache, SIZE),
        "trimmed": lambda: trim(5)(set_fields()()),
    }
    batches: ClassVar = {"two requests": two_requests}
    malformed: ClassVar = {
        "negative offset": (set_fields(offset=-1), "offset is -1"),
        "no index": (set_fields(_idx=None), "_idx is None"),
        "index elsewhere": (set_fields(_idx=4), "write index 4"),
        "index beyond the ring": (set_fields((16, 1), _idx=17), "write index 17"),
        "index among the kept": (set_fields((16, 1), _idx=4), "write index 4"),
        "offset beyond a part": (set_fields(offset=9, _idx=9), "offset 9 with 5 slots"),
        "keeps everything": (set_fields(keep=SIZE), "keeps 16 of 16"),
        "unequal": (set_fields(values=mx.ones((1, 2, 7, 4))), "unequal length"),
        "no values": (set_fields(values=None), "only one of keys and values"),
        "trimmed to full": (cut_too_late((16, 1, 1), 2), "trimmed after it wrapped"),
        "trimmed when rotated": (cut_too_late((16, 1, 1, 1), 3), "trimmed after it wrapped"),
        "trimmed long prefill": (cut_too_late((41,), 3), "trimmed after it wrapped"),
        "trimmed after two chunks": (cut_too_late((20, 9), 2), "trimmed after it wrapped"),
        "trimmed to a part": (cut_too_late((16, 1, 1), 5), "trimmed after it wrapped"),
    }

    def expected(self, live):
        doubtful = not live.keep and not hasattr(live, "minimum_resumable_offset")
        index = min(live._idx, live.max_size) if doubtful else live._idx
        return {**super().expected(live), "_idx": index}

    def trimmed(self, example, live, p):
        if not live.is_trimmable():
            return None
        live.trim(live.offset - p)
        return live

    def roomy(self):
        example = Example(ring(4, 640), (640, 1, 1), Rows(heads=8, k_width=64, v_width=64))
        return example, self.live(example)

    @pytest.mark.parametrize(
        ("counts", "held", "floor"),
        [
            ((5,), [(0, 0, 5)], 0),
            ((16,), [(0, 0, 16)], 0),
            ((41,), [(0, 0, 41)], 0),
            ((16, 1), [(0, 0, 4), (5, 5, 11), (16, 4, 1)], 17),
            ((16, *(1,) * 12), [(0, 0, 4), (16, 4, 12)], 28),
            ((20, 9), [(0, 0, 4), (9, 4, 20)], 21),
        ],
    )
    def test_positions_of_each_layout(self, counts, held, floor):
        facts = CODEC.describe(set_fields(counts)())
        assert [tuple(segment) for segment in facts.held] == held
        assert facts.floor == floor

    @pytest.mark.parametrize(
        ("counts", "known", "unknown"),
        [
            ((41,), ([(0, 0, 41)], 0), ([(25, 25, 16)], 41)),
            ((20, 9), ([(5, 0, 24)], 21), ([(13, 8, 16)], 29)),
        ],
    )
    @pytest.mark.parametrize("record", [None, 0, 21, 22, 29, -1, True, "0"])
    def test_slots_before_the_window_need_a_known_history(self, counts, known, unknown, record):
        cache = set_fields(counts, keep=0)()
        if record is not None:
            cache.minimum_resumable_offset = record
        facts = CODEC.describe(cache)
        vouched = type(record) is int and 0 <= record <= known[1]
        assert ([tuple(segment) for segment in facts.held], facts.floor) == (
            known if vouched else unknown
        )

    def test_padding_of_a_batch_is_no_row(self):
        caches = [RotatingKVCache(SIZE) for _ in range(2)]
        for cache in caches:
            cache.update_and_fetch(*Rows().at(0, 40))
        batch = BatchRotatingKVCache.merge(caches)
        batch.prepare(lengths=[3, 6], right_padding=[3, 0])
        k, v = Rows().at(40, 46)
        batch.update_and_fetch(mx.concatenate([k, k]), mx.concatenate([v, v]))
        batch.finalize()
        row = batch.extract(0)
        assert (row.offset, row.keys.shape[2]) == (43, 19)
        # By its fields slot 0 would hold position 24; it holds padding.
        assert not np.array_equal(bits(row.keys[:, :, :1]), bits(Rows().at(24, 25)[0]))
        parcel = take(CODEC, row)
        assert parcel.positions == list(range(27, 43))
        assert np.array_equal(parcel.rows["k"], bits(Rows().at(27, 43)[0]))
        again = give(CODEC, parcel, 43, snapshot=True)
        example = Example(ring(0), (40, 3))
        caches = [again, row, self.live(example)]
        assert self.follow(example, 43, caches, (1, 5, 1)) > 0

    @pytest.mark.parametrize("keep", [0, 4])
    def test_a_lost_index_would_show(self, keep):
        example = Example(ring(keep), (41, *(1,) * 5))
        live = self.live(example)
        rebuilt = give(CODEC, take(CODEC, live), live.offset, snapshot=True)
        rebuilt._idx += 1
        with pytest.raises(AssertionError):
            self.follow(example, live.offset, [live, rebuilt], (1,))

    @pytest.mark.parametrize(
        "meta",
        [
            {"slots": 16, "index": 3},
            {"slots": 16, "index": 17},
            {"slots": 15, "index": 15},
            {"slots": 1 << 40, "index": 1 << 40},
            {"slots": -1, "index": 5},
            {"slots": 16, "index": 5.0},
            {"slots": 16},
            {},
        ],
    )
    def test_refuses_metadata_of_no_ring(self, meta):
        with pytest.raises(MalformedCache):
            CODEC.place({"max_size": 16, "keep": 4}, meta, 30)
