"""Files in and out of the kernel's page cache, so that warm and cold are what they say."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

BLOCK = 8 << 20
THREADS = 4

CAN_DROP = hasattr(os, "posix_fadvise")
"""macOS drops a file from its cache only for the administrator (``purge``)."""


def drop(file: Path) -> None:
    """Have the next read of ``file`` come from the disk. No process may have it mapped."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm(file: Path) -> None:
    """Have ``file`` in the page cache."""
    read_in_threads(file)


def read_in_threads(file: Path) -> float:
    """Seconds to read all of ``file`` in a few threads, each into one block that it reuses."""
    size = file.stat().st_size
    share = -(-size // (THREADS * BLOCK)) * BLOCK
    fd = os.open(file, os.O_RDONLY)
    blocks = [bytearray(BLOCK) for _ in range(THREADS)]
    threads = [
        threading.Thread(target=_read, args=(fd, blocks[i], i * share, min((i + 1) * share, size)))
        for i in range(THREADS)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    os.close(fd)
    return seconds


def _read(fd: int, block: bytearray, at: int, stop: int) -> None:
    while at < stop:
        at += os.preadv(fd, [block], at)
