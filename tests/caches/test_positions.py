"""Compiled decode: one trace, the positions as data, and the logits of the plain step."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from kvkeep.caches.contract import Positioned
from kvkeep.caches.positions import STEP, CompiledDecode, Traced, positions_of
from kvkeep.errors import BadScheme, EmptyCache
from tests import architectures
from tests.caches.primed import PROMPT, bits, primed, run
from tests.conformance import models


@pytest.fixture(scope="module")
def model():
    return architectures.build("llama")


def assert_logits(found, expected):
    """The same bits on a CPU. Elsewhere the read of a longer, masked buffer is summed in other
    parts, so only nearly."""
    if mx.default_device() == mx.cpu:
        np.testing.assert_array_equal(bits(found), bits(expected))
    else:
        found, expected = (np.array(x.astype(mx.float32)) for x in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)


def follow(model, caches, plain, count, rows=1):
    """Decode greedily with a compiled step beside the plain one; the traces that it took."""
    step = CompiledDecode(model, caches)
    token = mx.array([[5 + i] for i in range(rows)])
    for _ in range(count):
        found, expected = step(token), model(token, cache=plain)
        assert_logits(found, expected)
        for a, b in zip(caches, plain, strict=True):
            assert np.array_equal(a.offset, b.offset)
        token = mx.argmax(expected, axis=-1)
    return step.traces


@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v3"])
def test_one_trace_decodes_as_the_plain_step_does(name):
    """Grouped heads, a scaled rotation, and latent attention whose keys and values differ."""
    model = models.build(name)
    caches, plain = primed(model), primed(model)
    assert follow(model, caches, plain, 12) == 1
    for a, b in zip(caches, plain, strict=True):
        for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True):
            np.testing.assert_array_equal(bits(x), bits(y))


def test_a_full_buffer_grows_with_one_more_trace(model):
    long = [i % 90 for i in range(STEP - 3)]
    caches, plain = primed(model, long), primed(model, long)
    assert [cache.keys.shape[2] for cache in caches] == [STEP] * len(caches)
    assert follow(model, caches, plain, 6) == 2
    assert [cache.keys.shape[2] for cache in caches] == [2 * STEP] * len(caches)


def test_every_row_of_a_batch_has_its_own_position(model):
    rows = [primed(model, tokens) for tokens in (PROMPT, PROMPT[:3], PROMPT[:5])]
    caches, plain = (
        [BatchKVCache.merge(layer) for layer in zip(*rows, strict=True)] for _ in range(2)
    )
    positions = positions_of(caches[0])
    assert (positions.dtype, positions.tolist()) == (mx.int32, [len(PROMPT), 3, 5])
    assert follow(model, caches, plain, 5, rows=3) == 1
    for i in range(3):
        a, b = caches[0].extract(i), plain[0].extract(i)
        assert a.offset == b.offset
        np.testing.assert_array_equal(bits(a.keys), bits(b.keys))


def test_the_caches_stay_those_of_mlx_lm(model):
    """Trimmed and used plainly between two compiled steps, without another trace."""
    caches, plain = primed(model), primed(model)
    step = CompiledDecode(model, caches)
    for token in (7, 8, 9):
        assert_logits(step(mx.array([[token]])), run(model, plain, [token]))
    for used in (caches, plain):
        assert [cache.trim(2) for cache in used] == [2] * len(used)
        run(model, used, (1, 2))
    assert_logits(step(mx.array([[3]])), run(model, plain, [3]))
    assert step.traces == 1
    assert caches[0].offset == len(PROMPT) + 4


def test_positions_count_a_write_as_the_offset_of_a_plain_cache_does():
    keys = mx.arange(2 * 3 * 8 * 4, dtype=mx.float32).reshape(2, 3, 8, 4)
    counted = mx.array([5, 3], dtype=mx.int32)
    cache = Traced(keys, keys, counted, mx.array([5]), mx.array([0, 2]))
    assert isinstance(cache, Positioned)
    taken = cache.offset
    new = mx.full((2, 3, 1, 4), -1.0)
    found, _ = cache.update_and_fetch(new, new)
    assert taken.tolist() == [5, 3]
    assert cache.offset.tolist() == cache.positions.tolist() == [6, 4]
    expected = np.array(keys)
    assert not np.array_equal(np.array(found), expected)
    expected[:, :, 5] = -1
    np.testing.assert_array_equal(np.array(found), expected)
    assert getattr(KVCache(), "positions", None) is None


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_the_mask_is_that_of_mlx_lm_over_the_whole_buffer(window):
    capacity, slot, padding = 9, 5, mx.array([0, 2])
    keys = mx.zeros((2, 1, capacity, 4))
    cache = Traced(keys, keys, mx.array([5, 3]), mx.array([slot]), padding)
    mask = np.array(cache.make_mask(1, window_size=window))
    expected = create_causal_mask(1, slot, window_size=window, left_padding=padding)
    np.testing.assert_array_equal(mask[..., : slot + 1], np.array(expected))
    assert mask.shape == (2, 1, 1, capacity)
    assert not mask[..., slot + 1 :].any()


@pytest.mark.parametrize("other", [RotatingKVCache(8), QuantizedKVCache()])
def test_other_caches_are_refused_by_layer(model, other):
    with pytest.raises(BadScheme, match=rf"^Layer 1: {type(other).__name__} cannot be decoded"):
        CompiledDecode(model, [KVCache(), other])


def test_an_empty_cache_is_refused(model):
    caches = make_prompt_cache(model)
    with pytest.raises(EmptyCache, match=r"^Layer 0: KVCache covers no token"):
        CompiledDecode(model, caches)(mx.array([[1]]))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        # Its last layers take their position from the number of keys that they borrow.
        ("afm7", "mlx_lm.models.afm7 gives other logits over a whole buffer"),
        ("gpt_bigcode", "mlx_lm.models.gpt_bigcode reads values in its step"),
    ],
)
def test_a_model_that_cannot_be_decoded_so_is_refused_at_the_first_step(name, why):
    model = models.build(name)
    caches, plain = primed(model), primed(model)
    step = CompiledDecode(model, caches)
    for _ in range(2):
        with pytest.raises(BadScheme, match=why):
            step(mx.array([[7]]))
    found, expected = (run(model, used, [7]) for used in (caches, plain))
    np.testing.assert_array_equal(bits(found), bits(expected))
    assert caches[0].offset == len(PROMPT) + 1
