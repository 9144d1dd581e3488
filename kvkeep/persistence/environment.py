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

import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb

from kvkeep.errors import Damaged, StoreClosed, StoreInUse, StoreReadOnly, StoreUnusable
from kvkeep.persistence import power, unsynced
from kvkeep.persistence.disk import parallel_reads
from kvkeep.persistence.lmdb_errors import translate, translate_opening, translated

if TYPE_CHECKING:
    from kvkeep.persistence.pages import PageCheck

    _Inner = lmdb.Transaction[memoryview]

DATA_FILE = "data.mdb"
LOCK_FILE = power.LOCK_FILE
MAX_READERS = 512
MAX_DATABASES = 64
ZEROS = 1 << 20
COPY = "compact-"
OPENING_PAGES = 512
"""Pages that are checked before LMDB may look at a file; about 25 microseconds each."""

SKIMMED_PAGES = 1 << 16
"""Pages after these whose heads are looked at; 2 or 3 microseconds each."""

CHECK_TRIES = 20
REBUILD = "Remove the folder and let it fill again, or put a copy of it back."


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
            flags = _Flags(map_size, read_only, mode, durable, ours)
            self._shared = _acquire(self.folder, databases, flags)
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
            if write and self._shared.file != _identity(self.folder / DATA_FILE):
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
            txn = Transaction(inner, self._shared.databases, self.folder, write)
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
                    _zero(fd, start, length)
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
            _release(self._shared)
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

    def __init__(self, inner: _Inner, databases: dict[str, Any], folder: Path, write: bool) -> None:
        self._inner: _Inner | None = inner
        self._databases = databases
        self._folder = folder
        self._write = write
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
        db = self._databases[database]
        if database not in self._ready and db is not None:
            # LMDB reads the root on first use, which two threads must not do at once.
            with self._lock, translated(self._folder):
                txn.stat(db)
                self._ready.add(database)
        return txn, db


def _zero(fd: int, start: int, length: int) -> None:
    zeros = memoryview(bytes(min(length, ZEROS)))
    while length > 0:
        written = os.pwrite(fd, zeros[:length], start)
        start, length = start + written, length - written


def compact(folder: str | os.PathLike[str], *, wipe: bool = False) -> tuple[int, int]:
    """Rewrite the data file without its free pages; its bytes before and after.

    ``wipe`` overwrites the old file with zeros before it goes. The disk must have room for
    what is kept a second time. Raises ``StoreInUse`` where this or another process has the
    store open, and ``StoreUnusable`` or ``Damaged`` as opening does.
    """
    path = Path(folder)
    with _registry_lock:
        # First: closing the lock file would take this process's own locks with it.
        if os.path.realpath(path) in _registry:
            raise StoreInUse(f"{folder}: open in this process")
        with translated(path), power.alone(path):
            return _compact(path, wipe)


