"""What clients see: the same answers as from plain ``mlx_lm.server``, and more cached tokens.

One server process serves every model in turn, dense, sliding, hybrid and chunked, over chat
and text completions, streaming and not, on both of the server's paths. Then it ends, by SIGTERM
or by SIGKILL, and another one goes on.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.harness import Reply, Server, chat, complete, settle

NAMES = ("llama", "gemma3_text", "falcon_h1", "qwen3_next", "llama4")
AGAIN = ("gemma3_text", "falcon_h1")
CANNOT_BE_CUT = ("gemma3_text", "falcon_h1")
TEXT = "The ferry sails at eight and at noon from the harbour. " * 4
SYSTEM = {"role": "system", "content": "You answer shortly and in rhyme."}
ASK = {"role": "user", "content": TEXT}
ANSWERED = {"role": "assistant", "content": "Yes it does."}
LAST = {"role": "user", "content": "And on Sundays?"}
SEEDED = {"seed": 7}
BATCHED: dict[str, Any] = {}

Conversation = dict[str, Reply]


def converse(server: Server, model: Callable[..., str], name: str) -> Conversation:
    """The same requests for every server: misses, exact replays and partial hits."""
    client, out = server.client(), {}
    # Another model for each path, so that they do not resume one another.
    for seed, (path, how) in enumerate((("batched", BATCHED), ("single", SEEDED))):
        said = {"model": model(name, seed), **how}
        out[f"{path} miss"] = chat(client, [SYSTEM, ASK], **said)
        out[f"{path} replay"] = chat(client, [SYSTEM, ASK], stream=True, **said)
        out[f"{path} next turn"] = chat(client, [SYSTEM, ASK, ANSWERED, LAST], **said)
        out[f"{path} other"] = chat(client, [SYSTEM, LAST], stream=True, **said)
        out[f"{path} text miss"] = complete(client, TEXT, **said)
        out[f"{path} text replay"] = complete(client, TEXT, stream=True, **said)
    return out


@pytest.fixture(scope="module")
def runs(
    model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Conversation]]:
    folder = tmp_path_factory.mktemp("runs")
    out: dict[str, dict[str, Conversation]] = {}
    with Server(folder / "cold.log", None, "--prompt-cache-size", "0") as server:
        out["cold"] = {name: converse(server, model, name) for name in NAMES}
    with Server(folder / "plain.log", None) as server:
        out["plain"] = {name: converse(server, model, name) for name in CANNOT_BE_CUT}
    store = folder / "store"
    with Server(folder / "first.log", store) as server:
        out["first"] = {name: converse(server, model, name) for name in NAMES}
        assert server.report()["server"]["failures"] == {}
        assert server.stop(signal.SIGTERM) == 0
    with Server(folder / "second.log", store) as server:
        out["second"] = {name: converse(server, model, name) for name in AGAIN}
        settle(server)
        server.kill()
    with Server(folder / "third.log", store) as server:
        out["third"] = {name: converse(server, model, name) for name in AGAIN}
        assert server.report()["server"]["failures"] == {}
    return out


Runs = dict[str, dict[str, Conversation]]


@pytest.mark.parametrize("name", NAMES)
def test_the_answers_are_those_of_a_server_that_reads_everything(runs: Runs, name: str) -> None:
    cold = runs["cold"][name]
    assert any(reply.text for reply in cold.values())
    for run in ("first", "second", "third"):
        for request, reply in runs[run].get(name, {}).items():
            assert (request, reply.text) == (request, cold[request].text), run
            assert reply.prompt == cold[request].prompt
            assert cold[request].cached == 0


@pytest.mark.parametrize("name", NAMES)
def test_cached_tokens_are_right_for_miss_replay_and_partial(runs: Runs, name: str) -> None:
    for path in ("batched", "single"):
        first = {k: v for k, v in runs["first"][name].items() if k.startswith(path)}
        miss, replay = first[f"{path} miss"], first[f"{path} replay"]
        assert miss.cached == 0
        assert replay.cached == replay.prompt - 1
        assert replay.reason == "last_token"
        turn = first[f"{path} next turn"]
        # The tiny template says the answer again in other tokens: up to the model's own turn.
        shared = miss.prompt - len("<s>assistant: ") + 2
        assert shared - 2 <= turn.cached <= miss.prompt
        assert first[f"{path} other"].cached > 0
        assert first[f"{path} text miss"].cached == 0
        assert first[f"{path} text replay"].cached == first[f"{path} text replay"].prompt - 1


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize("run", ["second", "third"])
def test_nothing_is_forgotten_when_the_process_ends(runs: Runs, run: str, name: str) -> None:
    """The second follows a SIGTERM, the third a SIGKILL after a flush."""
    for request, reply in runs[run][name].items():
        assert reply.cached == reply.prompt - 1, request
        if request.endswith("miss"):
            assert reply.tier == "store"


def test_hybrids_and_windows_resume_more_than_on_the_plain_server(runs: Runs) -> None:
    for name in CANNOT_BE_CUT:
        cached = {
            run: sum(reply.cached for reply in runs[run][name].values())
            for run in ("plain", "first")
        }
        assert cached["first"] > cached["plain"], name
