"""Speculative rounds: what is kept has the bits of the window's own run, layer by layer."""

from __future__ import annotations

import copy
from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import (
    ArraysCache,
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

import kvkeep
from kvkeep.caches.chunked_quant import ChunkedQuantizedKVCache
from kvkeep.caches.delayed import DelayedKVCache
from kvkeep.caches.paged import PagedKVCache
from kvkeep.caches.quantized import DenseQuantizedKVCache
from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache
from kvkeep.caches.rounds import METHODS, OPEN, Rounds
from kvkeep.caches.turboquant import TurboQuantKVCache
from kvkeep.errors import BadRound, UncommittedRound
from tests.conformance import models

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)
WINDOW = (7, 8, 2, 9, 4)
GATED_DELTA = ("qwen3_next", "qwen3_5", "olmo_hybrid")


@pytest.fixture(scope="module")
def model():
    return models.build("qwen3_next")


def bits(array):
    return np.array(array.view(mx.uint8))


def run(model, caches, *rows):
    logits = model(mx.array(rows), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def primed(model, tokens=PROMPT):
    caches = make_prompt_cache(model)
    run(model, caches, tokens)
    return caches


def held(cache):
    """What the cache holds, as bits: recurrent slots, or rows up to the offset."""
    if isinstance(cache, ArraysCache):
        return [bits(slot) for slot in cache.cache]
    keys, values = cache.keys_and_values()
    return [bits(x) for _, x in tree_flatten([keys, values])]


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


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


def recurrent(caches):
    return [cache for cache in caches if isinstance(cache, ArraysCache)]


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


def batched(model, *prompts):
    """The caches of a batch, row by row from prompts of different lengths."""
    singles = [primed(model, prompt) for prompt in prompts]
    return [type(caches[0]).merge(caches) for caches in zip(*singles, strict=True)]


PROMPTS = (PROMPT, PROMPT[:4], (8, 8, 1, 2, 3, 4))
WINDOWS = ((7, 8, 2, 9), (1, 2, 3, 4), (9, 9, 1, 1))


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


def parameters(model):
    return [(name, id(array)) for name, array in tree_flatten(model.parameters())]


def shadows(model):
    return [sorted(vars(module)) for module in model.modules()]


def test_the_model_is_as_it_was(model):
    before, own = parameters(model), shadows(model)
    caches, others = primed(model), primed(model)
    with Rounds(model, caches) as rounds, Rounds(model, others) as more:
        rounds.begin()
        assert shadows(model) != own
        assert parameters(model) == before
        more.begin()
        run(model, caches, WINDOW)
        run(model, others, WINDOW[:2])
        rounds.rollback(1)
        # The other round is still recorded.
        run(model, others, WINDOW[2:])
        more.rollback(4)
        assert shadows(model) == own
    assert parameters(model) == before


def test_forwards_with_other_caches_are_not_part_of_the_round(model):
    caches, alone, others, plain = (primed(model) for _ in range(4))
    for used, between in ((caches, True), (alone, False)):
        with Rounds(model, used) as rounds:
            rounds.begin()
            run(model, used, WINDOW[:2])
            if between:
                run(model, others, WINDOW)
            run(model, used, WINDOW[2:])
            rounds.rollback(3)
    run(model, plain, WINDOW)
    for a, b in zip((*caches, *others), (*alone, *plain), strict=True):
        assert_same(held(a), held(b))


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("forwards", [0, 1])
def test_an_error_in_a_forward_leaves_model_and_caches_as_they_were(
    model, monkeypatch, layer, forwards
):
    caches = primed(model)
    expected, own = [held(cache) for cache in caches], shadows(model)
    kind, reached = type(model.layers[layer].mlp), []
    run_mlp = kind.__call__

    def fail(mlp, x):
        if mlp is model.layers[layer].mlp:
            reached.append(layer)
            raise Stop
        return run_mlp(mlp, x)

    with Rounds(model, caches) as rounds:
        rounds.begin()
        for _ in range(forwards):
            run(model, caches, WINDOW)
        monkeypatch.setattr(kind, "__call__", fail)
        with pytest.raises(Stop):
            run(model, caches, WINDOW)
    assert reached == [layer]
    assert shadows(model) == own
    for cache, before in zip(caches, expected, strict=True):
        assert_same(held(cache), before)
        assert not hasattr(cache, OPEN)


@pytest.mark.parametrize("end", ["commit", 0, 3])
def test_an_error_inside_a_layer_leaves_it_where_it_stood(model, monkeypatch, end):
    caches, plain = primed(model), primed(model)

    def fail(*_, **__):
        raise Stop

    for used in (caches, plain):
        rounds = Rounds(model, used)
        rounds.begin()
        run(model, used, WINDOW)
        if used is caches:
            # The convolution's rows are moved on before the recurrence runs.
            with monkeypatch.context() as patch:
                patch.setattr("mlx_lm.models.qwen3_next.gated_delta_update", fail)
                with pytest.raises(Stop):
                    run(model, used, PROMPT)
        rounds.commit() if end == "commit" else rounds.rollback(end)
    for a, b in zip(caches, plain, strict=True):
        assert_same(held(a), held(b))


def test_layers_that_saw_different_windows_are_refused(model, monkeypatch):
    caches = primed(model)
    expected = [held(cache) for cache in caches]
    rounds = Rounds(model, caches)
    rounds.begin()
    with monkeypatch.context() as patch:
        patch.setattr("mlx_lm.models.qwen3_next.Qwen3NextAttention.__call__", None)
        with pytest.raises(TypeError):
            run(model, caches, WINDOW)
    for end in (rounds.commit, lambda: rounds.rollback(1)):
        with pytest.raises(BadRound, match="windows of different lengths: layer 0 5, layer 1 0"):
            end()
    rounds.close()
    for cache, before in zip(caches, expected, strict=True):
        assert_same(held(cache), before)


def test_misuse_is_refused_and_changes_nothing(model):
    caches = primed(model)
    expected = [held(cache) for cache in caches]
    rounds = Rounds(model, caches)
    for end in (rounds.commit, lambda: rounds.rollback(0)):
        with pytest.raises(BadRound, match="No round is armed"):
            end()
    rounds.begin()
    assert rounds.armed
    with pytest.raises(BadRound, match="A round is open already"):
        rounds.begin()
    for end in (rounds.commit, lambda: rounds.rollback(0)):
        with pytest.raises(BadRound, match="Nothing was recorded"):
            end()
    run(model, caches, WINDOW)
    for keep in (-1, len(WINDOW) + 1, True, 1.0, [6], [-1], []):
        with pytest.raises(BadRound, match=r"keep is|counts were given"):
            rounds.rollback(keep)
    with pytest.raises(ValueError, match="2 counts were given for 1 rows"):
        rounds.rollback([1, 2])
    assert rounds.armed
    rounds.rollback([0])
    assert not rounds.armed
    rounds.close()
    for cache, before in zip(caches, expected, strict=True):
        assert_same(held(cache), before)


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


def test_a_list_of_another_form_is_refused_and_given_back(model):
    caches = primed(model)
    own, expected = shadows(model), [held(cache) for cache in caches]
    rounds, kept = Rounds(model, caches), list(caches)
    rounds.begin()
    run(model, caches, WINDOW)
    caches[0] = copy.copy(caches[0])
    with pytest.raises(BadRound, match="Layer 0: ArraysCache was replaced"):
        rounds.rollback(1)
    with pytest.raises(BadRound, match="Layer 0: ArraysCache was replaced"):
        rounds.close()
    assert shadows(model) == own
    for cache, before in zip(kept, expected, strict=True):
        assert_same(held(cache), before)
