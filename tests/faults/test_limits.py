"""No disk, no handles, no memory, no permission: told by name, and over when the cause is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import limits
from tests.faults.sigkill import ROOT

LINUX = sys.platform.startswith("linux")


# The allocator would keep large blocks that were freed, and with them meet a limit.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def run(case: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.faults.limits", case, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **GIVE_BACK},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB of its own, where this user may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    if not LINUX or os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small file system needs root and mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("case", [c for c in limits.CASES if c != "full_disk"])
def test_nothing_left(case: str, tmp_path: Path) -> None:
    if case == "address_space" and not LINUX:
        pytest.skip("only Linux limits the address space")
    run(case, tmp_path / "store")


def test_a_full_disk(small_disk: Path) -> None:
    run("full_disk", small_disk / "store")


def test_every_case_is_run() -> None:
    assert set(limits.CASES) == {
        "file_size", "full_disk", "descriptors", "address_space", "read_only",
    }  # fmt: skip
