from __future__ import annotations

import gc
from functools import partial
from typing import ClassVar

import mlx.core as mx
import pytest

import kvkeep
from kvkeep.caches.paged import Block, PagedKVCache
from kvkeep.codecs.base import Segment
from kvkeep.codecs.kv_paged import CODEC
from kvkeep.errors import MalformedCache
from tests.codecs.contract import Example, RowContract, Rows, same_bits
from tests.codecs.shuttle import give, take

SMALL = partial(PagedKVCache, 4)


@pytest.fixture
def no_spare_buffers():
    """MLX hands out freed buffers again, larger ones too, which would count as more memory."""
    gc.collect()
    mx.clear_cache()


def trim(count):
    def cut(cache):
        assert cache.trim(count) == count
        return cache

    return cut


def forked(positions):
    """A cache whose blocks another live cache lists as well, and that one."""

    def fork(cache):
        other = cache.fork(positions)
        other.lender = cache
        return other

    return fork


def set_fields(**fields):
    """A cache of 6 tokens in blocks of 4, with these attributes set by hand."""

    def make():
        cache = SMALL()
        cache.update_and_fetch(*Rows().at(0, 6))
        for name, value in fields.items():
            setattr(cache, name, value)
        return cache

    return make


def with_table(change):
    def make():
        cache = set_fields()()
        cache.table = change(*cache.table)
        return cache

    return make


def two_requests():
    cache = SMALL()
    cache.update_and_fetch(mx.ones((2, 2, 5, 8)), mx.ones((2, 2, 5, 8)))
    return cache


