"""Speculative rounds of each storage by itself, and what is taken by which."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from kvkeep.caches.chunked_quant import ChunkedQuantizedKVCache
from kvkeep.caches.delayed import DelayedKVCache
from kvkeep.caches.paged import PagedKVCache
from kvkeep.caches.quantized import DenseQuantizedKVCache
from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache
from kvkeep.caches.round_parts import METHODS
from kvkeep.caches.rounds import Rounds
from kvkeep.caches.turboquant import TurboQuantKVCache
from kvkeep.errors import BadRound
from tests.caches.primed import (
    assert_same,
    held,
)
from tests.conformance import models


def rows(start, count, batch=1):
    x = mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None]
    keys = mx.sin(x + mx.arange(64) * 0.37 + mx.arange(batch)[:, None, None, None])
    return mx.broadcast_to(keys, (batch, 2, count, 64)), keys[:, :1] * mx.ones((1, 2, 1, 1))


def fed(cache, *counts, start=0, batch=1):
    for count in counts:
        cache.update_and_fetch(*rows(start, count, batch))
        start += count
    return cache


KINDS = {
    "kv": (KVCache, (300,)),
    "quantized": (QuantizedKVCache, (20,)),
    "concatenated": (ConcatenateKVCache, (20,)),
    "chunked": (lambda: ChunkedKVCache(16), (20,)),
    "read densely": (lambda: DenseQuantizedKVCache(bits=4, group_size=32), (20,)),
    "quantized ring": (lambda: RotatingQuantizedKVCache(32, bits=4, group_size=32), (50, 1)),
    "quantized chunks": (lambda: ChunkedQuantizedKVCache(16, bits=4, group_size=32), (20,)),
    "turboquant": (TurboQuantKVCache, (20,)),
    "paged": (lambda: PagedKVCache(8), (20,)),
    "delayed": (lambda: DelayedKVCache(bits=4, group_size=32, start=1000), (20,)),
    "delayed, converted": (lambda: DelayedKVCache(bits=4, group_size=32, start=5), (20, 1)),
    "delayed ring": (
        lambda: DelayedKVCache(bits=4, group_size=32, start=53, source=RotatingKVCache(32)),
        (50,),
    ),
    "ring, not full": (lambda: RotatingKVCache(32, keep=2), (20, 1, 1)),
    "ring that wraps in the window": (lambda: RotatingKVCache(32, keep=2), (30,)),
    "ring after a prefill": (lambda: RotatingKVCache(32), (50,)),
    "ring after decoding": (lambda: RotatingKVCache(32, keep=2), (50, *[1] * 9)),
    "batch": (lambda: BatchKVCache([0, 0]), (20,)),
    "batch of rings": (lambda: BatchRotatingKVCache(32, [0, 0]), (50, 1, 1, 1)),
}


@pytest.mark.parametrize("counts", [(5,), (1, 1, 1, 1, 1), (1, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_the_first_of_a_window(kind, counts):
    make, before = KINDS[kind]
    batch = 2 if "batch" in kind else 1
    start, window = sum(before), sum(counts)
    for keep in range(window + 1):
        cache, short = (fed(make(), *before, batch=batch) for _ in range(2))
        with Rounds(nn.Module(), [cache]) as rounds:
            rounds.begin()
            fed(cache, *counts, start=start, batch=batch)
            rounds.rollback(keep)
        left = keep
        for count in counts:
            if left > 0:
                fed(short, min(count, left), start=start + keep - left, batch=batch)
            left -= count
        for after in (0, 1, 3):
            if after:
                fed(cache, after, start=start + keep, batch=batch)
                fed(short, after, start=start + keep, batch=batch)
            assert np.array_equal(cache.offset, short.offset)
            assert_same(held(cache), held(short))


class Mine:
    """A cache that takes its own rounds."""

    def __init__(self):
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def commit(self):
        self.calls.append("commit")

    def rollback(self, keep):
        self.calls.append(keep)


def test_a_mixed_list_is_taken_layer_by_layer():
    mine, inner, plain = Mine(), KVCache(), fed(KVCache(), 7)
    rounds = Rounds(nn.Module(), [mine, CacheList(inner, fed(RotatingKVCache(8), 20)), plain])
    for end in (rounds.commit, lambda: rounds.rollback(2), rounds.close):
        rounds.begin()
        fed(inner, 4)
        fed(rounds._caches[1].caches[1], 4)
        fed(plain, 4)
        end()
    assert mine.calls == ["begin", "commit", "begin", 2, "begin", 0]
    assert (inner.offset, rounds._caches[1].caches[1].offset, plain.offset) == (6, 26, 13)


@pytest.mark.parametrize("missing", METHODS)
def test_part_of_the_three_methods_is_refused(missing):
    own = {name: (lambda *_: None) for name in METHODS if name != missing}
    with pytest.raises(BadRound, match=rf"^Layer 1: Half has \w+, \w+ but not {missing}"):
        Rounds(nn.Module(), [KVCache(), type("Half", (), own)()])


def test_what_cannot_be_set_back_is_named():
    mamba = models.build("mamba2")
    with pytest.raises(BadRound, match=r"^Layer 0: ArraysCache holds the state of no gated-delta"):
        Rounds(mamba, make_prompt_cache(mamba))
    with pytest.raises(BadRound, match=r"^Layer 0: object can be neither trimmed nor set back"):
        Rounds(nn.Module(), [object()])


def test_a_cache_that_was_converted_in_the_window_is_trimmed():
    caches = [fed(KVCache(), 20)]
    with Rounds(nn.Module(), caches) as rounds:
        rounds.begin()
        fed(caches[0], 5, start=20)
        caches[0] = caches[0].to_quantized(group_size=64, bits=8)
        rounds.rollback(2)
    assert (type(caches[0]), caches[0].offset) == (QuantizedKVCache, 22)
