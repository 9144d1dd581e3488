"""A recorded agent session, turn by turn, with a restart in the middle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from tests.serve.replay import SESSION, replay, turns_of


def test_a_session_goes_on_after_the_restart(tmp_path: Path, model: Callable[..., str]) -> None:
    """Two models in turn, each with the whole session; the restart is in the middle of both."""
    session, names = turns_of(SESSION)[:6], ("llama", "falcon_h1")
    half = len(session) // 2
    turns = [
        partial(turn, model=model(name))
        for part in (session[:half], session[half:])
        for name in names
        for turn in part
    ]
    found = replay(tmp_path, model(names[0]), turns, ("--prefill-step-size", "256"))
    assert [reply.text for reply in found["kvkeep"]] == [reply.text for reply in found["cold"]]
    for first in range(len(names)):
        starts = (first * half, (len(names) + first) * half)
        plain, ours = (
            [reply for at in starts for reply in found[who][at : at + half]]
            for who in ("plain", "kvkeep")
        )
        assert plain[half].cached == 0
        for before, now in pairwise(ours):
            # All of the turn before is resumed, up to where the model's own turn began.
            assert now.cached >= before.prompt - len("<s>assistant: ")
        assert ours[half].tier == "store"
        assert sum(r.cached for r in ours) > sum(r.cached for r in plain)
