"""Opening a store that is there already: a mistyped folder is no new store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.errors import NotAStore, StoreReadOnly

if TYPE_CHECKING:
    from kvkeep.prefixstore.store import Store

REMEDY = (
    "Name the folder of a store with --store or KVKEEP_STORE; "
    "`kvkeep snapshot` and `kvkeep serve` make new ones."
)


def is_there(folder: Path) -> bool:
    """Whether somebody made a store in ``folder``."""
    from kvkeep.prefixstore.opening import MARKER

    try:
        return (folder.expanduser() / MARKER).exists()
    except OSError:
        return False


def open_existing(folder: Path, *, read_only: bool = True, eviction: str | None = None) -> Store:
    """The store in ``folder``; never a new one. Raises ``StoreUnusable`` or ``Damaged``."""
    from kvkeep.prefixstore.store import open_store

    try:
        # Read-only, a folder without a store is refused and left as it is.
        reading = read_only or not is_there(folder)
        return open_store(folder, read_only=reading, eviction=eviction)
    except NotAStore as error:
        raise NotAStore(error.problem, remedy=REMEDY) from error


def open_to_resume(folder: Path) -> Store:
    """The store in ``folder``, or a new one; read-only where this user may only read it.

    Lookups are not counted then. Raises ``StoreUnusable`` or ``Damaged``.
    """
    from kvkeep.prefixstore.store import open_store

    try:
        return open_store(folder)
    except StoreReadOnly:
        if not is_there(folder):
            raise
        return open_store(folder, read_only=True)
