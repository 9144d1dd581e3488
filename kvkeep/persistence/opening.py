"""Opening LMDB's file: what is checked before it may look, and what is put right after.

LMDB believes its file: some damaged pages end the process. So the pages near the roots are looked
at first. What a new file holds is on the disk before anything is written that needs it.
"""

from __future__ import annotations

import mmap
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from kvkeep.errors import Damaged
from kvkeep.persistence import unsynced
from kvkeep.persistence.power import LOCK_FILE

DATA_FILE = "data.mdb"
MAX_READERS = 512
MAX_DATABASES = 64
COPY = "compact-"
OPENING_PAGES = 512
"""Pages that are checked before LMDB may look at a file; about 25 microseconds each."""

SKIMMED_PAGES = 1 << 16
"""Pages after these whose heads are looked at; 2 or 3 microseconds each."""

REBUILD = "Remove the folder and let it fill again, or put a copy of it back."


class Flags(NamedTuple):
    """How an environment is opened; the first handle of a process says it for all."""

    map_size: int
    read_only: bool
    mode: int
    durable: bool | None
    ours: bool


def open_lmdb(file: Path, flags: Flags, *, sync: bool) -> lmdb.Environment:
    """LMDB's environment on ``file``, which flushes its commits where ``sync``.

    Raises ``Damaged``, ``lmdb.Error`` or ``OSError``.
    """
    folder = str(file.parent)
    options: dict[str, Any] = {
        "map_size": flags.map_size,
        "max_dbs": MAX_DATABASES,
        "max_readers": MAX_READERS,
        "metasync": False,
        "sync": sync,
        "mode": flags.mode,
    }
    short = refuse_damage(file)
    if flags.read_only:
        try:
            env = lmdb.open(folder, readonly=True, create=False, **options)
        except lmdb.ReadonlyError:
            return lmdb.open(folder, readonly=True, create=False, lock=False, **options)
    else:
        fresh = not file.exists() or file.stat().st_size <= 2 * mmap.PAGESIZE
        env = lmdb.open(folder, **options)
        if fresh:
            _establish(env, file.parent)
        if flags.mode == 0o700:
            _tighten(file.parent)
        # Nobody compacts while this process has the store open.
        for left in file.parent.glob(f"{COPY}*"):
            shutil.rmtree(left, ignore_errors=True)
    env.reader_check()
    if short and not flags.read_only:
        _lengthen(env, file)
    return env


def _establish(env: lmdb.Environment, folder: Path) -> None:
    """Have a new file on the disk before anything is written that needs its first two pages."""
    env.sync(True)
    unsynced.sync_folder(folder)
    with suppress(PermissionError):
        unsynced.sync_folder(folder.parent)


def refuse_damage(file: Path) -> bool:
    """Raise ``Damaged`` where LMDB would crash; whether the file ends before its last page."""
    from kvkeep.persistence.pages import check_pages

    try:
        found = check_pages(file, OPENING_PAGES, skim=SKIMMED_PAGES)
    except FileNotFoundError:
        return False
    if found.faults:
        raise Damaged(f"{file}: {found.faults[0]}", remedy=REBUILD)
    return found.short


def _lengthen(env: lmdb.Environment, file: Path) -> None:
    """Give pages that were never written their place, so that the next opening is quick."""
    with suppress(OSError, lmdb.Error), env.begin(write=True):
        # Nobody else writes now, and nobody maps less than the whole map.
        end = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if file.stat().st_size < end:
            os.truncate(file, end)


def _tighten(folder: Path) -> None:
    """Take away what group and others may do to the store, where this user owns it."""
    for path in (folder, folder / DATA_FILE, folder / LOCK_FILE):
        status = path.stat()
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            path.chmod(status.st_mode & 0o700)
