from __future__ import annotations

from functools import partial
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.deepseek_v41 import Compressor, LayerCache, ModelArgs

from kvkeep.codecs.kv_compressed import CODEC, PARTS
from kvkeep.errors import MalformedCache
from tests.codecs.contract import CodecContract, Example, Rows
from tests.codecs.shuttle import give, take

WINDOW, WIDTH = 12, 32


class Plain:
    """A layer that keeps its window and nothing else."""

    def __call__(self, x, cache):
        return cache.update_window(x), None, None


class Compressing:
    """A layer that also closes groups of ``ratio`` positions, with mlx-lm's own compressor."""

    def __init__(self, ratio, index=True):
        mx.random.seed(ratio)
        args = ModelArgs(hidden_size=WIDTH, head_dim=16, compress_ratios=(ratio,))
        self.compressor = Compressor(args, 0)
        self.index_proj = nn.Linear(16, 8, bias=False) if index else None

    def __call__(self, x, cache):
        start = cache.offset
        window = cache.update_window(x)
        latent, _ = self.compressor(x, start, cache)
        if latent is not None:
            cache.compress_kv = append(cache.compress_kv, latent)
            if self.index_proj is not None:
                key = self.index_proj(latent).astype(mx.bfloat16)
                cache.index_k = append(cache.index_k, key)
        return window, cache.compress_kv, cache.index_k


def append(old, new):
    return new if old is None else mx.concatenate([old, new], axis=1)


LAYERS = {4: Compressing(4), 8: Compressing(8), 1: Compressing(1), 3: Compressing(3, index=False)}


class Layered(Example):
    """An example with the layer that feeds it."""

    def __init__(self, ratio, counts):
        super().__init__(partial(LayerCache, WINDOW), counts)
        object.__setattr__(self, "layer", LAYERS.get(ratio, Plain()))


def changed(*counts, ratio=4, **fields):
    """A cache after ``counts`` whose fields are then set, or computed from the old ones."""

    def make():
        cache = LayerCache(WINDOW)
        for count in counts:
            LAYERS.get(ratio, Plain())(mx.ones((1, count, WIDTH)), cache)
        for name, value in fields.items():
            old = getattr(cache, name)
            setattr(cache, name, value(old) if callable(value) else value)
        return cache

    return make


def twice(x):
    return mx.concatenate([x, x], axis=0)


class TestKVCompressed(CodecContract):
    codec = CODEC
    attributes = ("offset", "window_size")
    examples: ClassVar = {
        "window only, one token": Layered(None, (1,)),
        "window only, wrapped": Layered(None, (9, 9, 1)),
        "no group yet": Layered(8, (3,)),
        "a group closed just now": Layered(4, (8,)),
        "exactly the window": Layered(4, (12,)),
        "an open group": Layered(4, (30, 1, 1, 1)),
        "no index": Layered(3, (14,)),
        "groups of one position": Layered(1, (15, 1)),
    }
    empty: ClassVar = {"new": partial(LayerCache, WINDOW)}
    batches: ClassVar = {
        "two requests": changed(6, window=twice),
        "two requests in the groups": changed(6, compress_kv=twice),
    }
    malformed: ClassVar = {
        "no window": (changed(6, window=None), "a window of None of 12 positions"),
        "short window": (changed(20, window=lambda x: x[:, 1:]), "a window of 11 of 12"),
        "long window": (changed(20, window_size=11), "a window of 12 of 11"),
        "no window size": (changed(6, window_size=0), "a window of 6 of 0"),
        "offset beyond the window": (changed(6, offset=7), "at offset 7 holds a window of 6"),
        "offset between groups": (changed(20, offset=21), "5 groups and 0 positions"),
        "index lost": (changed(20, index_k=lambda x: x[:, 1:]), "5 groups and 4 index keys"),
        "index without groups": (changed(20, compress_kv=None), "None groups and 5 index keys"),
        "gate lost": (changed(6, pending_gate=None), "2 keys and None gates"),
        "open group lost": (
            changed(22, pending_kv=None, pending_gate=None),
            "5 groups and 0 positions",
        ),
        "open group longer than a group": (
            changed(6, compress_kv=lambda x: mx.tile(x, (1, 4, 1)), index_k=None),
            "4 groups and 2 positions",
        ),
        "open group without the older ones": (
            changed(6, compress_kv=None, index_k=None),
            "no group and 2 positions",
        ),
        "four axes": (changed(6, window=lambda x: x[None]), "window is no array of 3 axes"),
        "no array": (changed(6, index_k=3), "index_k is no array"),
        "no offset": (changed(6, offset=None), "offset is None"),
    }

    def feed(self, example, cache, start, count):
        x = Rows(heads=1, k_width=WIDTH, k_dtype=mx.bfloat16).at(start, start + count)[0][:, 0]
        return example.layer(x, cache)

    def test_resumes_only_at_a_snapshot(self):
        parcel = take(CODEC, self.live(self.examples["an open group"]))
        assert parcel.facts.reach.stateful
        assert (parcel.facts.floor, parcel.facts.rows) == (33, ())
        assert CODEC.needs(parcel.facts.params, parcel.meta, 33) == ()
        with pytest.raises(MalformedCache, match="only at a snapshot"):
            give(CODEC, parcel, 33, snapshot=False)

    def test_an_open_group_without_rows_is_not_an_unset_one(self):
        live = self.live(self.examples["a group closed just now"])
        parcel = take(CODEC, live)
        assert parcel.meta == {"none": []}
        rebuilt = give(CODEC, parcel, 8, snapshot=True)
        assert rebuilt.pending_kv.shape == live.pending_kv.shape == (1, 0, 16)

    @pytest.mark.parametrize(
        ("none", "names"),
        [
            ([], ["window"]),
            ([1, 2, 3, 4], []),
            ([1, 2, 3, 4], ["window", "offset"]),
            ([0, 1, 2, 3, 4], ["window"]),
            ([1, 2, 3, 5], ["window"]),
            ([0], list(PARTS[1:])),
            ("", list(PARTS)),
        ],
    )
    def test_refuses_parts_that_are_not_complete(self, none, names):
        tensors = {name: mx.ones((1, 2, 4)) for name in names}
        with pytest.raises(MalformedCache):
            CODEC.build({"window_size": 4}, {"none": none}, 2, {}, tensors, None)
