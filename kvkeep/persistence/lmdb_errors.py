"""What LMDB and the operating system report, in the terms of ``kvkeep.errors``.

"Busy", "no memory" and "disk full" are never reported as damage.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from kvkeep.errors import (
    Damaged,
    KvkeepError,
    NotAStore,
    StoreClosed,
    StoreFull,
    StoreReadOnly,
    StoreTooNew,
    StoreUnusable,
)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_HANDLES = {errno.EMFILE, errno.ENFILE}
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
_DAMAGE = (
    "CorruptedError",
    "PageNotFoundError",
    "PanicError",
    "InvalidError",
    "BadChecksumError",
    "BadTxnError",  # what follows an error that was damage, in the same transaction
)


@contextmanager
def translated(folder: Path) -> Iterator[None]:
    """Raise LMDB's and the system's errors of the block as ours, naming the store."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise translate(error, folder) from error


def translate(error: lmdb.Error | OSError, folder: Path) -> KvkeepError:
    """Our error for ``error``, which came up while the store in ``folder`` was in use."""
    number = _number(error)
    name = type(error).__name__
    if isinstance(error, lmdb.MapFullError):
        return StoreFull(f"{folder}: the store has reached the size that it was laid out for")
    if number in _FULL or isinstance(error, lmdb.DiskError):
        return StoreFull(f"{folder}: the disk is full, or this user's share of it")
    if number == errno.EIO:
        # What LMDB reports where the disk took only a part of a write.
        return StoreFull(f"{folder}: the disk is full, or it is failing ({error})")
    if number in _FORBIDDEN or isinstance(error, lmdb.ReadonlyError):
        return StoreReadOnly(f"{folder}: no permission ({error})")
    if isinstance(error, lmdb.VersionMismatchError):
        return StoreTooNew(f"{folder}: written by another version of LMDB")
    if name in _DAMAGE:
        return Damaged(f"{folder}: the store's pages are damaged ({error})")
    if isinstance(error, lmdb.MapResizedError):
        return StoreUnusable(
            f"{folder}: another process enlarged the store", remedy="Close it and open it again."
        )
    if isinstance(error, lmdb.ReadersFullError):
        return StoreUnusable(
            f"{folder}: every reader slot is taken", remedy="Stop processes that read this store."
        )
    if number == errno.ENOMEM or isinstance(error, lmdb.MemoryError):
        return StoreUnusable(
            f"{folder}: no memory or address space",
            remedy="Free memory, raise `ulimit -v`, or make a store with a smaller max_bytes.",
        )
    if number in _HANDLES:
        return StoreUnusable(
            f"{folder}: too many open files", remedy="Close some, or raise `ulimit -n`."
        )
    if number in _ABSENT:
        return NotAStore(f"{folder}: no store is there")
    if "closed/deleted/dropped" in str(error):
        return StoreClosed(f"{folder}: the store or the transaction is closed")
    return StoreUnusable(f"{folder}: {error}", remedy="Try again; the store was not changed.")


def _number(error: lmdb.Error | OSError) -> int | None:
    """The system's error number; py-lmdb before 2 has it only as the text at the end."""
    if isinstance(error, OSError):
        return error.errno
    code = getattr(error, "code", None)
    if code is not None:
        return int(code)
    text = str(error)
    return next((n for n in errno.errorcode if text.endswith(f": {os.strerror(n)}")), None)


def translate_opening(error: lmdb.Error | OSError, folder: Path) -> KvkeepError:
    """Our error for ``error``, which came up while the store in ``folder`` was being opened."""
    if isinstance(error, lmdb.InvalidError):
        return NotAStore(f"{folder}: data.mdb is not an LMDB file")
    if isinstance(error, NotADirectoryError | FileExistsError):
        return NotAStore(f"{folder}: is a file, or lies below one")
    if "already open in this process" in str(error):
        return StoreUnusable(
            f"{folder}: a thread was using the store while this process was forked from it",
            remedy="Start workers with the spawn method, or fork before the store is opened.",
        )
    return translate(error, folder)
