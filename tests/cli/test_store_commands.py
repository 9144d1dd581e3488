"""The commands that show and tend what is stored."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvkeep.cli import main
from kvkeep.cli.lookup import NotFound
from kvkeep.prefixstore.store import open_store
from tests.cli.conftest import Ask, Run

CONTEXT = "The harbour opens at five, and the first boats leave before seven in the morning. "
FIRST, SECOND = CONTEXT + "Who opens it?", CONTEXT + "When do they leave?"


@pytest.fixture
def filled(models: Callable[..., str], ask: Ask) -> list[dict[str, Any]]:
    """Two conversations in one space, one in another: what their snapshots said."""
    return [
        ask("snapshot", "--model", models("llama"), "--prompt", FIRST),
        ask("snapshot", "--model", models("llama"), "--prompt", SECOND),
        ask("snapshot", "--model", models("gemma3_text"), "--prompt", FIRST),
    ]


def test_ls_lists_spaces_and_conversations(filled, ask: Ask, run: Run) -> None:
    listed = ask("ls")
    assert {x["id"] for x in listed["spaces"]} == {x["space"] for x in filled}
    assert {x["conversations"] for x in listed["spaces"]} == {1, 2}
    assert sorted(x["tokens"] for x in listed["conversations"]) == sorted(
        x["offset"] for x in filled
    )
    assert 0 < sum(x["bytes"] for x in listed["spaces"]) <= listed["used_bytes"]
    one = ask("ls", filled[2]["space"][:8])
    assert [x["id"] for x in one["spaces"]] == [filled[2]["space"]]
    assert len(one["conversations"]) == 1
    shown = run("ls", "--limit", "2").stdout
    assert "llama-0" in shown
    assert "kv,kv-rotating" in shown
    assert shown.endswith("… and 1 more\n")
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["tree"],
        ["report"],
        ["top", "--once"],
        ["verify"],
        ["verify", "--repair"],
        ["why", "1"],
        ["inspect", "1"],
        ["export", "1", "x.safetensors"],
        ["pin", "1"],
        ["unpin", "1"],
        ["evict", "--to", "0"],
        ["purge", "--conversation", "1", "--yes"],
    ],
    ids=" ".join,
)
def test_a_mistyped_folder_is_an_error_and_no_new_store(words: list[str], store: Path) -> None:
    for folder in (store, store.parent):
        result = CliRunner().invoke(main, [*words, "--store", str(folder)])
        assert result.exit_code == 6, result.output
        assert f"error: {folder} holds no store\n  Name the folder of a store" in result.stderr
        assert result.stdout == ""
        assert list(store.parent.iterdir()) == []


def test_an_empty_store_says_what_to_do(store: Path, run: Run) -> None:
    open_store(store).close()
    assert "kvkeep snapshot" in run("ls").stdout
    assert run("verify").stdout.endswith("No problem found.\n")
    assert run("report").stdout.startswith("Lookups 0 ")


def test_inspect_shows_rows_and_resume_points(filled, ask: Ask, run: Run) -> None:
    listed = ask("ls", filled[0]["space"])["conversations"]
    longest = max(listed, key=lambda x: x["tokens"])
    seen = ask("inspect", longest["id"], "--tokens")
    assert seen["space"] == filled[0]["space"]
    assert seen["tokens"] == longest["tokens"] == len(seen["token_ids"])
    assert seen["rows"][0]["kinds"] == ["kv"]
    assert seen["rows"][0]["covered"] == [[0, longest["tokens"]]]
    assert [p["offset"] for p in seen["resume_points"]][-1] == longest["tokens"]
    shown = run("inspect", longest["id"]).stdout
    assert shown.startswith(f"Conversation {longest['id']} of space {filled[0]['space'][:6]}…")
    assert max(map(len, shown.splitlines())) <= 80


def test_ids_may_be_cut_short_but_must_be_one(filled, run: Run) -> None:
    with pytest.raises(NotFound, match="No space has the id zz"):
        run("ls", "zz")
    with pytest.raises(NotFound, match="No conversation"):
        run("inspect", "ffffff")
    with pytest.raises(NotFound, match="No space"):
        run("evict", "--space", "")


def test_why_shows_where_two_prompts_part(filled, models, ask: Ask, run: Run) -> None:
    asked = ("why", "--model", models("llama"), "--prompt", CONTEXT + "Which are they?")
    told = ask(*asked)
    shared = len("^user: " + CONTEXT + "Wh")
    assert (told["matched_tokens"], told["resumed_tokens"]) == (shared, shared)
    assert told["parting"]["stored"][0] == told["parting"]["asked"][0]
    assert told["parting"]["asked"][1].startswith("ich are")
    shown = run(*asked).stdout
    assert "ning. Wh|ich are they" in shown
    assert re.search(f"because +the prompts part at token {shared}", shown)
    before = ask("report")["lookups"]
    assert ask("report")["lookups"] == before == 3
    missed = run("why", "--model", models("falcon_h1"), "--prompt", FIRST, code=3).stdout
    assert "for a model that differs in" in missed


def test_evict_drops_what_was_named(filled, ask: Ask, run: Run) -> None:
    kept = ask("ls")["used_bytes"]
    gone = ask("evict", "--space", filled[2]["space"][:6])
    assert (gone["nodes"], gone["tokens"]) == (1, filled[2]["offset"])
    assert gone["used_bytes"] == kept - gone["bytes"]
    assert ask("evict", "--older-than", "1h")["nodes"] == 0
    assert ask("evict", "--to", "1GiB")["nodes"] == 0
    assert ask("evict", "--policy", "size")["policy"] == "size"
    assert "\nFrom now on lru says what" in run("evict", "--policy", "lru").stdout
    assert ask("evict", "--policy", "size")["policy"] == "size"
    assert ask("evict", "--to", "1GiB")["policy"] == "size"
    rest = ask("evict", "--to", "0")
    assert rest["used_bytes"] == 0
    assert ask("ls")["conversations"] == []
    assert "Say what goes" in run("evict", code=2).stderr


def test_what_is_pinned_is_shown_and_stays(filled, ask: Ask, run: Run) -> None:
    listed = ask("ls", filled[0]["space"])["conversations"]
    longest = max(listed, key=lambda x: x["tokens"])
    pin = ask("pin", longest["id"])
    assert (pin["id"], pin["tokens"], pin["until"]) == (longest["id"], longest["tokens"], None)
    soft = ask("pin", min(listed, key=lambda x: x["tokens"])["id"], "--for", "2h")
    assert soft["until"] - soft["created"] == pytest.approx(7200)
    assert {p["id"] for p in ask("ls")["pins"]} == {pin["id"], soft["id"]}
    shown = run("ls").stdout
    assert "\nPin " in shown
    assert " good\n" in shown
    assert max(map(len, shown.splitlines())) <= 80
    said = run("evict", "--to", "0").stdout
    assert said.endswith("\nWhat is left is pinned; --pinned drops it as well\n")
    assert "pinned" not in run("evict", "--to", "1GB").stdout
    kept = ask("ls")
    assert {c["id"] for c in kept["conversations"]} == {pin["id"], soft["id"]}
    assert run("unpin", soft["id"]).stdout == f"Unpinned {soft['tokens']} tokens\n"
    with pytest.raises(NotFound, match="No pin has the id"):
        run("unpin", soft["id"])
    assert ask("evict", "--space", filled[0]["space"], "--pinned")["used_bytes"] == 0
    assert ask("ls")["pins"] == []


def damage(store: Path) -> None:
    """Flip one byte of a stored chunk."""
    with open_store(store) as opened, opened.env.begin(write=True) as txn:
        key, data = next(iter(txn.items("chunks")))
        bad = bytearray(data)
        bad[-1] ^= 1
        txn.put("chunks", bytes(key), bytes(bad))


def test_verify_finds_damage_and_only_repair_removes_it(
    filled, store: Path, models, ask: Ask, run: Run
) -> None:
    sound = ask("verify")
    assert (sound["damaged"], sound["problems"]) == (False, [])
    assert sound["chunks"] > 0
    damage(store)
    found = ask("verify", code=4)
    assert found["damaged"]
    assert not found["repaired"]
    assert [p["what"] for p in found["problems"]] == ["damaged"]
    assert ask("verify", code=4)["problems"] == found["problems"]
    shown = run("verify", code=4).stdout
    assert "damaged: chunk " in shown
    assert "`kvkeep verify --repair` removes it" in shown

    refused = CliRunner().invoke(main, ["verify", "--repair", "--store", str(store)], input="n\n")
    assert refused.exit_code == 4
    assert "Remove what cannot be used? [y/N]" in refused.stderr
    assert ask("verify", "--repair", "--yes", code=4)["repaired"]
    after = ask("verify")
    assert (after["damaged"], after["problems"]) == (False, [])
    assert ask("restore", "--model", models("gemma3_text"), "--prompt", FIRST)["resumed_tokens"]
