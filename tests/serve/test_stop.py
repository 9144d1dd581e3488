"""Prefills that are cut short, servers that stop or die: what was done is kept."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvkeep
from tests.serve.harness import Server, complete, settle

LONG = "The ferry sails at eight and at noon from the harbour of this island. " * 30
STEP = ("--prefill-step-size", "32")
PROMPT = len(LONG)  # the tiny tokenizer makes one token of each character


@contextmanager
def begun(server: Server, tokens: int, **how: object) -> Iterator[http.client.HTTPResponse]:
    """A streamed request of which ``tokens`` have been read; leaving the block hangs up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": LONG, "max_tokens": 3000, "stream": True, **how}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    while True:
        line = response.readline().decode()
        if line.startswith(": keepalive") and int(line.split()[2].split("/")[0]) >= tokens:
            break
    try:
        yield response
    finally:
        response.close()
        connection.close()


@pytest.fixture
def serve(tmp_path: Path, model: Callable[..., str]) -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def start(*options: str, name: str = "falcon_h1") -> Server:
        words = ("--model", model(name), *STEP, *options)
        running.append(Server(tmp_path / "log", tmp_path / "store", *words))
        return running[-1]

    yield start
    for server in running:
        server.kill()


def test_a_client_that_hangs_up_leaves_what_was_read(
    serve: Callable[..., Server], model: Callable[..., str], tmp_path: Path
) -> None:
    names = ("llama", "gemma3_text", "falcon_h1")
    server = serve("--checkpoint-every", "0", name=names[0])
    longer = LONG * 4
    for done, name in enumerate(names):
        with begun(server, 640, prompt=longer, model=model(name)):
            pass
        deadline = time.monotonic() + 20
        while (
            server.metric("kvkeep_snapshots_total") == done or server.metric("kvkeep_queue_bytes")
        ) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert server.report()["server"]["failures"] == {}
    with kvkeep.open(tmp_path / "store", read_only=True) as store:
        kept = {conversation.space: conversation for conversation in store.conversations()}
        assert len(kept) == len(names)
        assert all(640 <= found.tokens < len(longer) - 1 for found in kept.values())


def test_a_crash_in_the_middle_of_a_prefill_leaves_its_checkpoints(
    serve: Callable[..., Server],
) -> None:
    server = serve("--checkpoint-every", "128")
    with begun(server, 800):
        while server.metric("kvkeep_snapshots_total") < 5:
            time.sleep(0.02)
        server.kill()
    server = serve()
    reply = complete(server.client(), LONG, max_tokens=2)
    assert (reply.cached % 128, reply.tier) == (0, "store")
    assert 5 * 128 <= reply.cached < PROMPT


def test_a_stop_is_quick_and_keeps_what_is_in_hand(serve: Callable[..., Server]) -> None:
    """In the middle of a prompt, and of an answer; each next server looks what the last kept."""
    ways: list[tuple[signal.Signals, dict[str, int], bool]] = [
        (signal.SIGTERM, {}, True),
        (signal.SIGINT, {"seed": 1}, True),
        (signal.SIGINT, {}, False),
        (signal.SIGTERM, {"seed": 1}, False),
    ]
    server = serve("--checkpoint-every", "0", "--flush-seconds", "5")
    for index, (number, how, reading) in enumerate(ways):
        prompt = f"{index} {LONG}"[:PROMPT]
        with begun(server, 320 if reading else PROMPT - 1, prompt=prompt, **how) as response:
            for _ in range(0 if reading else 20):
                response.readline()
            started = time.monotonic()
            assert server.stop(number, within=20) == 0
            assert time.monotonic() - started < 10
        server = serve("--checkpoint-every", "0", "--flush-seconds", "5")
        reply = complete(server.client(), prompt, max_tokens=2, **how)
        if reading:
            assert 320 <= reply.cached < PROMPT, ways[index]
        else:
            assert (reply.cached, reply.tier) == (PROMPT - 1, "store"), ways[index]
        settle(server)
        assert server.report()["server"]["failures"] == {}


def test_a_stop_at_rest_is_silent(serve: Callable[..., Server]) -> None:
    server = serve()
    complete(server.client(), "A short one.")
    assert server.stop() == 0
    assert "Traceback" not in server.said


@contextmanager
def stuck(server: Server, store: Path) -> Iterator[None]:
    """Within the block nothing that the server accepts can be written."""
    complete(server.client(), "A first one, so that the server's space is there.", max_tokens=2)
    settle(server)
    with kvkeep.open(store) as opened, opened.env.begin(write=True):
        complete(server.client(), LONG, max_tokens=2)
        while not server.metric("kvkeep_queue_snapshots"):
            time.sleep(0.02)
        yield


def test_a_stop_ends_within_its_bound_and_says_that_it_was_short(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve("--flush-seconds", "1")
    with stuck(server, tmp_path / "store"):
        assert server.stop(within=20) == 1
    assert "kvkeep: not all was written within 1 s" in server.said


def test_a_second_signal_stops_at_once(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("--flush-seconds", "300")
    with stuck(server, tmp_path / "store"):
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(1)
        assert server.stop(signal.SIGINT, within=10) == 128 + signal.SIGINT
    assert server.said.endswith("kvkeep: stopped at once; what was not yet on disk is lost\n")
    with kvkeep.open(tmp_path / "store") as opened:
        assert opened.verify().problems == []
        assert len(opened.conversations()) > 0
