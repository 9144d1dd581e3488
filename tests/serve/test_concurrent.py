"""Several clients at once, and many requests: right answers, nothing grows beyond its cap."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.serve import soak
from tests.serve.harness import Reply, Server, chat, settle

CLIENTS, TURNS = 4, 3


def conversation(server: Server, share: int, model: str) -> list[Reply]:
    """A chat whose history grows; all clients share a system prompt, some the first question."""
    messages: list[Any] = [{"role": "system", "content": "Be brief, be kind, and be exact."}]
    replies = []
    for turn in range(TURNS):
        topic = share // 2 if turn == 0 else share
        messages.append({"role": "user", "content": f"Question {turn} of client {topic}?"})
        how: dict[str, Any] = {"stream": bool(share % 2), "max_tokens": 6, "model": model}
        replies.append(chat(server.client(), messages, **how))
        messages.append({"role": "assistant", "content": f"Answer {turn}."})
    return replies


def test_concurrent_clients_get_the_answers_of_a_lonely_one(
    tmp_path: Path, model: Callable[..., str]
) -> None:
    models = [model(name) for name in ("llama", "falcon_h1")]
    with Server(tmp_path / "cold", None, "--prompt-cache-size", "0") as server:
        alone = [[conversation(server, share, m) for share in range(CLIENTS)] for m in models]
    with Server(tmp_path / "log", tmp_path / "store") as server:
        for again in range(2):
            for m, lonely in zip(models, alone, strict=True):
                with ThreadPoolExecutor(CLIENTS) as pool:
                    together = list(
                        pool.map(partial(conversation, server, model=m), range(CLIENTS))
                    )
                for mine, theirs in zip(together, lonely, strict=True):
                    assert [reply.text for reply in mine] == [reply.text for reply in theirs]
                    if again:
                        assert all(reply.cached == reply.prompt - 1 for reply in mine)
                settle(server)
        assert server.report()["server"]["failures"] == {}
        assert server.stop() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_requests_do_not_grow_the_process(tmp_path: Path) -> None:
    found = soak.run(tmp_path, 240)
    assert (found["errors"], found["failures"], found["stopped"]) == ([], {}, 0)
    assert found["resumed_tokens"] > 600
    assert found["memory_bytes"] <= soak.MEMORY_BYTES
    assert found["store_bytes"] <= soak.MAX_BYTES
    quarter, end = found["quarter"], found["end"]
    assert end["files"] <= quarter["files"] + soak.CLIENTS
    assert end["rss_kib"] <= quarter["rss_kib"] + 65536
    assert end["disk"] <= 4 * soak.MAX_BYTES
