"""Speculative rounds that fail, or are misused: model and caches are as they were."""

from __future__ import annotations

import copy

import pytest
from mlx.utils import tree_flatten

from kvkeep.caches.rounds import OPEN, Rounds
from kvkeep.errors import BadRound
from tests.caches.primed import (
    PROMPT,
    WINDOW,
    assert_same,
    held,
    primed,
    run,
    shadows,
)
from tests.conformance import models


@pytest.fixture(scope="module")
def model():
    return models.build("qwen3_next")


class Stop(Exception):
    pass


def parameters(model):
    return [(name, id(array)) for name, array in tree_flatten(model.parameters())]


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
