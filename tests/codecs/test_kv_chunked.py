from __future__ import annotations

from functools import partial
from typing import ClassVar

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache

from kvkeep.codecs import codec_for
from kvkeep.codecs.kv_chunked import CODEC
from kvkeep.errors import MalformedCache
from tests.architectures import build
from tests.codecs.contract import Example, InPlaceContract, Rows, same_bits
from tests.codecs.shuttle import give, take

CHUNK = 16
chunked = partial(ChunkedKVCache, CHUNK)


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
            cache.update_and_fetch(*Rows().at(cache.offset, cache.offset + count))
        for name, value in fields.items():
            setattr(cache, name, value)
        return cache

    return make


def two_requests():
    cache = chunked()
    cache.update_and_fetch(mx.ones((2, 2, 5, 8)), mx.ones((2, 2, 5, 8)))
    return cache


class TestKVChunked(InPlaceContract):
    codec = CODEC
    attributes = ("offset", "chunk_size", "start_position")
    examples: ClassVar = {
        "one token": Example(chunked, (1,)),
        "not full": Example(chunked, (5, 1, 1)),
        "full": Example(chunked, (10, 6)),
        "over": Example(chunked, (17,), regrows=True),
        "long prefill": Example(chunked, (41,), regrows=True),
        "front cut": Example(chunked, (41, 7), regrows=True),
        "decoded": Example(chunked, (41, 1, 1, 1), regrows=True),
        "cut and not yet fed": Example(chunked, (41,), after=lambda c: c.maybe_trim_front() or c),
        "trimmed, nothing cut": Example(chunked, (41,), after=trim(30)),
        "trimmed, front cut": Example(chunked, (41, 7), after=trim(5), regrows=True),
        "steps": Example(partial(ChunkedKVCache, 300), (300, 260), regrows=True),
    }
    empty: ClassVar = {"new": chunked, "trimmed to nothing": lambda: trim(5)(set_fields()())}
    batches: ClassVar = {"two requests": two_requests}
    malformed: ClassVar = {
        "offset beyond the arrays": (set_fields(offset=257), "claims 257 positions"),
        "negative offset": (set_fields(offset=-1), "offset is -1"),
        "negative start": (set_fields(start_position=-1), "start_position is -1"),
        "starts behind its end": (set_fields(start_position=6), r"holds \[6, 5\)"),
        "no chunk": (set_fields(chunk_size=0), "of 0 positions"),
        "unequal": (set_fields(values=mx.ones((1, 2, 7, 4))), "unequal length"),
        "too little left": (
            lambda: trim(12)(set_fields((41, 7))()),
            "holds 11 positions from 25 on, fewer than its 16",
        ),
    }

    def feed(self, example, cache, start, count):
        # The model cuts the front of every chunked cache before each forward.
        cache.maybe_trim_front()
        return super().feed(example, cache, start, count)

    def trimmed(self, example, live, p):
        if live.start_position:
            return None
        live.trim(live.offset - p)
        return live

    def roomy(self):
        rows = Rows(heads=8, k_width=64, v_width=64)
        example = Example(partial(ChunkedKVCache, 900), (600,), rows)
        return example, self.live(example)

    def test_refuses_metadata_behind_the_offset(self):
        with pytest.raises(MalformedCache, match="starts at 31 cannot resume at 30"):
            CODEC.place({"chunk_size": CHUNK}, {"start_position": 31}, 30)


@pytest.mark.parametrize("p", [7, 23, 24, 25, 48, 60])
def test_a_real_model_goes_on_alike(p):
    """llama4 masks by chunk and numbers keys from ``start_position``, with or without more rows."""
    model = build("llama4")
    tokens = mx.random.randint(0, 97, (1, 80), key=mx.random.key(1))
    live = model.make_cache()
    for start in range(0, p, 20):
        mx.eval(model(tokens[:, start : min(p, start + 20)], cache=live))
    parcels = [take(codec_for(cache), cache) for cache in live]
    by_rows, as_laid_out = (
        [
            give(codec_for(cache), parcel, p, snapshot=snapshot)
            for cache, parcel in zip(live, parcels, strict=True)
        ]
        for snapshot in (False, True)
    )
    assert by_rows[0].start_position == max(0, p - 24)
    assert as_laid_out[0].start_position == live[0].start_position
    compared = 0
    for start, stop in ((p, p + 1), (p + 1, p + 9), (p + 9, p + 10)):
        logits = [model(tokens[:, start:stop], cache=c) for c in (live, by_rows, as_laid_out)]
        compared += same_bits(logits[0], logits[1]) + same_bits(logits[0], logits[2])
    assert compared == 2 * 10 * 97
