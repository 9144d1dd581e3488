"""The LMDB environment of a store: opened once per process, private, safe at power loss.

LMDB must not be opened twice in one process, and an environment must not be used after a fork.
So handles on the same folder share one environment, counted, and each handle remembers its
process.

A commit flushes its pages (``metasync=False``: not the page that names the last commit).
After a power loss the store is intact, but the very last commit may be undone; ``sync`` closes
that gap. With ``durable=False`` nothing is flushed before the last handle closes: the end of a
process costs nothing. After that of the machine the store is begun anew.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from kvkeep.errors import StoreClosed, StoreReadOnly, StoreUnusable
from kvkeep.persistence import unsynced
from kvkeep.persistence.disk import overwrite, parallel_reads, reserve
from kvkeep.persistence.lmdb_errors import translate, translate_opening, translated
from kvkeep.persistence.opening import DATA_FILE, Flags
from kvkeep.persistence.shared import Shared, acquire, identity, release

if TYPE_CHECKING:
    from kvkeep.persistence.pages import PageCheck

    _Inner = lmdb.Transaction[memoryview]

CHECK_TRIES = 20
LARGE = 1 << 20
"""Bytes of a value that the file most likely grows for."""

PAGES_BESIDE = 64 << 10
"""Bytes of the pages that a transaction writes beside a large value."""


class Environment:
    """A handle on the store in a folder. Usable from several threads; a context manager.

    ``map_size`` bytes of address space bound the file; the first handle of a process fixes it.
    ``databases`` are made where missing. The folder is made with mode 0700, its files with
    0600, and those of an existing store are tightened where this user owns them.

    With ``shared`` the group may read and write as well: modes 0770 and 0660 for what is made,
    and nothing is tightened.

    ``durable`` waits for the disk at every commit; ``None`` does, unless another process has
    the store open without. Where others do, so does this one, whatever it was told.

    ``ours`` says that the folder is known to be a store: a file that a power loss left before
    anything was committed is then begun anew.

    ``read_only`` changes nothing. Where not even the lock file may be written it reads without
    locks: then no other process may write at the same time.

    The pages next to the roots are checked first, because LMDB would crash on some of them;
    all of them where the file ends early. Of tens of thousands more it looks at the heads. See
    ``check`` for the rest.

    Raises ``NotAStore``, ``StoreReadOnly``, ``StoreFull`` or another ``StoreUnusable``, or
    ``Damaged`` where the file is cut off or a page is not as it should be.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        map_size: int,
        databases: Sequence[str],
        read_only: bool = False,
        shared: bool = False,
        durable: bool | None = True,
        ours: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.read_only = read_only
        self._pid = os.getpid()
        self._closed = False
        try:
            mode = 0o770 if shared else 0o700
            flags = Flags(map_size, read_only, mode, durable, ours)
            self._shared = acquire(self.folder, databases, flags)
        except (lmdb.Error, OSError) as error:
            raise translate_opening(error, self.folder) from error

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether this handle is open and this is the process that opened it."""
        return not self._closed and self._pid == os.getpid()

    @property
    def durable(self) -> bool:
        """Whether what is committed is protected from a power loss."""
        return self._shared.durable

    @property
    def map_size(self) -> int:
        """Bytes that the file may grow to."""
        with translated(self.folder):
            return int(self._open().info()["map_size"])

    @contextmanager
    def begin(self, write: bool = False) -> Iterator[Transaction]:
        """A transaction, committed at the end of the block, undone if the block raises.

        Waits for other writers. A thread may hold one write transaction, and must end it itself.
        Raises ``StoreClosed``, ``StoreReadOnly``, ``StoreFull`` or another ``StoreUnusable``,
        among others for writing to a file that was removed meanwhile.
        """
        if write and self.read_only:
            raise StoreReadOnly(f"{self.folder}: opened for reading only")
        self._open()
        with self._shared.used(write):
            env = self._open()
            if write and self._shared.file != identity(self.folder / DATA_FILE):
                raise StoreUnusable(
                    f"{self.folder}: the store was removed or replaced while it was open",
                    remedy="Close it and open it again.",
                )
            try:
                if write:
                    # A killed reader's slot would keep every page from being used again.
                    env.reader_check()
                inner = env.begin(write=write, buffers=True)
            except lmdb.Error as error:
                raise translate(error, self.folder) from error
            txn = Transaction(inner, self._shared, self.folder, write)
            try:
                yield txn
            except BaseException:
                txn.end()
                if self._pid == os.getpid():
                    inner.abort()
                raise
            txn.end()
            if self._pid == os.getpid():
                with translated(self.folder):
                    inner.commit()

    def sync(self) -> None:
        """Return once every commit so far survives a power loss, where the store is durable."""
        self._open()
        if not self._shared.durable:
            return
        with self._shared.used(write=False), translated(self.folder):
            self._open().sync(True)

    def free_bytes(self) -> int:
        """Bytes that this user may still write to the store's disk."""
        return free_bytes(self.folder)

    def file_bytes(self) -> int:
        """Bytes of the data file."""
        with translated(self.folder):
            return (self.folder / DATA_FILE).stat().st_size

    def check(self) -> PageCheck:
        """Check every page of the state that is committed now, without LMDB's help.

        Not ``complete`` where other processes committed so often that none held still.
        """
        from kvkeep.persistence.pages import PageCheck, check_pages

        found = PageCheck()
        for _ in range(CHECK_TRIES):
            with self._shared.used(write=False), translated(self.folder):
                held = self._open().begin()
                try:
                    file = self.folder / DATA_FILE
                    found = check_pages(file, deep=True, held=held.id())
                finally:
                    held.abort()
            if found.transaction is not None:
                break
        return found

    def wipe(self) -> int:
        """Overwrite with zeros what the file holds beside the committed state; bytes written.

        Deleting only marks pages as free. Pages of states that a reader still holds stay, and
        so do those that the last two commits freed: LMDB may have to go back to these.
        Raises ``Damaged`` where the pages are not sound; then nothing was written.
        """
        from kvkeep.persistence.pages import unused_spans

        file = self.folder / DATA_FILE
        with self.begin(write=True), translated(self.folder):
            env = self._open()
            env.sync(True)
            readers = [line.split()[-1] for line in env.readers().splitlines()]
            held = [int(number) for number in readers if number.isdecimal()]
            spans = unused_spans(file, min([int(env.info()["last_txnid"]), *held]))
            fd = os.open(file, os.O_WRONLY)
            try:
                for start, length in spans:
                    overwrite(fd, start, length)
                unsynced.sync_file(fd)
            finally:
                os.close(fd)
        return sum(length for _, length in spans)

    def close(self) -> None:
        """Give the handle back; the last one waits for transactions of other threads, and closes.

        Closing twice is fine, and closing in a forked child leaves the parent's store alone.
        Raises ``RuntimeError`` inside a transaction of this thread.
        """
        if self.usable:
            self._shared.check_outside()
            self._closed = True
            release(self._shared)
        self._closed = True

    def _open(self) -> lmdb.Environment:
        env = self._shared.env
        if not self.usable or env is None:
            where = "closed" if self._closed else "opened by a parent process"
            raise StoreClosed(f"{self.folder}: this store is {where}")
        return env


