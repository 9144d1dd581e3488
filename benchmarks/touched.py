"""Memory that has been touched, so that no clock counts how it came to be there.

A virtual machine's host gives memory when it is first touched and takes back what lies idle;
then a step may wait a second for what took the one before it a tenth. So before every step
another process touches a few GiB and ends, and the step is given those pages. What the host
itself costs is left out for all ways alike. Only on Linux.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

MOST = 4 << 30


def touch_memory() -> None:
    """Touch up to 4 GiB, and no more than half of what is free, in a process of its own."""
    if sys.platform == "linux":
        subprocess.run([sys.executable, "-m", "benchmarks.touched"], check=False)


def _touch(nbytes: int) -> None:
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:: mmap.PAGESIZE] = b"\1" * (nbytes // mmap.PAGESIZE)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    _touch(max(1, min(MOST, _available() // 2) >> 20) << 20)
