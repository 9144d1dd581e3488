"""A model that two processes share: each keeps its own shards, and both resume the same length."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import kvkeep
from tests.serve.harness import Reply, Server, complete, free_port, settle

TEXT = "The ferry sails at eight and at noon from the harbour. " * 4


@contextmanager
def ranks(folder: Path, model: str, *options: str) -> Iterator[tuple[Server, Server]]:
    """Two ranks over mlx's ring, each with a store of its own; the first one listens."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    with ExitStack() as stack:
        both = []
        for rank in range(2):
            env = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
            log, store = folder / f"log{rank}", folder / f"store{rank}"
            words = ("--model", model, *options)
            server = Server(log, store, *words, wait=False, env=env)
            both.append(stack.enter_context(server))
        both[0].wait()
        yield both[0], both[1]


def asked(folder: Path, model: str, *options: str, stop: int = 0) -> list[Reply]:
    """The same request on both paths; then one rank is told to stop, and both do."""
    replies = []
    with ranks(folder, model, *options) as both:
        for how in ({}, {"seed": 1}):
            replies.append(complete(both[0].client(), TEXT, **how))
            settle(both[0])
        assert both[0].report()["server"]["failures"] == {}
        assert both[stop].stop() == 0
        assert both[1 - stop].process.wait(30) == 0
    return replies


def test_10_two_ranks_resume_the_same_after_a_restart(
    tmp_path: Path, model: Callable[..., str]
) -> None:
    folder = model("llama")
    before = asked(tmp_path, folder)
    last = before[0].prompt - 1
    assert [reply.cached for reply in before] == [0, last]
    after = asked(tmp_path, folder, stop=1)
    assert [(reply.cached, reply.tier) for reply in after] == [(last, "store"), (last, "memory")]
    # Only one of the two remembers: neither resumes.
    shutil.rmtree(tmp_path / "store1")
    forgot = asked(tmp_path, folder, "--prompt-cache-size", "0")
    assert [reply.cached for reply in forgot] == [0, last]
    assert len({reply.text for reply in before + after + forgot}) == 1
    for rank in range(2):
        with kvkeep.open(tmp_path / f"store{rank}", read_only=True) as store:
            (space,) = store.spaces()
            assert space.fields["salt"]
            assert store.verify().problems == []
