"""Prompts that part from what was stored: resumed up to the last stable boundary, and explained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvkeep.cli import main
from tests import model_folders
from tests.serve.harness import Reply, Server, chat, complete, settle

NAME = "falcon_h1"  # its state resumes at resume points only
SYSTEM = {"role": "system", "content": "You answer shortly and in rhyme, and never of ferries."}
ASK = {"role": "user", "content": "When does the ferry sail, and from which of the harbours?"}
CALL = {"role": "assistant", "content": "<think>I have to look it up.</think>look up: ferry"}
FOUND = {"role": "tool", "content": "At eight and at noon, from the old harbour."}
SAID = {"role": "assistant", "content": "<think>Eight or noon.</think>Soon, at noon."}
THANKS = {"role": "user", "content": "Thank you. And on Sundays?"}
OPENED = "<s>assistant: "


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path, Path]]:
    """A server of a thinking model with its store and its folder; nothing stays in memory."""
    folder = tmp_path_factory.mktemp("drift")
    model = model_folders.write(NAME, folder / "model", thinking=True)
    words = ("--model", str(model), "--prompt-cache-size", "0", "--prefill-step-size", "64")
    with Server(folder / "log", folder / "store", *words) as server:
        yield server, folder / "store", model
        assert server.report()["server"]["failures"] == {}
        assert server.stop() == 0


def tokens(text: str) -> int:
    """Tokens of a text: characters, and one for each special token."""
    for special in (*model_folders.SPECIAL, *model_folders.THINKING):
        text = text.replace(special, "|")
    return len(text)


def rendered(*messages: dict[str, str]) -> str:
    return "".join(f"<s>{m['role']}: {m['content']}</s>" for m in messages)


def parting(served: tuple[Server, Path, Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the server's report says of the last prompt, and what ``kvkeep why`` says."""
    server, store, model = served
    last = server.report()["recent"][-1]
    words = ["why", last["request"], "--store", str(store), "--model", str(model), "--json"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    return last, json.loads(result.stdout)["parting"]


@pytest.mark.parametrize("how", [{}, {"seed": 1}], ids=["batched", "single"])
def test_thoughts_that_the_template_strips_later(
    served: tuple[Server, Path, Path], how: dict[str, int]
) -> None:
    server = served[0]
    system = {**SYSTEM, "content": f"{SYSTEM['content']} {sorted(how)}"}
    talk = [system, ASK]
    replies = []
    for more in ([], [CALL, FOUND], [SAID, THANKS]):
        talk += more
        replies.append(chat(server.client(), talk, **how))
        settle(server)
    stable = tokens(rendered(system, ASK))
    assert replies[0].prompt == stable + tokens(OPENED)
    assert replies[1].cached == replies[0].prompt - 1
    # Both thoughts are gone: the prompt parts where the first one was. So did the prompt before
    # it from the first answer, and left a resume point.
    assert replies[2].cached == replies[0].prompt
    assert int(replies[2].header["matched"]) == stable + tokens(OPENED)
    last, parts = parting(served)
    assert last["parted_at"] == stable + tokens(OPENED)
    assert (last["parted_turn"], last["parted_role"]) == (2, "assistant")
    assert OPENED.endswith(parts["stored"][0])
    assert any(said.startswith("<think>I have") for said in parts["branches"])
    assert parts["asked"][1].startswith("look up")


@pytest.mark.parametrize("how", [{}, {"seed": 1}], ids=["batched", "single"])
def test_an_answer_that_is_encoded_in_other_tokens(
    served: tuple[Server, Path, Path], how: dict[str, int]
) -> None:
    server = served[0]
    talk: list[Any] = [{"role": "user", "content": f"Say it in other words. {sorted(how)}"}]
    first = chat(server.client(), talk, **how)
    settle(server)
    # The client strips what it was sent, as clients do; no answer of the model begins with "-".
    talk += [{"role": "assistant", "content": "-" + first.text.strip()}, THANKS]
    second = chat(server.client(), talk, **how)
    assert second.cached == first.prompt - 1
    assert int(second.header["matched"]) == first.prompt
    settle(server)
    last, parts = parting(served)
    assert (last["parted_at"], last["parted_role"]) == (first.prompt, "assistant")
    assert parts["asked"][1].startswith("-")
    assert OPENED.endswith(parts["stored"][0])


@pytest.mark.parametrize("how", [{}, {"seed": 1}], ids=["batched", "single"])
def test_a_header_that_changes_is_resumed_up_to_from_the_third_time_on(
    served: tuple[Server, Path, Path], how: dict[str, int]
) -> None:
    """Nothing tells that a date stands there; a prompt that parts leaves a resume point there."""
    server = served[0]
    rules = f"{len(how)}. These rules hold on every day, and they are long. " * 4

    def ask(date: str) -> Reply:
        reply = complete(server.client(), f"{rules}Today is {date}. What now?", **how)
        settle(server)
        return reply

    first, second, third = (ask(date) for date in ("Monday", "Tuesday", "Wednesday"))
    header = tokens(f"{rules}Today is ")
    assert first.cached == 0
    assert (int(second.header["matched"]), second.cached) == (header, 0)
    assert (third.cached, third.reason) == (header, "full")
    last, parts = parting(served)
    assert last["parted_at"] == header
    assert parts["asked"][1].startswith("Wednesday")
    assert {said[0] for said in parts["branches"]} == {"M", "T"}
