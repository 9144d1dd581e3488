"""SIGKILL at random moments, a bounded number of times; ``sigkill.py`` does it for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import sigkill

KILLS = 40


@pytest.mark.slow
def test_a_killed_process_leaves_every_snapshot_whole_or_absent(tmp_path: Path) -> None:
    seen = sigkill.run(tmp_path, KILLS, seed=20261129)
    assert seen["kills"] == KILLS
    assert seen["resume points restored bit for bit"] > KILLS
    assert seen["flushed snapshots that are there"] >= KILLS // 8
    assert sum(name.startswith("killed in ") for name in seen) >= 3
