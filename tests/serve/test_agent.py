"""A recorded agent session, turn by turn, with a restart in the middle."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.serve.replay import SESSION, replay, turns_of


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_a_session_goes_on_after_the_restart(
    tmp_path: Path, model: Callable[..., str], name: str
) -> None:
    turns = turns_of(SESSION)
    found = replay(tmp_path, model(name), turns, ("--prefill-step-size", "256"))
    cold, plain, ours = found["cold"], found["plain"], found["kvkeep"]
    half = len(turns) // 2
    assert half >= 3
    assert [reply.text for reply in ours] == [reply.text for reply in cold]
    assert plain[half].cached == 0
    for before, now in pairwise(ours):
        # All of the turn before is resumed, up to where the model's own turn began.
        assert now.cached >= before.prompt - len("<s>assistant: ")
    assert ours[half].tier == "store"
    assert sum(r.cached for r in ours) > sum(r.cached for r in plain)
