"""The environments that this process has open: one for each file, however many handles it has."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb

from kvkeep.errors import StoreInUse, StoreUnusable
from kvkeep.persistence import power, unsynced
from kvkeep.persistence.opening import DATA_FILE, Flags, open_lmdb


class Shared:
    """One open environment of this process, and who uses it."""

    def __init__(
        self, env: lmdb.Environment, data_file: Path, *, read_only: bool, durable: bool
    ) -> None:
        self.env: lmdb.Environment | None = env
        self.data_file = data_file
        self.file = identity(data_file)
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


_registry: dict[str, Shared] = {}
_registry_lock = threading.Lock()


def acquire(folder: Path, names: Sequence[str], flags: Flags) -> Shared:
    """One more handle on the environment of ``folder``, which is opened or shared.

    Raises ``StoreUnusable``, ``Damaged``, ``lmdb.Error`` or ``OSError``.
    """
    key = os.path.realpath(folder)
    with _registry_lock:
        shared = _registry.get(key)
        if shared is not None and shared.file != identity(folder / DATA_FILE):
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


def release(shared: Shared) -> None:
    """Give a handle back; the last one closes the environment once nobody is inside it."""
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


@contextmanager
def kept_closed(folder: Path) -> Iterator[None]:
    """Have nobody in this process open the store inside the block. Raises ``StoreInUse``."""
    with _registry_lock:
        if os.path.realpath(folder) in _registry:
            raise StoreInUse(f"{folder}: open in this process")
        yield


def _open_shared(folder: str, flags: Flags) -> Shared:
    file = Path(folder) / DATA_FILE
    if flags.read_only:
        file.stat()  # LMDB would make one
        power.refuse_lost(file)
        env = open_lmdb(file, flags, sync=True)
        return Shared(env, file, read_only=True, durable=not unsynced.is_marked(file.parent))
    os.makedirs(folder, mode=flags.mode, exist_ok=True)  # noqa: PTH103
    mode = flags.mode & 0o666
    for _ in range(power.TRIES):
        power.begin_anew(file, mode, empty=flags.ours)
        durable = power.settle(file, flags.durable, mode)
        env = open_lmdb(file, flags, sync=durable)
        # From here on nobody is alone with the store, so it stays as it is.
        if durable != unsynced.is_marked(file.parent):
            return Shared(env, file, read_only=False, durable=durable)
        env.close()
    raise StoreInUse(f"{folder}: others open and close it all the time")


def identity(file: Path) -> tuple[int, int]:
    """What tells a file from another one of the same name; zeros for none."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_dev, status.st_ino


def _forget() -> None:
    """After a fork: drop the parent's environments unclosed, for closing would end its readers."""
    global _registry_lock
    _registry_lock = threading.Lock()
    for shared in _registry.values():
        shared.env = None
        shared.databases.clear()
    _registry.clear()


os.register_at_fork(after_in_child=_forget)
