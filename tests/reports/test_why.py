"""`kvkeep why`: the trace is the lookup's own, and a past request is explained from its event."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvkeep.cli import main
from kvkeep.cli.explained import Explained
from kvkeep.cli.helps import would_help
from kvkeep.cli.parting import quoted
from kvkeep.errors import Damaged
from kvkeep.prefixstore.past import NoSuchRequest
from kvkeep.prefixstore.policy import Reason
from kvkeep.prefixstore.trace import Near
from tests.faults.rows import tokens_of
from tests.reports.stores import keep, opened, space_of

OWN = 31_000
"""A token that no conversation has."""


def why(store: Path, *words: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["why", *words, "--store", str(store), "--debug"])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def asked_at(offset: int, conversation: int = 0, more: int = 5) -> list[int]:
    """A prompt that leaves a conversation at ``offset``."""
    return [*tokens_of(conversation, offset).tolist(), *range(OWN, OWN + more)]


def test_a_trace_shows_the_walk_the_recipe_and_what_is_near(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space = space_of(store, "recurrent")
        for length in (40, 100, 160):
            keep(space, "recurrent", tokens_of(0, length), origin="interval")
        store.flush()
        found = space.trace(asked_at(150))
    assert (found.decision.matched, found.decision.offset) == (150, 100)
    assert [(s.start, s.stop, s.shared) for s in found.steps] == [
        (0, 40, 40),
        (40, 100, 60),
        (100, 160, 50),
    ]
    (recipe,) = found.recipes
    assert (recipe.chosen, recipe.offset, recipe.at_point, recipe.rows) == (True, 100, True, 150)
    assert [(p.offset, p.beyond) for p in found.near] == [(40, False), (100, False), (160, True)]
    assert found.continues == (tuple(tokens_of(0, 160)[150:].tolist()),)
    (limit,) = found.decision.limits
    assert (limit.kind, limit.reason) == ("arrays", Reason.NO_STATE_AT_OFFSET)


def test_damage_that_an_earlier_lookup_found_is_named_with_its_remedy(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space = space_of(store, "plain")
        keep(space, "plain", tokens_of(0, 40))
        keep(space, "plain", tokens_of(0, 100))
        store.flush()
        with store.env.begin(write=True) as txn:
            *_, last = txn.keys("chunks")
            txn.put("chunks", last, b"no frame")
        hits = [space.resume(asked_at(90), request=f"{turn} turn") for turn in range(3)]
        assert [(h.offset, h.decision.reason) for h in hits] == [(40, Reason.CORRUPT)] * 3
        found = space.trace(asked_at(90))
        (recipe,) = found.recipes
        assert [limit.reason for limit in recipe.limits] == [Reason.CORRUPT]
        assert store.report().quarantined == 1
    said = why(tmp_path / "s", "2 turn")
    assert "nothing beyond 40 that can be used" in said
    assert "stored bytes are damaged" in said
    assert "kvkeep verify --repair" in said


def test_a_damaged_node_is_said_to_block_with_what_mends_it(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space = space_of(store, "plain")
        for length in (40, 100):
            keep(space, "plain", tokens_of(0, length))
        store.flush()
        sound = space.trace(asked_at(90))
        with store.env.begin(write=True) as txn:
            *_, last = txn.keys("nodes")
            txn.put("nodes", last, bytes(txn.get("nodes", last))[:-1])
        found = space.trace(asked_at(90))
    assert (sound.blocked, found.blocked) == (None, Reason.CORRUPT)
    assert (found.decision.offset, found.decision.reason) == (40, Reason.CORRUPT)
    said = Explained("", found.decision, None, "", steps=found.steps, blocked=found.blocked)
    assert said.as_json()["blocked"] == "corrupt"
    text = " ".join(said.text().split())
    assert "the next record is damaged" in text
    assert "nothing is stored behind it, until `kvkeep verify --repair` has removed it" in text
    assert "none of them like this prompt" not in text
    checked = CliRunner().invoke(main, ["verify", "--store", str(tmp_path / "s")])
    assert checked.exit_code == Damaged.exit_code
    assert "`kvkeep verify --repair` removes it" in checked.stdout
    assert "nothing is stored behind a damaged node" in checked.stdout


@pytest.mark.parametrize("kind", ["plain", "window", "recurrent"])
def test_a_trace_decides_as_the_lookup_does(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(3)
    compared = resumed = 0
    with opened(tmp_path / "s") as store:
        space = space_of(store, kind)
        for conversation in range(6):
            for length in sorted(rng.integers(20, 260, 3).tolist()):
                keep(space, kind, tokens_of(conversation, length))
        store.flush()
        for _ in range(60):
            prompt = asked_at(int(rng.integers(0, 280)), int(rng.integers(0, 8)))
            found = space.trace(prompt)
            assert found.decision == space.explain(prompt)
            chosen = [recipe for recipe in found.recipes if recipe.chosen]
            assert [r.offset for r in chosen] == [found.decision.offset] * bool(chosen)
            assert bool(chosen) == bool(found.decision.offset)
            shared = sum(step.shared for step in found.steps)
            assert shared == found.decision.matched
            compared += 1
            resumed += bool(chosen)
    assert compared == 60
    assert resumed > 20


def test_every_branch_behind_the_parting_is_shown(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space = space_of(store)
        for conversation in (0, 4, 8):
            keep(space, "plain", tokens_of(conversation, 90))
        store.flush()
        found = space.trace(asked_at(64))
    assert found.steps[-1].branches == 3
    assert set(found.continues) == {tuple(tokens_of(c, 90)[64:].tolist()) for c in (0, 4, 8)}


def test_a_past_request_is_explained_from_its_event(tmp_path: Path) -> None:
    path = tmp_path / "s"
    prompt = asked_at(150)
    with opened(path) as store:
        space = space_of(store, "recurrent")
        keep(space, "recurrent", tokens_of(0, 100))
        keep(space, "recurrent", tokens_of(0, 160))
        hit = space.resume(prompt, request="chatcmpl-77")
        keep(space, "recurrent", prompt, request=hit.request)
        past = store.past("chatcmpl")
    assert past.event.request == "chatcmpl-77"
    assert list(past.prefix) == prompt[:150]
    assert list(past.asked) == prompt[150:]
    assert past.continues == (tuple(tokens_of(0, 160)[150:].tolist()),)
    assert [(p.offset, p.beyond) for p in past.near] == [(100, False)]
    shown = why(path, "chatcmpl-77")
    assert "resumed     100 of 155 tokens" in shown
    assert "arrays layers 1 resume only at a resume point" in shown
    assert f"| {OWN} {OWN + 1}" in shown
    assert "would help" in shown
    assert max(map(len, shown.splitlines())) <= 80
    told = json.loads(why(path, "chatcmpl-77", "--json"))
    assert told["request"]["request"] == "chatcmpl-77"
    assert told["limits"] == [
        {"kind": "arrays", "layers": ["1"], "offset": 100, "reason": "no_state_at_offset"}
    ]


def test_what_was_asked_is_shown_where_the_store_keeps_it(tmp_path: Path) -> None:
    for keeps, known in ((0, False), (4, True)):
        with opened(tmp_path / str(keeps), event_tokens=keeps) as store:
            space = space_of(store)
            keep(space, "plain", tokens_of(0, 100))
            space.resume(asked_at(80), request="r")
        shown = why(tmp_path / str(keeps), "r")
        assert (f"| {OWN} {OWN + 1}" in shown) == known
        assert ("was not kept" in shown) != known


def test_a_request_whose_prefix_is_gone_keeps_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        space = space_of(store)
        keep(space, "plain", tokens_of(0, 100))
        space.resume(asked_at(80), request="r")
        store.flush()
        store.evict(to=0)
    shown = why(path, "r")
    assert "matched    80 of 85 tokens" in shown
    assert "what it matched is no longer stored" in shown


def test_a_request_must_be_one_that_is_remembered(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space = space_of(store)
        space.resume([1, 2, 3], request="one-1")
        space.resume([1, 2, 3], request="one-12")
        assert store.past("one-1").event.request == "one-1"
        with pytest.raises(NoSuchRequest, match="2 requests have ids that begin with 'one'"):
            store.past("one")
        for unknown in ("two", ""):
            with pytest.raises(NoSuchRequest, match="No request has the id"):
                store.past(unknown)
    usage = CliRunner().invoke(main, ["why", "--store", str(tmp_path / "s")])
    assert usage.exit_code == 2
    assert "Name a prompt" in usage.stderr


def test_text_of_a_tenant_needs_its_salt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVKEEP_SALT", raising=False)
    path = tmp_path / "s"
    with opened(path) as store:
        space = space_of(store, salt="red")
        keep(space, "plain", tokens_of(0, 100))
        space.resume(asked_at(80), request="r")
    token = str(tokens_of(0, 100)[79])
    for words in ((), ("--salt", "blue")):
        shown = why(path, "r", *words)
        assert f" {token}|" not in shown
        assert "only with the --salt" in shown
    assert f" {token}|" in why(path, "r", "--salt", "red")


def test_shown_text_cannot_repaint_the_terminal() -> None:
    assert quoted("a\x1b[2J", "b\rc\nd") == "«…a·[2J|b·c\\nd…»"


@pytest.mark.parametrize("reason", Reason)
def test_what_would_help_is_one_line(reason: Reason) -> None:
    near = (Near(100, "prompt", 0.0, True, False), Near(200, "prompt", 0.0, True, True))
    said = would_help(str(reason), 150, 100, near, "1 GiB", floor=180)
    assert "\n" not in said
    assert "{" not in said
    assert bool(said) == (reason is not Reason.LAST_TOKEN)
