"""A prompt that parts from a stored path leaves a resume point there, for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep.cli.models import Choice, Loaded
from kvkeep.cli.snapshot import take
from kvkeep.hooks.interval_points import junction_of
from kvkeep.prefixstore.policy import Decision, LayerLimit, Reason
from tests import architectures

SHARED, STEP = 45, 32
RNG = np.random.default_rng(3)
START = RNG.integers(0, architectures.VOCAB, SHARED).tolist()


def prompt(number: int, length: int = 40) -> list[int]:
    """Prompts that share their first tokens, and not one more."""
    tail = np.random.default_rng(number).integers(0, architectures.VOCAB, length)
    return [*START, number, *tail.tolist()]


def logits(model: Any, caches: list[Any], token: int) -> np.ndarray:
    out = model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32)
    mx.eval(out)
    return np.array(out)


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", "mamba2"])
def test_the_third_prompt_that_parts_there_resumes_there(tmp_path: Path, name: str) -> None:
    model = architectures.build(name)
    loaded = Loaded(model, None)
    choice = Choice(model=name, prefill_step=STEP)
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as store:
        space = store.space(identity={"model": name}, layout=make_prompt_cache(model))
        first, second, third = (take(space, loaded, choice, prompt(n)) for n in (1, 2, 3))
        assert first.resumed == 0
        assert first.points == [STEP, 64, len(prompt(1)) - 1]
        assert second.resumed == STEP
        assert SHARED in second.points
        assert third.resumed == SHARED
        origins = {p.offset: p.origin for p in store.inspect(space, prompt(3)).points}
        assert origins[STEP] == "interval"
        assert origins[SHARED] == "junction"
        assert store.verify().problems == []
        hit = space.resume([*START, 4, 5])
    assert hit.offset == SHARED
    live = make_prompt_cache(model)
    for stop in (STEP, SHARED):
        start = 0 if stop == STEP else STEP
        mx.eval(model(mx.array([START[start:stop]]), cache=live))
    assert np.array_equal(logits(model, hit.caches or [], 4), logits(model, live, 4))


def test_plain_caches_and_exact_mode_need_no_junction(tmp_path: Path) -> None:
    for name, exact in (("llama", False), ("falcon_h1", True)):
        model = architectures.build(name)
        choice = Choice(model=name, prefill_step=STEP, exact=exact)
        with kvkeep.open(tmp_path / name, max_bytes="1GB", disk_reserve=1) as store:
            space = store.space(
                identity={}, layout=make_prompt_cache(model), exact=exact, prefill_step=STEP
            )
            for number in (1, 2, 3):
                last = take(space, Loaded(model, None), choice, prompt(number))
            assert last.resumed == (STEP if exact else SHARED)
            origins = {p.origin for p in store.inspect(space, prompt(3)).points}
            assert "junction" not in origins


@pytest.mark.parametrize(
    ("matched", "offset", "reason", "tokens", "found"),
    [
        (50, 32, Reason.NO_STATE_AT_OFFSET, range(80), 50),
        (50, 0, Reason.ROWS_MISSING, range(80), 50),
        (50, 50, Reason.NO_STATE_AT_OFFSET, range(80), None),
        (50, 32, Reason.BELOW_FLOOR, range(80), None),
        (79, 32, Reason.NO_STATE_AT_OFFSET, range(80), None),
        (50, 32, Reason.NO_STATE_AT_OFFSET, [*range(40), *[-7] * 20, *range(20)], None),
        (40, 32, Reason.NO_STATE_AT_OFFSET, [*range(40), *[-7] * 20, *range(20)], 40),
    ],
)
def test_where_a_junction_is(
    matched: int, offset: int, reason: Reason, tokens: Sequence[int], found: int | None
) -> None:
    limits = (LayerLimit(("0",), "arrays", offset, reason),)
    decision = Decision(offset, matched, len(tokens), reason, limits)
    assert junction_of(decision, list(tokens)) == found
