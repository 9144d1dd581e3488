"""A mark on a store that somebody writes to without waiting for the disk.

As long as the machine runs, nothing is lost: the system has the pages. If it went down, no one
can say which of them reached the disk. The mark holds the id of the boot, so that the next
process can tell the one from the other.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

MARK = "unsynced"
_LINUX = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """What changes each time the machine starts; empty where the system does not tell."""
    try:
        if sys.platform == "darwin":
            return _sysctl(b"kern.bootsessionuuid")
        return _LINUX.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError, AttributeError):
        return ""


def mark(folder: Path) -> None:
    """Put the mark there, durably. Raises ``OSError``."""
    if _read(folder) == boot_id():
        return
    fd = os.open(folder / MARK, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, boot_id().encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(folder)


def clear(folder: Path) -> None:
    """Take the mark away; the store is on the disk."""
    (folder / MARK).unlink(missing_ok=True)
    sync_folder(folder)


def is_lost(folder: Path) -> bool:
    """Whether the machine went down with the mark there."""
    found = _read(folder)
    return found is not None and found != boot_id()


def sync_folder(folder: Path) -> None:
    """Return once the names in ``folder`` are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(folder: Path) -> str | None:
    try:
        return (folder / MARK).read_text("ascii", errors="replace")
    except FileNotFoundError:
        return None


def _sysctl(name: bytes) -> str:
    library = ctypes.CDLL(None)
    size = ctypes.c_size_t(64)
    text = ctypes.create_string_buffer(size.value)
    if library.sysctlbyname(name, text, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return ""
    return text.value.decode("ascii")
