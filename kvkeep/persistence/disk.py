"""How a disk is best read through a map and written to, and how bytes on it are overwritten."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

from kvkeep.persistence.libc import linux_call

ZEROS = 1 << 20
MANY = 8
FAR_AHEAD = 2 << 10
"""KiB of the kernel's own read-ahead from which it alone keeps the disk busy."""

KEEP_SIZE = 1
"""Linux's flag of ``fallocate``: blocks are found, and the file is as long as before."""


@lru_cache(maxsize=64)
def parallel_reads(folder: Path) -> int:
    """How many values to read at once from a map on the disk of ``folder``.

    One where the kernel reads far ahead: then several readers only get into each other's way.
    Otherwise many, since each of them waits for every little piece.
    """
    ahead = _read_ahead(folder)
    return 1 if ahead is not None and ahead >= FAR_AHEAD else MANY


def _read_ahead(folder: Path) -> int | None:
    """KiB that the kernel reads ahead on that disk; ``None`` where it does not tell (Linux does).

    A partition does as the disk that it is on.
    """
    try:
        device = folder.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for place in (f"class/bdi/{number}", f"dev/block/{number}/../queue"):
            file = Path("/sys", place, "read_ahead_kb")
            if file.exists():
                return int(file.read_text())
    except (OSError, ValueError):
        pass
    return None


def reserve(file: Path, start: int, length: int) -> None:
    """Have the file system find blocks for what will be written there; a hint, never an error.

    Found at once they are found faster than page by page, and a flush has less to write down.
    The file does not grow by it. Linux alone has the call.
    """
    call = linux_call("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call is None:
        return
    try:
        fd = os.open(file, os.O_WRONLY)
    except OSError:
        return
    try:
        call(fd, KEEP_SIZE, start, length)
    finally:
        os.close(fd)


def overwrite(fd: int, start: int, length: int) -> None:
    """Write zeros over ``length`` bytes from ``start`` on."""
    zeros = memoryview(bytes(min(length, ZEROS)))
    while length > 0:
        written = os.pwrite(fd, zeros[:length], start)
        start, length = start + written, length - written
