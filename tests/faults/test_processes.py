"""Fork, spawn, and opening a store again: safe, or refused by name."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvkeep
from kvkeep.errors import StoreUnusable
from tests.faults.rows import caches, tokens_of, wrong
from tests.faults.sigkill import ROOT
from tests.faults.worker import open_spaces

FORK = """
import os, sys
from tests.faults import light
light.install()
from tests.faults.rows import caches, tokens_of
from tests.faults.worker import open_spaces
import kvkeep
from kvkeep.errors import StoreClosed

def told(do):
    try:
        return do()
    except StoreClosed as error:
        return f"{type(error).__name__}: {error.problem.split(': ')[-1]} / {error.remedy}"

store = kvkeep.open(sys.argv[1], max_bytes="50MB", disk_reserve=1)
space = open_spaces(store)["plain"]
tokens = tokens_of(1, 300)
live = caches("plain", tokens)
if "used" in sys.argv:
    assert space.snapshot(tokens, live).stored
    assert space.resume(tokens_of(1, 301)).offset == 300
sys.stdout.flush()
child = os.fork()
if child == 0:
    for do in (lambda: space.resume(tokens), lambda: space.snapshot(tokens, live), store.flush):
        print("the parent's:", told(do))
    store.close()
    with kvkeep.open(sys.argv[1], disk_reserve=1) as mine:
        print("its own:", mine.used_bytes > 0, len(mine.conversations()))
        if "used" in sys.argv:
            own = mine.stored_space(space.id.hex())
            print("explains:", own.explain(tokens_of(1, 301)).offset)
            print("resumes:", told(lambda: own.resume(tokens_of(1, 301))))
            print("stores:", told(lambda: own.snapshot(tokens, live)))
    sys.stdout.flush()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("parent:", space.snapshot(tokens, live).stored, space.resume(tokens_of(1, 301)).offset)
store.close()
"""


def forked(folder: Path, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, str(folder), *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.splitlines()


def test_a_forked_child_is_refused_what_cannot_work_and_opens_its_own(tmp_path: Path) -> None:
    told = forked(tmp_path / "store", "used")
    for line in told[:3]:
        assert line.startswith("the parent's: StoreClosed: ")
        assert "a parent process" in line
        assert "kvkeep.open(path)" in line
    assert told[3] == "its own: True 1"
    assert told[4] == "explains: 300"
    for line, what in zip(told[5:7], ("resumes", "stores"), strict=True):
        assert line.startswith(f"{what}: StoreClosed: MLX was in use when this process was forked")
        assert "spawn" in line
    assert told[7:] == ["parent: True 300"]


def test_a_fork_before_anything_is_used_is_fine(tmp_path: Path) -> None:
    told = forked(tmp_path / "store")
    assert told[3] == "its own: False 0"
    assert told[4:] == ["parent: True 300"]


def work(folder: str, conversation: int) -> int:
    """What a spawned worker does; the offset at which it resumed its own snapshot."""
    tokens = tokens_of(conversation, 200)
    with kvkeep.open(folder, disk_reserve=1) as store:
        space = open_spaces(store)["recurrent"]
        assert space.snapshot(tokens, caches("recurrent", tokens)).stored
        hit = space.resume(tokens_of(conversation, 201))
        assert not wrong("recurrent", tokens, hit.offset, hit.caches or [])
        return hit.offset


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_from_the_user(tmp_path: Path, method: str) -> None:
    with kvkeep.open(tmp_path / "store", max_bytes="50MB", disk_reserve=1) as store:
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            jobs = [(str(store.path), 4 * number) for number in range(4)]
            assert pool.starmap(work, jobs) == [200] * 4
        assert len(store.conversations()) == 4
        assert store.verify().problems == []


def test_opening_again_in_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    tokens = tokens_of(1, 200)
    first = kvkeep.open(folder, max_bytes="50MB", disk_reserve=1)
    second = kvkeep.open(folder, disk_reserve=1)
    assert open_spaces(first)["plain"].snapshot(tokens, caches("plain", tokens)).stored
    first.close()
    first.close()
    assert open_spaces(second)["plain"].resume(tokens_of(1, 201)).offset == 200
    second.close()
    for budget in (None, "40MB"):
        with kvkeep.open(folder, budget, disk_reserve=1) as again:
            assert open_spaces(again)["plain"].resume(tokens_of(1, 201)).offset == 200
            assert again.max_bytes == (50_000_000 if budget is None else 40_000_000)


def test_threads_open_and_close_the_same_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    kvkeep.open(folder, max_bytes="50MB", disk_reserve=1).close()
    offsets: list[int] = []

    def run(number: int) -> None:
        for turn in range(4):
            tokens = tokens_of(4 * number, 100 + 20 * turn)
            with kvkeep.open(folder, disk_reserve=1) as store:
                space = open_spaces(store)["plain"]
                space.snapshot(tokens, caches("plain", tokens)).wait()
                offsets.append(space.resume(tokens_of(4 * number, 101 + 20 * turn)).offset)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(offsets) == sorted([100, 120, 140, 160] * 4)


def test_a_folder_that_was_removed_under_an_open_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    tokens = tokens_of(1, 200)
    old = kvkeep.open(folder, max_bytes="50MB", disk_reserve=1)
    space = open_spaces(old)["plain"]
    assert space.snapshot(tokens, caches("plain", tokens)).stored
    shutil.rmtree(folder)
    receipt = open_spaces(old)["plain"].snapshot(
        tokens_of(8, 90), caches("plain", tokens_of(8, 90))
    )
    assert not receipt.stored
    assert "removed or replaced" in receipt.reason
    hit = space.resume(tokens_of(1, 201), record=False)  # a miss, or what was stored
    assert hit.caches is None or not wrong("plain", tokens, hit.offset, hit.caches)

    with kvkeep.open(folder, max_bytes="50MB", disk_reserve=1) as new:
        assert new.used_bytes == 0
        other = open_spaces(new)["plain"]
        assert other.snapshot(tokens, caches("plain", tokens)).stored
        old.close()
        assert other.resume(tokens_of(1, 201)).offset == 200
    with kvkeep.open(folder, disk_reserve=1) as again:
        assert open_spaces(again)["plain"].resume(tokens_of(1, 201)).offset == 200
    with pytest.raises(StoreUnusable):
        kvkeep.open(folder / "store.json")
