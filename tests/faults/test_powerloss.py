"""Power losses, and what each durability promises."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvkeep
from kvkeep.errors import Damaged, KvkeepError, StoreUnusable
from kvkeep.persistence import unsynced
from tests.faults import powerloss
from tests.faults.rows import caches, tokens_of
from tests.faults.sigkill import ROOT
from tests.faults.worker import open_spaces

KILLED = """
import os, signal, sys
from tests.faults import light
light.install()
from tests.faults.rows import caches, tokens_of
from tests.faults.worker import open_spaces
import kvkeep
store = kvkeep.open(sys.argv[1], max_bytes="50MB", disk_reserve=1, durability="process")
tokens = tokens_of(1, 300)
assert open_spaces(store)["plain"].snapshot(tokens, caches("plain", tokens)).stored
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["safe", "process"])
def test_what_a_power_loss_leaves(tmp_path: Path, durability: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace, which records the writes, is not installed")
    images = 40 if durability == "safe" else 10
    seen = powerloss.run(tmp_path, images, 3, seed=8, durability=durability)
    assert seen["power losses"] == images
    assert seen["traced: Write"] > 100
    if durability == "safe":
        assert seen["flushed snapshots that are there"] > images
        assert seen["resume points restored bit for bit"] > 2 * images
        assert seen["traced: Flush"] > 50
    else:
        assert seen["resume points restored bit for bit"] == 0, "the store begins anew"


def test_without_flushes_a_kill_still_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    words = [sys.executable, "-W", "error", "-c", KILLED, str(folder)]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -9
    assert (folder / unsynced.MARK).exists()
    for durability in ("process", "safe"):
        with kvkeep.open(folder, disk_reserve=1, durability=durability) as store:
            assert open_spaces(store)["plain"].resume(tokens_of(1, 301)).offset == 300
            assert store.verify().problems == []
    assert unsynced.boot_id()


def test_a_store_that_was_closed_is_on_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with kvkeep.open(folder, max_bytes="50MB", disk_reserve=1, durability="process") as store:
        assert (folder / unsynced.MARK).exists()
        assert (folder / unsynced.MARK).stat().st_mode & 0o777 == 0o600
        tokens = tokens_of(1, 300)
        assert open_spaces(store)["plain"].snapshot(tokens, caches("plain", tokens)).stored
    assert not (folder / unsynced.MARK).exists()
    with kvkeep.open(folder, disk_reserve=1) as store:
        assert open_spaces(store)["plain"].resume(tokens_of(1, 301)).offset == 300


def test_after_the_machine_went_down_an_unprotected_store_begins_anew(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with kvkeep.open(folder, max_bytes="50MB", disk_reserve=1) as store:
        tokens = tokens_of(1, 300)
        assert open_spaces(store)["plain"].snapshot(tokens, caches("plain", tokens)).stored
    (folder / unsynced.MARK).write_text("another boot")
    with pytest.raises(Damaged, match="not protected"):
        kvkeep.open(folder, read_only=True)
    with kvkeep.open(folder, disk_reserve=1) as store:
        assert store.used_bytes == 0
        assert store.max_bytes == 50_000_000, "what the store was made with stays"
    assert not (folder / unsynced.MARK).exists()


def test_one_process_gives_one_promise(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with kvkeep.open(folder, max_bytes="50MB", disk_reserve=1, durability="process"):
        with pytest.raises(StoreUnusable, match="without protection"):
            kvkeep.open(folder, disk_reserve=1)
        kvkeep.open(folder, disk_reserve=1, durability="process").close()
    with kvkeep.open(folder, disk_reserve=1), kvkeep.open(folder, durability="process"):
        assert not (folder / unsynced.MARK).exists(), "the stricter promise holds for both"
    with pytest.raises(KvkeepError, match="no durability"):
        kvkeep.open(folder, durability="fast")
