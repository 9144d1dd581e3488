"""Power losses, and what each durability promises."""

from __future__ import annotations

import mmap
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvkeep
from kvkeep.errors import Damaged, KvkeepError, StoreUnusable
from kvkeep.persistence import unsynced
from kvkeep.persistence.compact import compact
from tests.faults import powerloss
from tests.faults.rows import caches, tokens_of
from tests.faults.sigkill import ROOT
from tests.faults.worker import open_spaces

OPENED = """
import sys
from tests.faults import light
light.install()
import kvkeep
with kvkeep.open(sys.argv[1], "50MB", disk_reserve=1, durability=sys.argv[2]) as store:
    print(store.durability, flush=True)
    sys.stdin.read()
"""

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
    with kvkeep.open(folder, max_bytes="50MB", disk_reserve=1, durability="process") as first:
        with pytest.raises(StoreUnusable, match="without protection"):
            kvkeep.open(folder, disk_reserve=1, durability="safe")
        kvkeep.open(folder, disk_reserve=1, durability="process").close()
        with kvkeep.open(folder, disk_reserve=1) as joined:
            assert joined.durability == first.durability == "process"
    with kvkeep.open(folder, disk_reserve=1), kvkeep.open(folder, durability="process") as second:
        assert second.durability == "safe", "the stricter promise holds for both"
        assert not (folder / unsynced.MARK).exists()
    with pytest.raises(KvkeepError, match="no durability"):
        kvkeep.open(folder, durability="fast")


@contextmanager
def opened_elsewhere(folder: Path, durability: str) -> Iterator[subprocess.Popen[str]]:
    """Another process has the store open, until the block ends or it is killed."""
    words = [sys.executable, "-W", "error", "-c", OPENED, str(folder), durability]
    process = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{durability}\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_without_protection_beside_a_process_that_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with opened_elsewhere(folder, "safe"):
        with kvkeep.open(folder, disk_reserve=1, durability="process") as store:
            assert store.durability == "safe"
        assert not (folder / unsynced.MARK).exists(), "no loss of power takes what is theirs"
    with kvkeep.open(folder, disk_reserve=1, durability="process") as store:
        assert store.durability == "process"


def test_with_protection_beside_a_process_that_has_none(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with opened_elsewhere(folder, "process") as other:
        with pytest.raises(StoreUnusable, match="another process"):
            kvkeep.open(folder, disk_reserve=1, durability="safe")
        with kvkeep.open(folder, disk_reserve=1) as store:
            assert store.durability == "process"
        assert (folder / unsynced.MARK).exists(), "the other one still writes"
        with kvkeep.open(folder, read_only=True) as store:
            assert store.durability == "process"
        other.kill()
        other.wait()
        assert (folder / unsynced.MARK).exists()
        with kvkeep.open(folder, disk_reserve=1, durability="safe") as store:
            assert store.durability == "safe"
            assert not (folder / unsynced.MARK).exists(), "or a power loss would take all"


def test_many_open_what_was_lost_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for _ in range(5):
        with kvkeep.open(folder, max_bytes="50MB", disk_reserve=1) as store:
            tokens = tokens_of(1, 300)
            assert open_spaces(store)["plain"].snapshot(tokens, caches("plain", tokens)).stored
        (folder / unsynced.MARK).write_text("another boot")
        words = [sys.executable, "-W", "error", "-c", OPENED, str(folder), "safe"]
        both = [
            subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            for _ in range(2)
        ]
        assert [process.wait() for process in both] == [0, 0]
        with kvkeep.open(folder, disk_reserve=1) as store:
            assert store.used_bytes == 0
            assert store.verify().problems == []


def test_a_lost_store_is_not_compacted(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    kvkeep.open(folder, max_bytes="50MB", disk_reserve=1).close()
    (folder / unsynced.MARK).write_text("another boot")
    with pytest.raises(Damaged, match="not protected"):
        compact(folder)


def test_where_the_boot_cannot_be_told_nothing_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsynced, "boot_id", lambda: "")
    folder = tmp_path / "store"
    with kvkeep.open(folder, max_bytes="50MB", durability="process") as store:
        assert store.durability == "safe"
        assert not (folder / unsynced.MARK).exists()
    (folder / unsynced.MARK).write_text("some boot")
    with pytest.raises(Damaged, match="not protected"):
        kvkeep.open(folder, read_only=True)


def test_what_makes_a_folder_a_store_is_on_the_disk_first(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace, which records the calls, is not installed")
    folder, log = tmp_path / "store", tmp_path / "trace"
    calls = "trace=fsync,fdatasync,link,linkat,pwrite64"
    words = ["strace", "-f", "-y", "-e", calls, "-o", str(log), sys.executable, "-W", "error"]
    subprocess.run(
        [*words, "-c", OPENED, str(folder), "safe"], cwd=ROOT, stdin=subprocess.DEVNULL, check=True
    )
    lines = log.read_text().splitlines()

    def first(call: str, path: str, start: int = 0) -> int:
        found = re.compile(rf"{call}\w*\(.*{re.escape(path)}")
        return next(n for n, line in enumerate(lines) if n >= start and found.search(line))

    marker = first("fsync", "store.json.new-")
    linked = first("link", "store.json", marker)
    named = first("fsync", f"{folder}>", linked)
    pages = first("pwrite64", "data.mdb", named)
    assert lines[pages].rstrip().endswith(f"= {2 * mmap.PAGESIZE}"), "both first pages"
    kept = first("f(data)?sync", "data.mdb", pages)
    first("fsync", f"{folder}>", kept)
    assert first("pwrite64", "data.mdb", pages + 1) > kept
