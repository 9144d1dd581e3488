"""Speculative rounds: what is kept has the bits of the window's own run, layer by layer."""

from __future__ import annotations

from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    make_prompt_cache,
)

import kvkeep
from kvkeep.caches.rounds import OPEN, Rounds
from kvkeep.errors import UncommittedRound
from tests.caches.primed import (
    PROMPT,
    PROMPTS,
    WINDOW,
    WINDOWS,
    assert_same,
    batched,
    bits,
    held,
    primed,
    recurrent,
    run,
)
from tests.conformance import models

GATED_DELTA = ("qwen3_next", "qwen3_5", "olmo_hybrid")


@pytest.fixture(scope="module")
def model():
    return models.build("qwen3_next")


class Stop(Exception):
    pass


class Seen:
    """The states that the recurrence of a window's forward went through, in every layer."""

    def __init__(self, patch, name):
        module = import_module(f"mlx_lm.models.{name}")
        self.update, convolve = module.gated_delta_update, nn.Conv1d.__call__
        step = gated_delta._gated_delta_step_ops
        self.recurrences, self.convolved, self.steps = [], [], []

        def updated(*args, **named):
            self.recurrences.append((args, named))
            return self.update(*args, **named)

        def convolved(layer, x):
            self.convolved.append(x)
            return convolve(layer, x)

        def stepped(*args):
            result = step(*args)
            self.steps.append(result[1])
            return result

        patch.setattr(module, "gated_delta_update", updated)
        patch.setattr(nn.Conv1d, "__call__", convolved)
        patch.setattr(gated_delta, "_gated_delta_step_ops", stepped)

    def after(self, keep, layer, slots):
        """The slots after the first ``keep`` tokens."""
        (q, k, v, a, b, decay, bias, state, *_), named = self.recurrences[layer]
        length = q.shape[1]
        if keep and self.steps:
            state = self.steps[layer * length + keep - 1]
        elif keep:
            # One Metal kernel runs over the window: run it over the window's own values, cut.
            cut = [x[:, :keep] for x in (q, k, v, a, b)]
            state = self.update(*cut, decay, bias, state, None, **named)[1]
        inputs = self.convolved[layer * (slots - 1) : (layer + 1) * (slots - 1)]
        return [*(bits(x[:, keep : x.shape[1] - length + keep]) for x in inputs), bits(state)]


