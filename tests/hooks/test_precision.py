"""Delayed quantization by mlx-lm itself: the boundary is known, survives, and is kept."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

import kvkeep
from kvkeep import Reason
from kvkeep.hooks.precision import track
from tests import architectures
from tests.prefixstore.first_process import bits, step

PROMPT = [(5 * i + 1) % architectures.VOCAB for i in range(90)]


@pytest.fixture(scope="module")
def model():
    return architectures.build("llama")


def run(model, caches, prompt, start, step_size=20, count=6):
    """What ``mlx_lm.generate --kv-bits 4`` does; the tokens that the caches then cover."""
    answer = generate_step(
        mx.array(prompt),
        model,
        max_tokens=count,
        prompt_cache=caches,
        prefill_step_size=step_size,
        kv_bits=4,
        kv_group_size=32,
        quantized_kv_start=start,
    )
    out = prompt + [int(token) for token, _ in answer]
    return out[: caches[0].offset]


@pytest.mark.parametrize(("start", "boundary"), [(0, 20), (1, 20), (20, 20), (33, 40), (89, 89)])
def test_the_boundary_is_where_mlx_lm_converted(model, tmp_path, start, boundary):
    caches = track(make_prompt_cache(model))
    tokens = run(model, caches, PROMPT, start)
    assert all(type(c) is QuantizedKVCache for c in caches)
    assert {c.minimum_resumable_offset for c in caches} == {boundary}
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = store.space(identity={}, layout=make_prompt_cache(model))
        assert space.snapshot(tokens, caches).stored
        hit = space.resume([*tokens, 0])
        assert {c.minimum_resumable_offset for c in hit.caches} == {boundary}
        at = space.explain([*tokens[:boundary], 1000, 1001])
        assert (at.offset, at.reason) == (boundary, Reason.FULL)
        below = space.explain([*tokens[: boundary - 1], 1000, 1001])
        assert (below.offset, below.reason) == (0, Reason.BELOW_FLOOR)
        again = space.snapshot(tokens, hit.caches)
        assert (again.stored, again.bytes_written) == (True, 0)


def test_trimming_below_the_boundary_would_have_changed_the_answer(model, tmp_path):
    caches = track(make_prompt_cache(model))
    tokens = run(model, caches, PROMPT, start=60)
    (boundary,) = {c.minimum_resumable_offset for c in caches}
    cut = boundary - 10
    trimmed = copy.deepcopy(caches)
    for cache in trimmed:
        cache.trim(cache.offset - cut)
    cold = make_prompt_cache(model)
    for at in range(0, cut, 20):
        step(model, cold, tokens[at : min(at + 20, cut)])
    wrong = bits(step(model, trimmed, tokens[cut : cut + 1]))
    right = bits(step(model, cold, tokens[cut : cut + 1]))
    assert not np.array_equal(wrong, right)
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = store.space(identity={}, layout=make_prompt_cache(model))
        assert space.snapshot(tokens, caches).stored
        hit = space.resume([*tokens[:cut], 1000, 1001])
    assert (hit.caches, hit.offset, hit.decision.reason) == (None, 0, Reason.BELOW_FLOOR)


def test_rows_under_two_boundaries_are_never_mixed(model, tmp_path):
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = store.space(identity={}, layout=make_prompt_cache(model))
        resumed = 0
        for start, boundary in ((33, 40), (60, 60)):
            caches = track(make_prompt_cache(model))
            tokens = run(model, caches, PROMPT, start)
            assert space.snapshot(tokens, caches).tokens_new > 0
            live = [bits(c.keys[0][..., : c.offset, :]) for c in caches]
            hit = space.resume([*tokens, 0])
            got = {c.minimum_resumable_offset for c in hit.caches}
            if got == {boundary}:
                for cache, expected in zip(hit.caches, live, strict=True):
                    assert np.array_equal(bits(cache.keys[0][..., : cache.offset, :]), expected)
                resumed += hit.offset
        assert resumed > 0
        info = store.inspect(space, PROMPT)
        assert len(info.rows) == 2


def test_a_conversion_without_tracking_is_unknown_history(model, tmp_path):
    caches = make_prompt_cache(model)
    tokens = run(model, caches, PROMPT, start=40)
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = store.space(identity={}, layout=make_prompt_cache(model))
        assert space.snapshot(tokens, caches).stored
        assert space.explain([*tokens, 0]).offset == len(tokens)
        assert space.explain(tokens).reason is Reason.BELOW_FLOOR
