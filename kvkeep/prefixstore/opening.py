"""The marker of a store: what its folder was laid out for, written once."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError, NotAStore, StoreExposed, StoreReadOnly, StoreTooNew
from kvkeep.persistence.lmdb_errors import translate_opening
from kvkeep.persistence.unsynced import sync_folder, sync_path
from kvkeep.prefixstore.layout import FORMAT
from kvkeep.prefixstore.sizes import format_size

MARKER = "store.json"
UNFINISHED = "store.json.new-*"
DEFAULT_BUDGET = 64 << 30
MAP_HEADROOM = 4
MAP_MINIMUM = 64 << 30


@dataclass(frozen=True)
class Marker:
    """The size of LMDB's map, fixed for the store's life, and the budget it was made with."""

    map_bytes: int
    budget: int

    def check(self, budget: int) -> None:
        """Refuse a budget that the map could not hold, with room for pages in between."""
        if budget > self.map_bytes // 2:
            raise KvkeepError(
                f"This store was laid out for at most {format_size(self.map_bytes // 2)}, "
                f"and {format_size(budget)} are asked for",
                remedy="Name a smaller budget (--max-bytes, max_bytes), or make a new store.",
            )


def find_or_make(
    folder: Path, budget: int | None, *, read_only: bool, shared: bool = False
) -> Marker:
    """The marker of the store in ``folder``; a new or empty folder becomes one.

    Unless it is ``shared``, refuses a folder of another user, and a store that others may
    write: who can change it decides what a model is told. An empty folder of this user is
    simply closed to others, and one above it that all may write, such as ``/tmp``, is fine.
    Raises ``NotAStore``, ``StoreTooNew``, ``StoreReadOnly`` or ``StoreExposed``;
    nothing half-made is left.
    """
    file = folder / MARKER
    try:
        if not shared and folder.exists():
            _refuse_exposed(folder)
        if file.exists():
            return _read(file)
        if folder.exists() and not folder.is_dir():
            raise NotAStore(f"{folder} is a file")
        if folder.exists() and any(not f.match(UNFINISHED) for f in folder.iterdir()):
            if file.exists():  # another process was just now making it
                return _read(file)
            raise NotAStore(f"{folder} holds other files and no {MARKER}")
        if read_only:
            raise NotAStore(f"{folder} holds no store")
        folder.mkdir(mode=0o770 if shared else 0o700, parents=True, exist_ok=True)
        return _make(file, budget, 0o660 if shared else 0o600)
    except PermissionError as error:
        raise StoreReadOnly(f"{error.filename} cannot be used: {error.strerror}") from error
    except OSError as error:
        raise translate_opening(error, folder) from error


def _refuse_exposed(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise StoreExposed(f"{folder} belongs to user {status.st_uid}")
    if status.st_mode & 0o022 and (folder / MARKER).exists():
        mode = stat.S_IMODE(status.st_mode)
        raise StoreExposed(f"Others may write {folder} (mode {mode:04o})")


def _read(file: Path) -> Marker:
    try:
        found = json.loads(file.read_text("utf-8"))
        version = int(found["kvkeep"])
        if version > FORMAT:  # and whatever else it says is not for us to read
            raise StoreTooNew(
                f"{file.parent} has store format {version}; this kvkeep reads {FORMAT}"
            )
        marker = Marker(int(found["map_bytes"]), int(found["budget"]))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise NotAStore(f"{file} does not describe a kvkeep store") from error
    if not 0 < marker.budget <= marker.map_bytes <= 1 << 46:
        raise NotAStore(f"{file} names sizes that no store has")
    return marker


def _make(file: Path, budget: int | None, mode: int) -> Marker:
    if budget is None:
        disk = os.statvfs(file.parent)
        budget = min(DEFAULT_BUDGET, disk.f_bavail * disk.f_frsize // 2)
    marker = Marker(max(MAP_MINIMUM, MAP_HEADROOM * budget), budget)
    fields: dict[str, Any] = {"kvkeep": FORMAT, **vars(marker)}
    made = file.with_name(UNFINISHED.replace("*", str(os.getpid())))
    made.write_text(json.dumps(fields, indent=1) + "\n", "utf-8")
    made.chmod(mode)
    sync_path(made)  # a power loss leaves all of it or nothing
    try:
        os.link(made, file)
    except FileExistsError:
        return _read(file)
    except OSError:  # a file system without links
        made.replace(file)
    finally:
        made.unlink(missing_ok=True)
    sync_folder(file.parent)
    return marker
