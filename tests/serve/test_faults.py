"""Whatever happens to the store while a server runs, its requests are answered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.prefixstore.store import open_store
from tests.serve.harness import Reply, Server, complete, settle

TEXT = "The ferry sails at eight and at noon from the harbour. " * 4
NO_MEMORY = ("--prompt-cache-size", "0")


@pytest.fixture
def serve(tmp_path: Path, model: Callable[..., str]) -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def start(*options: str) -> Server:
        words = ("--model", model("falcon_h1"), *NO_MEMORY, *options)
        running.append(Server(tmp_path / "log", tmp_path / "store", *words))
        return running[-1]

    yield start
    for server in running:
        server.kill()


def twice(server: Server, said: str, **how: Any) -> list[Reply]:
    """The same request again, once what it left is written."""
    replies = [complete(server.client(), said, **how)]
    settle(server)
    replies.append(complete(server.client(), said, stream=True, **how))
    assert replies[0].text == replies[1].text
    return replies


def poison(folder: Path) -> int:
    """Flip a byte of every stored chunk, from another process, while the server has it open."""
    with open_store(folder) as opened, opened.env.begin(write=True) as txn:
        chunks = [(bytes(key), bytearray(data)) for key, data in txn.items("chunks")]
        for key, data in chunks:
            data[-1] ^= 1
            txn.put("chunks", key, bytes(data))
    return len(chunks)


def test_a_poisoned_store_is_a_miss_and_heals(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    sound = twice(server, TEXT)
    assert [reply.cached for reply in sound] == [0, sound[0].prompt - 1]
    settle(server)
    assert poison(tmp_path / "store") > 1
    poisoned = twice(server, TEXT)
    assert [reply.cached for reply in poisoned] == [0, 0]  # state and rows are found one by one
    assert {reply.reason for reply in poisoned} == {"corrupt"}
    settle(server)
    healed = twice(server, TEXT)
    assert {reply.text for reply in poisoned + healed} == {sound[0].text}
    assert (healed[1].cached, healed[1].tier) == (healed[1].prompt - 1, "store")
    assert server.report()["store"]["quarantined"] > 0
    assert server.stop() == 0


def test_a_deleted_folder_is_no_error(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    first = twice(server, TEXT)[0]
    shutil.rmtree(tmp_path / "store")
    assert twice(server, TEXT)[1].text == first.text
    twice(server, f"Quite another text. {TEXT}")
    twice(server, f"And on the other path. {TEXT}", seed=1)
    assert server.metric("kvkeep_lookups_total") == 8
    server.get("/kvkeep/report")
    assert server.said.count("Traceback") <= 2
    server.stop()


def test_a_folder_without_permission_is_no_error(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server, store = serve(), tmp_path / "store"
    first = twice(server, TEXT)[0]
    for path in (*store.iterdir(), store):
        path.chmod(0)
    try:
        assert twice(server, TEXT)[1].text == first.text
        twice(server, f"Quite another text. {TEXT}")
    finally:
        store.chmod(0o700)
    assert server.stop() == 0


@pytest.mark.parametrize(
    "limit", [("--disk-reserve", "1000TB"), ("--max-bytes", "2000")], ids=["reserve", "budget"]
)
def test_a_full_disk_stores_nothing_and_stops_nobody(
    serve: Callable[..., Server], limit: tuple[str, ...]
) -> None:
    server = serve(*limit)
    assert [reply.cached for reply in twice(server, TEXT)] == [0, 0]
    assert [reply.cached for reply in twice(server, TEXT, seed=3)] == [0, 0]
    settle(server)
    found = server.report()["server"]
    assert found["snapshots"]["stored"] == 0
    assert found["snapshots"]["failed"] > 0
    assert server.said.count("not stored") == 1
    assert server.stop() == 0


def test_with_memory_a_full_disk_costs_nothing(serve: Callable[..., Server]) -> None:
    server = serve("--disk-reserve", "1000TB", "--prompt-cache-size", "10")
    replies = twice(server, TEXT)
    assert [reply.cached for reply in replies] == [0, replies[0].prompt - 1]
    assert replies[1].tier == "memory"
