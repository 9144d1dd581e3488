"""What a power loss may cost a store: settled anew whenever a process opens it.

A store is protected or it is not, whoever writes to it: one process that does not wait for the
disk takes the protection from all. So the mark (see ``unsynced``) is put there and taken away
only by a process that is alone with the store, and holds for everyone who opens it meanwhile.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvkeep.errors import Damaged, StoreInUse, StoreUnusable
from kvkeep.persistence import unsynced

LOCK_FILE = "lock.mdb"
TRIES, PAUSE = 500, 0.01


@contextmanager
def alone(folder: Path, mode: int = 0o600) -> Iterator[None]:
    """Hold LMDB's own lock, alone: whoever opens the store now waits until the block ends.

    Not while this process has the store open: closing the lock file takes its locks with it.
    Raises ``StoreInUse``.
    """
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except (BlockingIOError, PermissionError) as error:
            raise StoreInUse(f"{folder}: another process has it open") from error
        yield
    finally:
        os.close(fd)


def begin_anew(file: Path, mode: int, *, empty: bool) -> None:
    """Remove a data file that a power loss left without protection.

    With ``empty`` also one that was cut off before anything was committed. Raises
    ``StoreInUse``.
    """
    for _ in range(TRIES):
        if not _is_useless(file, empty):
            return
        with suppress(StoreInUse), alone(file.parent, mode):
            if _is_useless(file, empty):
                file.unlink(missing_ok=True)
                unsynced.clear(file.parent)
            return
        time.sleep(PAUSE)  # another process is making it, or removes it as well
    raise StoreInUse(f"{file.parent}: another process has it open")


def refuse_lost(file: Path) -> None:
    """Raise ``Damaged`` where the machine went down while the store was not protected."""
    if unsynced.is_lost(file.parent):
        raise Damaged(
            f"{file}: the machine went down while this store was not protected",
            remedy="Open it for writing, which begins it anew, or put a copy of it back.",
        )


def settle(file: Path, durable: bool | None, mode: int) -> bool:
    """Whether this process is to flush what it commits; put the mark there, or take it away.

    ``None`` asks for it unless other processes go without. Others that are protected stay so,
    and then this one is as well. To be asked again where, once the store is open,
    ``is_marked`` says otherwise. Raises ``StoreUnusable`` where others go without and
    ``durable`` is set.
    """
    folder, marked = file.parent, unsynced.is_marked(file.parent)
    if marked != (durable is not False):
        return not marked
    try:
        with alone(folder, mode):
            if durable is False:
                return not unsynced.mark(folder, mode)
            unsynced.sync_path(file)
            unsynced.clear(folder)
            return True
    except StoreInUse as error:
        if durable:
            raise StoreUnusable(
                f"{folder}: another process has it open without protection from power loss",
                remedy="Close it there first, or open it here with the same durability.",
            ) from error
        return not marked


def let_go(file: Path) -> None:
    """Take the mark away after closing, where nobody else has the store open."""
    with suppress(StoreInUse, OSError), alone(file.parent):
        unsynced.sync_path(file)  # others may have written since this process synced
        unsynced.clear(file.parent)


def _is_useless(file: Path, empty: bool) -> bool:
    return unsynced.is_lost(file.parent) or (empty and holds_nothing(file))


def holds_nothing(file: Path) -> bool:
    """Whether a file is too short for any commit, and not even that is whole."""
    from kvkeep.persistence.pages import check_pages

    try:
        if not 0 < file.stat().st_size <= 2 * mmap.PAGESIZE:
            return False
        found = check_pages(file)
        return bool(found.faults) or found.transaction is None
    except FileNotFoundError:
        return False
