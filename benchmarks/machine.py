"""What a run was taken on: numbers mean nothing without it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvkeep._version import __version__

PACKAGES = ("mlx", "mlx-lm", "lmdb", "numpy", "xxhash", "zstandard")


def describe(folder: Path) -> dict[str, Any]:
    """Processor, memory, disk of ``folder`` and versions, as JSON's own types."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(_memory() / (1 << 30), 1),
        "load": [round(x, 2) for x in os.getloadavg()],
        "disk": _disk(folder),
        "disk_free_gib": round(shutil.disk_usage(folder).free / (1 << 30), 1),
        "huge_pages": _huge_pages(),
        "python": platform.python_version(),
        "device": _device(),
        "kvkeep": __version__,
        **{name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    if sys.platform == "darwin":
        return _said("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _disk(folder: Path) -> str:
    """The file system and device that ``folder`` lies on."""
    best = ("", "unknown")
    for line in _lines("/proc/mounts"):
        device, mount, kind = line.split()[:3]
        if folder.resolve().is_relative_to(mount) and len(mount) > len(best[0]):
            best = (mount, f"{kind} on {device}")
    return best[1]


def _huge_pages() -> str:
    for line in _lines("/sys/kernel/mm/transparent_hugepage/enabled"):
        return line.partition("[")[2].partition("]")[0]
    return "unknown"


def _device() -> str:
    import mlx.core as mx

    return str(mx.default_device())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []


def _said(*words: str) -> str:
    import subprocess

    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
