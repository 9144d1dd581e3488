"""``kvkeep serve --durability``, which reaches the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvkeep
from kvkeep.cli import options
from kvkeep.persistence.unsynced import MARK
from kvkeep.prefixstore import store
from tests.serve.harness import Server


def test_the_names_are_those_of_the_store() -> None:
    assert options.DURABILITIES == store.DURABILITIES


def test_a_server_takes_it_and_leaves_all_on_the_disk(
    model: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    monkeypatch.setenv("KVKEEP_DURABILITY", "process")
    with Server(tmp_path / "log", folder, "--model", model("llama")) as server:
        assert (folder / MARK).exists()
        with kvkeep.open(folder, disk_reserve=1) as opened:
            assert opened.durability == "process", "`kvkeep evict` and the like go along"
        assert (folder / MARK).exists()
        assert server.stop() == 0
    assert not (folder / MARK).exists()