class TestKVPaged(RowContract):
    codec = CODEC
    attributes = ("offset", "block_size", "read")
    examples: ClassVar = {
        "one token": Example(SMALL, (1,)),
        "one short of a block": Example(SMALL, (3,)),
        "full blocks": Example(SMALL, (8,)),
        "decoded": Example(SMALL, (6, 1, 1, 1)),
        "blocks of 1": Example(partial(PagedKVCache, 1), (5,)),
        "blocks of 256": Example(PagedKVCache, (250, 12)),
        "trimmed": Example(SMALL, (11,), after=trim(5)),
        "trimmed to a block": Example(SMALL, (11,), after=trim(3)),
        "shared": Example(SMALL, (11,), after=forked(9)),
        "direct read": Example(partial(PagedKVCache, 4, read="direct"), (6, 1)),
        "latent widths": Example(SMALL, (6,), Rows(heads=1, k_width=32, v_width=8)),
        "two dtypes": Example(SMALL, (6,), Rows(k_dtype=mx.float16, v_dtype=mx.float32)),
    }
    empty: ClassVar = {
        "new": PagedKVCache,
        "trimmed to nothing": lambda: trim(6)(set_fields()()),
    }
    batches: ClassVar = {
        "two requests": two_requests,
        "an offset per request": set_fields(offset=mx.array([6, 6])),
    }
    malformed: ClassVar = {
        "offset beyond the table": (set_fields(offset=9), "claims 9 positions .* lists 2"),
        "a block too many": (set_fields(offset=4), "claims 4 positions .* lists 2"),
        "an empty table": (set_fields(table=()), "claims 6 positions .* lists 0"),
        "no table": (set_fields(table=None), "table is NoneType"),
        "negative offset": (set_fields(offset=-1), "offset is -1"),
        "blocks of nothing": (set_fields(block_size=0), "block_size is 0"),
        "blocks of another size": (
            set_fields(block_size=3),
            r"holds block 0 as .* unlike others",
        ),
        "an unknown read": (set_fields(read="sideways"), "read is 'sideways'"),
        "unequal blocks": (
            with_table(lambda a, b: (a, Block(b.keys[:, :1], b.values))),
            "holds block 1 as .* unlike others",
        ),
        "another dtype": (
            with_table(lambda a, b: (a, Block(b.keys.astype(mx.float32), b.values))),
            "holds block 1 as .* unlike others",
        ),
        "no values": (with_table(lambda a, b: (a, b.keys)), "no keys and values in block 1"),
        "a short block": (
            with_table(lambda a, b: (a, Block(b.keys[:, :, :2], b.values[:, :, :2]))),
            "claims 4 positions but holds 2",
        ),
    }

    def trimmed(self, example, live, p):
        live.trim(live.offset - p)
        return live

    @pytest.mark.parametrize("p", [1, 4, 5, 8, 9, 11])
    def test_only_occupied_blocks_come_back_and_they_are_its_own(self, p):
        live = SMALL()
        live.update_and_fetch(*Rows().at(0, 11))
        parcel = take(CODEC, live)
        rebuilt = give(CODEC, parcel, p, snapshot=False)
        assert len(rebuilt.table) == -(-p // 4)
        assert rebuilt.nbytes == -(-p // 4) * 4 * live.bytes_per_token()
        assert {b.keys.shape for b in rebuilt.table} == {(1, 2, 4, 8)}

    @pytest.mark.parametrize(
        ("start", "stop", "first", "slots"),
        [(0, 11, 0, 12), (5, 6, 4, 4), (4, 8, 4, 4), (7, 9, 4, 8), (10, 11, 8, 4)],
    )
    def test_a_view_joins_the_blocks_that_are_asked_for(self, start, stop, first, slots):
        live = SMALL()
        live.update_and_fetch(*Rows().at(0, 11))
        planes, held = CODEC.view(live, CODEC.describe(live), start, stop)
        assert held == (Segment(first, 0, min(first + slots, 11) - first),)
        for name, whole in CODEC.planes(live).items():
            assert planes[name].shape[2] == slots
            assert same_bits(planes[name], whole[:, :, first : first + slots]) > 0

    @pytest.mark.usefixtures("no_spare_buffers")
    def test_a_snapshot_of_a_few_tokens_copies_a_few_blocks(self, tmp_path):
        rows = Rows(heads=8, k_width=256, v_width=256)
        live = PagedKVCache(32)
        live.update_and_fetch(*rows.at(0, 800))
        mx.eval(live.state)
        peaks = []
        with kvkeep.open(tmp_path) as store:
            space = store.space(identity={}, layout=[PagedKVCache(32)])
            for stop in (800, 810):
                if stop > live.offset:
                    live.update_and_fetch(*rows.at(800, stop))
                mx.eval(live.state)
                before = mx.get_active_memory()
                mx.reset_peak_memory()
                assert space.snapshot(list(range(stop)), [live]).stored
                peaks.append(mx.get_peak_memory() - before)
            hit = space.resume(list(range(811)))
        assert peaks[0] >= 800 * live.bytes_per_token()
        assert peaks[1] <= 3 * live.table[0].nbytes
        assert same_bits(hit.caches[0].keys_and_values(), live.keys_and_values()) > 10**6

    @pytest.mark.parametrize("heads", [1, 8])
    @pytest.mark.usefixtures("no_spare_buffers")
    def test_a_trim_after_a_resume_frees_memory(self, heads):
        live = PagedKVCache(64)
        live.update_and_fetch(*Rows(heads=heads, k_width=256, v_width=256).at(0, 640))
        parcel = take(CODEC, live)
        before = mx.get_active_memory()
        rebuilt = give(CODEC, parcel, 640, snapshot=False)
        size = 640 * rebuilt.bytes_per_token()
        assert mx.get_active_memory() - before == pytest.approx(size, rel=0.1)
        rebuilt.trim(576)
        assert mx.get_active_memory() - before == pytest.approx(size / 10, rel=0.1)

    @pytest.mark.parametrize(
        ("changed", "problem"),
        [
            ({"block_size": 0}, "block_size is 0"),
            ({"block_size": "4"}, "block_size is '4'"),
            ({"read": "__class__"}, "read is '__class__'"),
        ],
    )
    def test_hostile_parameters_build_nothing(self, changed, problem):
        live = set_fields()()
        params = {**CODEC.describe(live).params, **changed}
        with pytest.raises(MalformedCache, match=problem):
            CODEC.build(params, None, 6, CODEC.planes(live), {}, None)