def _compact(folder: Path, wipe: bool) -> tuple[int, int]:
    old = folder / DATA_FILE
    power.refuse_lost(old)
    _refuse_damage(old)
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
                _zero(file.fileno(), 0, before)
                unsynced.sync_file(file.fileno())
        return before, old.stat().st_size


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write to the disk of ``folder``, which need not exist yet."""
    path = Path(folder).absolute()
    with translated(path):
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free


_NOTHING = memoryview(b"")


class _Flags(NamedTuple):
    """How an environment is opened; the first handle of a process says it for all."""

    map_size: int
    read_only: bool
    mode: int
    durable: bool | None
    ours: bool


class _Shared:
    """One open environment of this process, and who uses it."""

    def __init__(
        self, env: lmdb.Environment, data_file: Path, *, read_only: bool, durable: bool
    ) -> None:
        self.env: lmdb.Environment | None = env
        self.data_file = data_file
        self.file = _identity(data_file)
        self.read_only = read_only
        self.durable = durable
        self.databases: dict[str, Any] = {}
        self.handles = 0
        self._idle = threading.Condition()
        self._holders: dict[int, int] = {}
        self._write_lock = threading.Lock()
        self._writer: int | None = None

    @contextmanager
    def used(self, write: bool) -> Iterator[None]:
        """Keep the environment open; let one thread write, once."""
        me = threading.get_ident()
        if write and self._writer == me:
            raise RuntimeError("This thread holds a write transaction already")
        with self._idle:
            self._holders[me] = self._holders.get(me, 0) + 1
        try:
            if write:
                with self._write_lock:
                    self._writer = me
                    try:
                        yield
                    finally:
                        self._writer = None
            else:
                yield
        finally:
            with self._idle:
                self._holders[me] -= 1
                if not self._holders[me]:
                    del self._holders[me]
                    self._idle.notify_all()

    def open_databases(self, names: Sequence[str]) -> None:
        """Open the databases ``names``; make those that are missing, unless read-only."""
        missing = [name for name in names if self.databases.get(name) is None]
        if not missing or self.env is None:
            return
        if self.read_only:
            for name in missing:
                self.databases[name] = None
                with suppress(lmdb.NotFoundError):
                    self.databases[name] = self.env.open_db(name.encode(), create=False)
            return
        with self.used(write=True), self.env.begin(write=True) as txn:
            opened = {name: self.env.open_db(name.encode(), txn) for name in missing}
        self.databases.update(opened)

    def wait_until_idle(self) -> None:
        """Return once no thread is inside a transaction."""
        with self._idle:
            self._idle.wait_for(lambda: not self._holders)

    def close(self) -> None:
        """Close for good; nobody holds a handle."""
        env, self.env = self.env, None
        if env is not None:
            env.close()
            if not self.durable and not self.read_only:
                power.let_go(self.data_file)

    def check_outside(self) -> None:
        """Raise ``RuntimeError`` where this thread is inside a transaction."""
        if threading.get_ident() in self._holders:
            raise RuntimeError("A store cannot be closed inside a transaction")


_registry: dict[str, _Shared] = {}
_registry_lock = threading.Lock()


def _acquire(folder: Path, names: Sequence[str], flags: _Flags) -> _Shared:
    key = os.path.realpath(folder)
    with _registry_lock:
        shared = _registry.get(key)
        if shared is not None and shared.file != _identity(folder / DATA_FILE):
            shared = None  # that file was removed; those who have it open keep it
        if shared is None:
            shared = _open_shared(key, flags)
        elif flags.durable and not shared.durable and not flags.read_only:
            raise StoreUnusable(
                f"{folder}: open in this process without protection from power loss",
                remedy="Close that handle first, or open this one with the same durability.",
            )
        elif shared.read_only and not flags.read_only:
            raise StoreUnusable(
                f"{folder}: open for reading only in this process",
                remedy="Close that handle before the store is opened for writing.",
            )
        try:
            shared.open_databases(names)
        except BaseException:
            if not shared.handles:
                shared.close()
            raise
        shared.handles += 1
        _registry[key] = shared
        return shared


def _identity(file: Path) -> tuple[int, int]:
    """What tells a file from another one of the same name; zeros for none."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_dev, status.st_ino


def _release(shared: _Shared) -> None:
    with _registry_lock:
        shared.handles -= 1
    if shared.handles:
        return
    # Not under the lock: a transaction that is waited for may itself open another store.
    shared.wait_until_idle()
    with _registry_lock:
        if not shared.handles:
            for key in [key for key, other in _registry.items() if other is shared]:
                del _registry[key]
            shared.close()


def _open_shared(folder: str, flags: _Flags) -> _Shared:
    file = Path(folder) / DATA_FILE
    if flags.read_only:
        file.stat()  # LMDB would make one
        power.refuse_lost(file)
        env = _open_lmdb(file, flags, sync=True)
        return _Shared(env, file, read_only=True, durable=not unsynced.is_marked(file.parent))
    os.makedirs(folder, mode=flags.mode, exist_ok=True)  # noqa: PTH103
    mode = flags.mode & 0o666
    for _ in range(power.TRIES):
        power.begin_anew(file, mode, empty=flags.ours)
        durable = power.settle(file, flags.durable, mode)
        env = _open_lmdb(file, flags, sync=durable)
        # From here on nobody is alone with the store, so it stays as it is.
        if durable != unsynced.is_marked(file.parent):
            return _Shared(env, file, read_only=False, durable=durable)
        env.close()
    raise StoreInUse(f"{folder}: others open and close it all the time")


def _open_lmdb(file: Path, flags: _Flags, *, sync: bool) -> lmdb.Environment:
    folder = str(file.parent)
    options: dict[str, Any] = {
        "map_size": flags.map_size,
        "max_dbs": MAX_DATABASES,
        "max_readers": MAX_READERS,
        "metasync": False,
        "sync": sync,
        "mode": flags.mode,
    }
    short = _refuse_damage(file)
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


def _refuse_damage(file: Path) -> bool:
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


def _forget() -> None:
    """After a fork: drop the parent's environments unclosed, for closing would end its readers."""
    global _registry_lock
    _registry_lock = threading.Lock()
    for shared in _registry.values():
        shared.env = None
        shared.databases.clear()
    _registry.clear()


os.register_at_fork(after_in_child=_forget)
