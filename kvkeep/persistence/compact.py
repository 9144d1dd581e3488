"""Rewriting a data file without its free pages."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import lmdb

from kvkeep.persistence import power, unsynced
from kvkeep.persistence.disk import overwrite
from kvkeep.persistence.lmdb_errors import translated
from kvkeep.persistence.opening import COPY, DATA_FILE, refuse_damage
from kvkeep.persistence.shared import kept_closed


def compact(folder: str | os.PathLike[str], *, wipe: bool = False) -> tuple[int, int]:
    """Rewrite the data file without its free pages; its bytes before and after.

    ``wipe`` overwrites the old file with zeros before it goes. The disk must have room for
    what is kept a second time. Raises ``StoreInUse`` where this or another process has the
    store open, and ``StoreUnusable`` or ``Damaged`` as opening does.
    """
    path = Path(folder)
    # First: closing the lock file would take this process's own locks with it.
    with kept_closed(path), translated(path), power.alone(path):
        return _compact(path, wipe)


def _compact(folder: Path, wipe: bool) -> tuple[int, int]:
    old = folder / DATA_FILE
    power.refuse_lost(old)
    refuse_damage(old)
    with tempfile.TemporaryDirectory(prefix=COPY, dir=folder) as made:
        new = Path(made) / DATA_FILE
        env = lmdb.open(str(folder), readonly=True, create=False, lock=False)
        try:
            env.copy(made, compact=True)
        finally:
            env.close()
        new.chmod(old.stat().st_mode & 0o777)
        unsynced.sync_path(new)
        before = old.stat().st_size
        with old.open("r+b") as file:
            new.replace(old)
            unsynced.clear(folder)
            if wipe:
                overwrite(file.fileno(), 0, before)
                unsynced.sync_file(file.fileno())
        return before, old.stat().st_size
