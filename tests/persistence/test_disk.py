from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.persistence import disk
from kvkeep.persistence.disk import MANY, parallel_reads


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    parallel_reads.cache_clear()
    yield
    parallel_reads.cache_clear()


@pytest.mark.parametrize(
    ("ahead", "readers"), [(None, MANY), (0, MANY), (128, MANY), (2048, 1), (8192, 1)]
)
def test_one_reader_where_the_kernel_reads_far_ahead(
    ahead: int | None, readers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk, "_read_ahead", lambda folder: ahead)
    assert parallel_reads(tmp_path) == readers


def test_a_folder_that_is_not_there_tells_nothing(tmp_path: Path) -> None:
    assert disk._read_ahead(tmp_path / "missing") is None
    assert parallel_reads(tmp_path / "missing") == MANY


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_what_linux_tells_is_a_number_of_kib() -> None:
    files = list(Path("/sys/class/bdi").glob("*/read_ahead_kb"))
    told = disk._read_ahead(Path.cwd())
    assert told is None or told in {int(file.read_text()) for file in files}


def test_reserved_blocks_change_neither_the_size_nor_a_byte(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 5000)
    before = file.stat().st_blocks
    disk.reserve(file, 4096, 1 << 20)
    assert file.read_bytes() == b"x" * 5000
    if sys.platform == "linux":
        assert file.stat().st_blocks - before >= (1 << 20) // 512 - 8
    # A hint: what cannot be had is left out.
    disk.reserve(tmp_path / "missing", 0, 1 << 20)
    disk.reserve(file, -1, 1 << 20)
    assert file.read_bytes() == b"x" * 5000