ODD = {f"linear_num_{x}_heads": 3 for x in ("key", "value")}
"""Sizes that fill no vector register, where a loop's last elements may be computed otherwise."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in GATED_DELTA),
        ("qwen3_next", {**ODD, "linear_key_head_dim": 5, "linear_value_head_dim": 7}),
    ],
)
def test_rollback_gives_the_bits_of_the_windows_own_run(name, changes, monkeypatch):
    model = models.build(name, **changes)
    compared = 0
    for keep in range(len(WINDOW) + 1):
        caches = primed(model)
        with Rounds(model, caches) as rounds:
            rounds.begin()
            with monkeypatch.context() as patch:
                seen = Seen(patch, name)
                run(model, caches, WINDOW)
            whole = [held(cache) for cache in caches]
            rounds.rollback(keep)
        layer = 0
        for cache, before in zip(caches, whole, strict=True):
            if isinstance(cache, ArraysCache):
                assert_same(held(cache), seen.after(keep, layer, len(cache.cache)))
                layer += 1
            else:
                assert cache.offset == len(PROMPT) + keep
                assert_same(held(cache), [x[:, :, : cache.offset] for x in before])
            compared += 1
        assert layer == len(seen.recurrences) > 0
    assert compared == (len(WINDOW) + 1) * len(caches) > 0


def test_what_is_kept_stands_where_token_by_token_would(model):
    """To the last bits of the projections, which a window computes in another shape."""
    for keep in range(len(WINDOW) + 1):
        caches, single = primed(model), primed(model)
        with Rounds(model, caches) as rounds:
            rounds.begin()
            run(model, caches, WINDOW)
            rounds.rollback(keep)
        for token in WINDOW[:keep]:
            run(model, single, [token])
        for a, b in zip(caches, single, strict=True):
            if isinstance(a, ArraysCache):
                for x, y in zip(a.cache, b.cache, strict=True):
                    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(run(model, caches, [1]), run(model, single, [1]), atol=1e-4)


def test_the_replay_multiplies_nothing_again(model, monkeypatch):
    """A product of another shape could end in other bits; on this machine it may not."""
    caches = primed(model)

    def fail(*_):
        raise Stop

    with Rounds(model, caches) as rounds:
        rounds.begin()
        run(model, caches, WINDOW)
        monkeypatch.setattr(nn.Linear, "__call__", fail)
        monkeypatch.setattr(nn.Conv1d, "__call__", fail)
        rounds.rollback(2)
    mx.eval([cache.state for cache in caches])


def test_several_forwards_are_one_window(model):
    parts = (WINDOW[:1], WINDOW[1:4], WINDOW[4:])
    for keep in range(len(WINDOW) + 1):
        caches, reference = primed(model), primed(model)
        rounds = Rounds(model, caches)
        rounds.begin()
        for part in parts:
            run(model, caches, part)
        rounds.rollback(keep)
        left = keep
        for part in parts:
            if left >= len(part):
                run(model, reference, part)
            elif left > 0:
                with Rounds(model, reference) as one:
                    one.begin()
                    run(model, reference, part)
                    one.rollback(left)
            left -= len(part)
        for a, b in zip(caches, reference, strict=True):
            assert_same(held(a), held(b))


def test_commit_keeps_the_window_and_costs_no_copy(model):
    caches, plain = primed(model), primed(model)
    run(model, plain, WINDOW)
    rounds = Rounds(model, caches)
    slots = [slot for cache in recurrent(caches) for slot in cache.cache]
    rounds.begin()
    assert all(
        a is b for a, b in zip(slots, (s for c in recurrent(caches) for s in c.cache), strict=True)
    )
    run(model, caches, WINDOW)
    after = [slot for cache in recurrent(caches) for slot in cache.cache]
    rounds.commit()
    assert all(
        a is b for a, b in zip(after, (s for c in recurrent(caches) for s in c.cache), strict=True)
    )
    for a, b in zip(caches, plain, strict=True):
        assert_same(held(a), held(b))
    # Every token kept is the same as a commit, and a round follows another.
    rounds.begin()
    run(model, caches, WINDOW)
    run(model, plain, WINDOW)
    rounds.rollback(len(WINDOW))
    for a, b in zip(caches, plain, strict=True):
        assert_same(held(a), held(b))


def test_the_first_window_of_an_empty_cache_can_be_taken_back(model):
    caches, fresh = make_prompt_cache(model), make_prompt_cache(model)
    with Rounds(model, caches) as rounds:
        for keep in (0, 2):
            rounds.begin()
            run(model, caches, PROMPT)
            rounds.rollback(keep)
            if not keep:
                assert all(c.cache == [None, None] for c in recurrent(caches))
                assert all(c.offset == 0 for c in caches if isinstance(c, KVCache))
    run(model, fresh, PROMPT)
    compared = 0
    for a, b in zip(caches, fresh, strict=True):
        if isinstance(a, KVCache):
            assert_same(held(a), [x[:, :, :2] for x in held(b)])
            compared += 1
    assert compared


@pytest.mark.parametrize("keeps", [(1, 4, 2), (0, 3, 3), (4, 0, 4), (2, 2, 2)])
def test_every_row_of_a_batch_keeps_its_own(model, keeps):
    caches = batched(model, *PROMPTS)
    with Rounds(model, caches) as rounds:
        rounds.begin()
        run(model, caches, *WINDOWS)
        rounds.rollback(keeps)
    compared = 0
    for row, keep in enumerate(keeps):
        alike = batched(model, *PROMPTS)
        with Rounds(model, alike) as rounds:
            rounds.begin()
            run(model, alike, *WINDOWS)
            rounds.rollback(keep)
        for a, b in zip(caches, alike, strict=True):
            one, other = a.extract(row), b.extract(row)
            if isinstance(one, KVCache):
                assert one.offset == other.offset == len(PROMPTS[row]) + keep
            assert_same(held(one), held(other))
            compared += 1
    assert compared == len(keeps) * len(caches)
    # The rows go on as rows of a batch that was put together from what each of them kept.
    offsets = next(c.offset.tolist() for c in caches if isinstance(c, BatchKVCache))
    assert offsets == [len(p) + k for p, k in zip(PROMPTS, keeps, strict=True)]
    rows = [[c.extract(i) for c in caches] for i in range(len(keeps))]
    merged = [type(c[0]).merge(c) for c in zip(*rows, strict=True)]
    np.testing.assert_allclose(
        run(model, caches, [5], [6], [7]), run(model, merged, [5], [6], [7]), atol=1e-5
    )


def test_counters_of_a_padded_batch_are_set_back():
    model = models.build("qwen3_next")
    padded = ((0, *PROMPT[:4]), PROMPT[:5])
    caches = [
        ArraysCache(len(c.cache), left_padding=[1, 0])
        if isinstance(c, ArraysCache)
        else BatchKVCache([1, 0])
        for c in make_prompt_cache(model)
    ]
    with Rounds(model, caches) as rounds:
        rounds.begin()
        run(model, caches, *padded)
        rounds.rollback(0)
        assert [c.left_padding.tolist() for c in caches] == [[1, 0]] * len(caches)
        rounds.begin()
        run(model, caches, *padded)
        rounds.rollback([3, 2])
    for cache in recurrent(caches):
        assert cache.left_padding.tolist() == [-2, -2]


def test_a_resumed_cache_takes_rounds(model, tmp_path):
    caches = primed(model)
    with kvkeep.open(tmp_path / "store", disk_reserve=1) as store:
        space = store.space(identity={"m": 1}, layout=make_prompt_cache(model))
        space.snapshot(PROMPT, caches)
        store.flush()
        hit = space.resume([*PROMPT, 1])
        assert hit.offset == len(PROMPT)
        for used in (hit.caches, caches):
            with Rounds(model, used) as rounds:
                rounds.begin()
                run(model, used, WINDOW)
                rounds.rollback(3)
        for a, b in zip(hit.caches, caches, strict=True):
            assert_same(held(a), held(b))
        receipt = space.snapshot((*PROMPT, *WINDOW[:3]), hit.caches)
        store.flush()
        assert receipt.stored
        assert space.resume([*PROMPT, *WINDOW]).offset == len(PROMPT) + 3


def test_a_snapshot_in_a_round_is_refused(model, tmp_path):
    single, batch = primed(model), batched(model, *PROMPTS)
    with kvkeep.open(tmp_path / "store", disk_reserve=1) as store:
        space = store.space(identity={"m": 1}, layout=make_prompt_cache(model))
        with Rounds(model, single) as one, Rounds(model, batch) as many:
            for rounds in (one, many):
                rounds.begin()
            run(model, single, WINDOW)
            run(model, batch, *WINDOWS)
            with pytest.raises(UncommittedRound, match=r"^Layer 0 \(arrays\): ArraysCache is in"):
                space.snapshot((*PROMPT, *WINDOW), single)
            with pytest.raises(UncommittedRound, match=r"^Layer 0: ArraysCache is in the middle"):
                space.snapshot((*PROMPT, *WINDOWS[0]), batch, row=0)
            kept = [c for c in single if isinstance(c, KVCache)]
            for caches, name in (
                (kept, r"Layer 0 \(kv\): KV"),
                ([CacheList(*kept)], "Layer 0 .list.: "),
            ):
                other = store.space(identity={"m": 2}, layout=caches)
                with pytest.raises(UncommittedRound, match=name):
                    other.snapshot((*PROMPT, *WINDOW), caches)
            one.rollback(2)
            many.rollback([2, 0, 1])
        assert space.snapshot((*PROMPT, *WINDOW[:2]), single).tokens_new == len(PROMPT) + 2
        assert space.snapshot((*PROMPTS[2], *WINDOWS[2][:1]), batch, row=2).tokens_new == 7
        assert not any(hasattr(cache, OPEN) for cache in (*single, *batch))
