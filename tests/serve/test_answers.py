"""An answer that a crash cuts off: the same request goes on with it, and nobody else does."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvkeep
from tests.model_folders import CHARACTERS
from tests.serve.harness import Reply, Server, complete, settle

EVERY, LENGTH, SEEN = 12, 240, 40
OPTIONS = ("--generation-checkpoints", str(EVERY))
TEXT = "The ferry sails at eight and at noon from the harbour. " * 3
ENDLESS = {"logit_bias": {str(len(CHARACTERS) + 1): -100.0}}
LIKELIEST: dict[str, Any] = dict(ENDLESS)
SAMPLED = {**ENDLESS, "temperature": 0.8, "top_p": 0.95, "seed": 5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "likeliest, state": ("falcon_h1", LIKELIEST),
    "likeliest, ring": ("gemma3_text", {**LIKELIEST, "extra_body": {"repetition_penalty": 1.1}}),
    "seeded, rows": ("llama", {**SAMPLED, "extra_body": {"xtc_probability": 0.2}}),
    "seeded, state": ("qwen3_next", SAMPLED),
}
KILLED = "seeded, state"
HIDDEN = 1 << 60


@contextmanager
def begun(server: Server, model: str, how: dict[str, Any]) -> Iterator[None]:
    """A streamed answer of which some tokens were seen; leaving the block hangs up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    more = dict(how)
    body = {"model": model, "prompt": TEXT, "max_tokens": LENGTH, "stream": True}
    body |= more.pop("extra_body", {}) | more
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    seen = 0
    while seen < SEEN:
        line = response.readline()
        assert line, "the answer ended early"
        seen += line.startswith(b"data: ")
    try:
        yield
    finally:
        response.close()
        connection.close()


def again(server: Server, model: str, how: dict[str, Any], **other: Any) -> Reply:
    return complete(server.client(), TEXT, model=model, **{"max_tokens": LENGTH, **how, **other})


def hidden(store: Path) -> int:
    """Tokens of unfinished answers that are stored."""
    with kvkeep.open(store, read_only=True) as opened:
        assert opened.verify().problems == []
        return sum(
            token > HIDDEN
            for conversation in opened.conversations()
            for token in opened.conversation_tokens(conversation.id)
        )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Callable[..., str]) -> dict[str, Reply]:
    """What a server answers that nobody stops and that has no cache."""
    log = tmp_path_factory.mktemp("whole") / "log"
    with Server(log, None, "--prompt-cache-size", "0") as server:
        return {case: again(server, model(name), how) for case, (name, how) in CASES.items()}


def test_an_answer_goes_on_after_a_crash(
    tmp_path: Path, model: Callable[..., str], whole: dict[str, Reply]
) -> None:
    store = tmp_path / "store"
    with Server(tmp_path / "log", store, *OPTIONS) as server:
        for case, (name, how) in CASES.items():
            settle(server)
            before = server.metric("kvkeep_snapshots_total")
            with begun(server, model(name), how):
                while server.metric("kvkeep_snapshots_total") < before + 5:
                    time.sleep(0.01)
                if case == KILLED:
                    assert server.report()["server"]["failures"] == {}
                    server.kill()
    assert hidden(store) >= len(CASES) * EVERY
    with Server(tmp_path / "log", store, *OPTIONS) as server:
        name, how = CASES[KILLED]
        said = whole[KILLED].text
        longer = complete(server.client(), TEXT + said[:EVERY], model=model(name))
        assert longer.cached < whole[KILLED].prompt < longer.prompt
        for other in ({"seed": 6}, {"max_tokens": 4}, {"stop": [said[4:6]]}):
            reply = again(server, model(name), {**how, "max_tokens": LENGTH, **other})
            assert "answered" not in reply.header
        for case, (name, how) in CASES.items():
            reply = again(server, model(name), how, stream=case == KILLED)
            assert (case, reply.text) == (case, whole[case].text)
            answered = int(reply.header["answered"])
            assert answered >= EVERY
            assert answered % EVERY in (0, 1, 2)
            assert (reply.cached, reply.tier) == (reply.prompt - 1, "store")
            assert reply.answer == LENGTH
        settle(server)  # a complete answer's checkpoints go once they are written
        reply = again(server, model(name), how)
        assert reply.text == whole[KILLED].text
        assert "answered" not in reply.header
        assert server.report()["server"]["failures"] == {}
        assert server.stop() == 0
    assert hidden(store) == 0
