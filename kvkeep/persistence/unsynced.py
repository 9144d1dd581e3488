"""A mark on a store that somebody writes to without waiting for the disk.

As long as the machine runs, nothing is lost: the system has the pages. If it went down, no one
can say which of them reached the disk. The mark holds the id of the boot, so that the next
process can tell the one from the other.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
from contextlib import suppress
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


def mark(folder: Path, mode: int) -> bool:
    """Put the mark there, durably, as a file of ``mode``; not where the boot has no id.

    Answers whether it is there. Raises ``OSError``.
    """
    boot = boot_id()
    if not boot:
        return False
    fd = os.open(folder / MARK, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.fchmod(fd, mode)
        os.write(fd, boot.encode())
        sync_file(fd)
    finally:
        os.close(fd)
    sync_folder(folder)
    return True


def clear(folder: Path) -> None:
    """Take the mark away; the store is on the disk, or gone."""
    (folder / MARK).unlink(missing_ok=True)
    sync_folder(folder)


def is_marked(folder: Path) -> bool:
    """Whether somebody writes, or wrote, without waiting for the disk."""
    return (folder / MARK).exists()


def is_lost(folder: Path) -> bool:
    """Whether the machine went down with the mark there, as far as anyone can tell."""
    try:
        found = (folder / MARK).read_text("ascii", errors="replace")
    except FileNotFoundError:
        return False
    return not found or found != boot_id()


def sync_file(fd: int) -> None:
    """Return once what was written to an open file is on the disk."""
    if sys.platform == "darwin":
        # fsync alone only hands it to the drive there; some file systems can do no more.
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def sync_path(path: Path) -> None:
    """The same for a file that may be read; nothing where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        sync_file(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Return once the names in ``folder`` are on the disk, where its file system can say."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _sysctl(name: bytes) -> str:
    library = ctypes.CDLL(None)
    size = ctypes.c_size_t(64)
    text = ctypes.create_string_buffer(size.value)
    if library.sysctlbyname(name, text, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return ""
    return text.value.decode("ascii")
