"""Unfinished answers: found by their own request only, thinned, and removed without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep.hooks.answers import Answer
from kvkeep.hooks.prefill import prefill
from kvkeep.prefixstore.unfinished import Disguise
from tests import architectures

PROMPT = [(7 * i * i + 3 * i) % 90 for i in range(50)]
NAMES = ("llama", "gemma3_text", "falcon_h1", "mamba2")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvkeep.Store]:
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as opened:
        yield opened


def answered(model: Any, caches: list[Any], first: int, count: int) -> Iterator[int]:
    """The likeliest tokens behind ``first``; each is in ``caches`` when the next is asked for."""
    token = first
    for _ in range(count):
        yield token
        out = model(mx.array([[token]]), cache=caches)[0, -1]
        mx.eval(out, [cache.state for cache in caches])
        token = int(out.argmax().item())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt_stored", [True, False])
def test_it_goes_on_where_the_last_checkpoint_was(
    store: kvkeep.Store, name: str, prompt_stored: bool
) -> None:
    model = architectures.build(name)
    space = store.space(identity={"model": name}, layout=make_prompt_cache(model))
    caches = make_prompt_cache(model)
    prefill(model, PROMPT[:-1], caches)
    if prompt_stored:
        space.snapshot(PROMPT[:-1], caches)
    whole = list(answered(model, caches, PROMPT[-1], 40))[1:]

    caches = make_prompt_cache(model)
    prefill(model, PROMPT[:-1], caches)
    answer = Answer(space.unfinished(PROMPT, b"mine"), PROMPT, every=8)
    said = answered(model, caches, PROMPT[-1], 40)
    assert [next(said), next(said)] == [PROMPT[-1], whole[0]]
    for token, following in pairwise(whole[:31]):
        assert next(said) == following  # and the caches cover ``token``
        if answer.add(token):
            assert answer.checkpoint(caches).stored

    assert space.unfinished(PROMPT, b"other").resume() is None
    assert space.unfinished([*PROMPT[:-1], 3], b"mine").resume() is None
    assert space.resume([*PROMPT, *whole, 1]).offset <= len(PROMPT)
    found = space.unfinished(PROMPT, b"mine").resume()
    assert found is not None
    assert 24 <= len(found.answer) <= 25
    assert found.answer == whole[: len(found.answer)]
    rest = answered(model, found.caches, found.answer[-1], 40 - len(found.answer))
    assert [*found.answer[:-1], *rest] == whole

    store.flush()
    points = store.inspect(space, space.unfinished(PROMPT, b"mine")._hidden(whole)).points
    assert len([p for p in points if p.offset > len(PROMPT)]) <= 2
    answer.finished()
    store.flush()
    assert space.unfinished(PROMPT, b"mine").resume() is None
    assert store.verify().problems == []
    left = {t for c in store.conversations() for t in store.conversation_tokens(c.id)}
    assert left <= set(PROMPT)
    assert space.resume([*PROMPT[:-1], 1]).offset == (
        len(PROMPT) - 1 if prompt_stored or name == "llama" else 0
    )


def test_a_disguise_is_undone_by_its_own_key_only() -> None:
    answer = np.random.default_rng(0).integers(0, 1 << 31, 100).tolist()
    mine, other = Disguise(b"a"), Disguise(b"b")
    hidden = mine.hide(answer)
    assert int(hidden.min()) > 1 << 60
    assert mine.reveal(hidden) == answer
    assert mine.reveal(hidden[37:], 37) == answer[37:]
    assert mine.reveal(hidden[37:], 36) is None
    assert other.reveal(hidden) is None
    assert all(other.reveal(hidden[i : i + 1], i) is None for i in range(100))
    assert mine.reveal(answer) is None