class Transaction:
    """Reads and writes by database name. Keys and values are bytes-like.

    What ``get`` and ``items`` return lies in LMDB's map: it is valid until the transaction
    ends and, in a write transaction, only until the next write. A read transaction may be
    read from by several threads at once.
    """

    def __init__(self, inner: _Inner, shared: Shared, folder: Path, write: bool) -> None:
        self._inner: _Inner | None = inner
        self._shared = shared
        self._folder = folder
        self._write = write
        self._reserved = 0
        self._ready: set[str] = set()
        self._lock = threading.Lock()

    def get(self, database: str, key: Any) -> memoryview | None:
        """The value of ``key``, not copied; ``None`` where there is none."""
        txn, db = self._use(database)
        try:
            return txn.get(key, None, db) if db is not None else None
        except lmdb.Error as error:
            raise translate(error, self._folder) from error

    def put(self, database: str, key: Any, value: Any, *, append: bool = False) -> None:
        """Write ``value``, replacing another. ``append``: the key is most likely the highest."""
        txn, db = self._use(database)
        try:
            if self._write and len(value) >= LARGE:
                self._reserve(len(value) + PAGES_BESIDE)
            if not append or not txn.put(key, value, db=db, append=True):
                txn.put(key, value, db=db)
        except lmdb.Error as error:
            raise translate(error, self._folder) from error

    def delete(self, database: str, key: Any) -> bool:
        """Delete ``key``; whether it was there."""
        txn, db = self._use(database)
        try:
            return txn.delete(key, db=db)
        except lmdb.Error as error:
            raise translate(error, self._folder) from error

    def count(self, database: str) -> int:
        """How many keys there are."""
        txn, db = self._use(database)
        try:
            return txn.stat(db)["entries"] if db is not None else 0
        except lmdb.Error as error:
            raise translate(error, self._folder) from error

    def keys(self, database: str, *, prefix: bytes = b"", start: bytes = b"") -> Iterator[bytes]:
        """The keys from ``start`` on that begin with ``prefix``, sorted. List them to write."""
        return (key for key, _ in self._scan(database, prefix, start, values=False))

    def items(
        self, database: str, *, prefix: bytes = b"", start: bytes = b""
    ) -> Iterator[tuple[bytes, memoryview]]:
        """As ``keys``, with the values; in a write transaction the values are copies."""
        return self._scan(database, prefix, start, values=True)

    def file_bytes(self) -> int:
        """Bytes of the data file, which hold all values."""
        with translated(self._folder):
            return (self._folder / DATA_FILE).stat().st_size

    @property
    def parallel_reads(self) -> int:
        """How many large values to read at once."""
        return parallel_reads(self._folder)

    def end(self) -> None:
        """Let go of LMDB's transaction, which whoever began it commits or aborts."""
        self._inner = None

    def _reserve(self, nbytes: int) -> None:
        """Blocks for so many bytes more, from where the file ended when this began."""
        env = self._shared.env
        if env is None:
            return
        end = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        reserve(self._folder / DATA_FILE, end + self._reserved, nbytes)
        self._reserved += nbytes

    def _scan(
        self, database: str, prefix: bytes, start: bytes, *, values: bool
    ) -> Iterator[tuple[bytes, memoryview]]:
        txn, db = self._use(database)
        if db is None:
            return
        first = max(prefix, start)
        try:
            with txn.cursor(db=db) as cursor:
                found = cursor.set_range(first) if first else cursor.first()
                while found:
                    key = bytes(cursor.key())
                    if not key.startswith(prefix):
                        return
                    value = cursor.value() if values else _NOTHING
                    yield key, memoryview(bytes(value)) if self._write else value
                    found = cursor.next()
        except lmdb.Error as error:
            raise translate(error, self._folder) from error

    def _use(self, database: str) -> tuple[_Inner, Any]:
        """LMDB's transaction, and the handle of ``database`` with its root page read.

        The handle is ``None`` where a store opened for reading only lacks the database.
        """
        txn = self._inner
        if txn is None:
            raise StoreClosed(f"{self._folder}: this transaction has ended")
        db = self._shared.databases[database]
        if database not in self._ready and db is not None:
            # LMDB reads the root on first use, which two threads must not do at once.
            with self._lock, translated(self._folder):
                txn.stat(db)
                self._ready.add(database)
        return txn, db


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write to the disk of ``folder``, which need not exist yet."""
    path = Path(folder).absolute()
    with translated(path):
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free


_NOTHING = memoryview(b"")
