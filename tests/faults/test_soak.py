"""Many processes at once, a bounded time; ``soak.py`` does it for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvkeep
from tests.faults import soak
from tests.faults.rows import KINDS, caches, tokens_of
from tests.faults.worker import open_spaces

BUDGET, SLACK = 4_000_000, 1_000_000
READER = """
import os, signal, sys
from kvkeep.persistence.environment import Environment
env = Environment(sys.argv[1], map_size=1 << 36, databases=["chunks"], read_only=True)
with env.begin() as txn:
    print(txn.count("chunks"), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_every_byte_is_right_while_processes_write_read_and_evict(tmp_path: Path) -> None:
    seen = soak.run(tmp_path / "store", seconds=10, writers=4, readers=8, seed=4)
    assert seen["  answered: stored"] > 5
    assert seen["hits"] > 10
    assert seen["bytes compared"] > 100_000
    assert seen["readers killed"] >= 1
    assert seen["bytes written"] > soak.BUDGET, "too little was written to evict anything"


@pytest.mark.slow
def test_killed_readers_do_not_make_the_file_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep.prefixstore.recipe.CHUNK_BYTES", 8 << 10)
    written = conversation = 0
    with kvkeep.open(tmp_path / "store", max_bytes=BUDGET, disk_reserve=1) as store:
        spaces = open_spaces(store)
        for _ in range(6):
            for _ in range(60):
                conversation += 1
                kind, tokens = KINDS[conversation % 3], tokens_of(4 * conversation, 600)
                written += spaces[kind].snapshot(tokens, caches(kind, tokens)).bytes_written
            killed = subprocess.run(
                [sys.executable, "-c", READER, str(store.path)], capture_output=True, check=False
            )
            assert int(killed.stdout) > 100, "it was killed while it held a state of the store"
            assert killed.returncode == -9
        assert written > 5 * BUDGET
        assert store.used_bytes <= BUDGET
        assert store.env.file_bytes() <= 1.3 * BUDGET + SLACK
