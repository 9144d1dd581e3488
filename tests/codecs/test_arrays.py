from __future__ import annotations

from functools import cache as remembered
from functools import partial
from typing import ClassVar

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.mamba import MambaBlock, ModelArgs

from kvkeep.codecs.arrays import CODEC
from kvkeep.errors import MalformedCache
from tests.codecs.contract import CodecContract, Example, Rows
from tests.codecs.shuttle import give, take

WIDTH = 8


@remembered
def block():
    """A real recurrent layer: a short convolution and a selective state."""
    mx.random.seed(3)
    layer = MambaBlock(
        ModelArgs(
            model_type="mamba",
            vocab_size=11,
            hidden_size=WIDTH,
            intermediate_size=16,
            state_size=4,
            num_hidden_layers=1,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank="auto",
        )
    )
    mx.eval(layer.parameters())
    return layer


class Counter:
    """A recurrence over slots of other dtypes; slot 0 stays unset."""

    def __call__(self, x, cache):
        seen = cache[1] if cache[1] is not None else mx.zeros((1, 3), mx.int64)
        total = cache[2] if cache[2] is not None else mx.zeros((1, WIDTH), mx.bfloat16)
        for t in range(x.shape[1]):
            seen = seen * 7 + x.shape[1] + t
            total = total * 0.5 + x[:, t].astype(mx.bfloat16)
        cache[1], cache[2], cache[3] = seen, total, seen % 2 == 0
        return total


def set_slots(*slots, **fields):
    def make():
        cache = ArraysCache(size=len(slots))
        cache.cache = list(slots)
        for name, value in fields.items():
            setattr(cache, name, value)
        return cache

    return make


class TestArrays(CodecContract):
    codec = CODEC
    attributes = ("left_padding", "lengths")
    examples: ClassVar = {
        "one token": Example(partial(ArraysCache, 2), (1,)),
        "prefill": Example(partial(ArraysCache, 2), (30,)),
        "decoded": Example(partial(ArraysCache, 2), (30, 1, 1)),
        "mixed dtypes, an unset slot": Example(partial(ArraysCache, 4), (9, 1)),
    }
    empty: ClassVar = {"new": partial(ArraysCache, 2), "no slots": partial(ArraysCache, 0)}
    batches: ClassVar = {
        "two requests": set_slots(None, mx.ones((2, 3, 4))),
        "left padding": set_slots(mx.ones((1, 3)), left_padding=mx.array([0])),
        "lengths": set_slots(mx.ones((1, 3)), lengths=mx.array([3])),
    }
    malformed: ClassVar = {
        "no axes": (set_slots(mx.array(1.0)), "Slot 0 of ArraysCache is no array"),
        "no array": (set_slots(None, 3), "Slot 1 of ArraysCache is no array"),
    }

    def feed(self, example, cache, start, count):
        x = Rows(heads=1, k_width=WIDTH, k_dtype=mx.float32).at(start, start + count)[0][:, 0]
        layer = Counter() if len(cache.cache) == 4 else block()
        return layer(x, cache)

    def offset(self, example, cache):
        return sum(example.counts)

    def test_has_no_offset_and_needs_no_rows(self):
        facts = CODEC.describe(self.live(self.examples["prefill"]))
        assert (facts.offset, facts.floor, facts.rows, facts.held) == (None, None, (), ())
        assert facts.reach.stateful
        for p in (1, 30):
            assert facts.reach.ranges(p) == CODEC.needs(facts.params, {"none": []}, p) == ()

    def test_resumes_only_at_a_snapshot(self):
        parcel = take(CODEC, self.live(self.examples["prefill"]))
        with pytest.raises(MalformedCache, match="only at a snapshot"):
            give(CODEC, parcel, 30, snapshot=False)

    @pytest.mark.parametrize(
        ("slots", "none", "names"),
        [
            (2, [], ["0"]),
            (2, [0], ["0", "1"]),
            (2, [2], ["0"]),
            (2, [], ["0", "x"]),
            (2, [], ["0", "01"]),
            (1 << 50, [], ["0"]),
            (2, "0", ["1"]),
            (-1, [], []),
        ],
    )
    def test_refuses_slots_that_are_not_complete(self, slots, none, names):
        tensors = {name: mx.ones((1, 2)) for name in names}
        with pytest.raises(MalformedCache):
            CODEC.build({"slots": slots}, {"none": none}, 5, {}, tensors, None)
