"""Situations in which a machine has nothing left to give; each runs in a process of its own.

    python -m tests.faults.limits CASE FOLDER

A case stores something, takes the resource away, stores and resumes, gives it back, stores and
resumes again. It fails by an assertion, and says ``done`` at its end.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx

import kvkeep
from kvkeep.errors import StoreReadOnly, StoreUnusable
from tests.faults import light
from tests.faults.rows import caches, tokens_of, wrong
from tests.faults.sigkill import recount

KIND = "recurrent"
MIB = 1 << 20


@contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """A resource limit for the time of the block."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


class Shop:
    """A store, and what was stored in it."""

    def __init__(self, folder: Path) -> None:
        self.store = kvkeep.open(folder, max_bytes="40MB", disk_reserve=1)
        self.space = self.store.space(identity={"rows": KIND}, layout=caches(KIND, ()))
        self.kept: list[int] = []
        self.next = 0

    def put(self, length: int = 400) -> kvkeep.Receipt:
        """Store the next conversation, which shares nothing with those before."""
        tokens = tokens_of(self.next, length) + 40_000 * self.next
        self.next += 1
        receipt = self.space.snapshot(tokens, caches(KIND, tokens))
        if receipt.stored:
            self.kept.append((self.next - 1) * 10_000 + length)
        return receipt

    def serves(self) -> None:
        """Everything that was stored is there, bit for bit."""
        for code in self.kept:
            conversation, length = divmod(code, 10_000)
            tokens = tokens_of(conversation, length + 1) + 40_000 * conversation
            hit = self.space.resume(tokens)
            assert hit.caches is not None, hit.decision
            assert hit.offset == length, hit.decision
            assert not wrong(KIND, tokens, hit.offset, hit.caches)

    def check(self) -> None:
        """It is, and the records and the counters are as they should."""
        self.serves()
        self.store.flush()
        problems = self.store.verify().problems
        assert not problems, problems
        assert recount(self.store) == self.store.used_bytes <= self.store.max_bytes

    def stores_again(self) -> None:
        """The cause is gone: the very next snapshot is stored."""
        receipt = self.put()
        assert receipt.stored, receipt
        self.check()


def refused(folder: Path) -> StoreUnusable:
    """Why a store cannot be opened for writing."""
    try:
        kvkeep.open(folder, disk_reserve=1).close()
    except StoreUnusable as error:
        return error
    raise AssertionError(f"{folder} was opened")


def file_size(folder: Path) -> None:
    """The file may not grow: what a full disk looks like to one process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    shop = Shop(folder)
    assert shop.put().stored
    for large in (False, True):
        with limited(resource.RLIMIT_FSIZE, shop.store.env.file_bytes() + 64 * 1024):
            refused = [shop.put(8000 if large else 400) for _ in range(6)]
            assert not refused[-1].stored
            assert "full" in refused[-1].reason, refused[-1]
            shop.check()
        shop.stores_again()


def full_disk(folder: Path) -> None:
    """A file system with no block left. ``folder`` lies on a small one."""
    shop = Shop(folder)
    assert shop.put().stored
    filler = folder.parent / "filler"
    with filler.open("wb") as out, suppress(OSError):
        while True:
            out.write(bytes(MIB))
            out.flush()
    refused = [shop.put(4000) for _ in range(3)]
    assert not refused[-1].stored
    assert "full" in refused[-1].reason or "reserve" in refused[-1].reason, refused[-1]
    shop.check()
    filler.unlink()
    shop.stores_again()


def descriptors(folder: Path) -> None:
    """No file handle left: a store cannot be opened, and an open one goes on."""
    shop = Shop(folder)
    assert shop.put().stored
    with limited(resource.RLIMIT_NOFILE, 64), all_handles():
        refused_for_handles(folder.with_name("another"))
        assert shop.put().stored, "what is open needs no more handles"
        shop.serves()
    shop.check()
    shop.store.close()
    with limited(resource.RLIMIT_NOFILE, 64), all_handles():
        refused_for_handles(folder)
    kept, number = shop.kept, shop.next
    shop = Shop(folder)
    shop.kept, shop.next = kept, number
    shop.check()
    shop.stores_again()


@contextmanager
def all_handles() -> Iterator[None]:
    """Take every file handle that is left, for the time of the block."""
    held = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in held:
            os.close(fd)


def refused_for_handles(folder: Path) -> None:
    """Opening fails, and the error says why and what to do."""
    error = refused(folder)
    assert "open files" in error.problem, error
    assert "ulimit -n" in error.remedy, error


def address_space(folder: Path) -> None:
    """No memory: neither for opening, nor for what a snapshot or a resume needs."""
    shop = Shop(folder)
    assert shop.put(8000).stored
    shop.check()
    huge = tokens_of(77, 200_000) + 7_000_000
    live = caches(KIND, huge)
    assert shop.space.snapshot(huge[:100_000], caches(KIND, huge[:100_000])).stored
    mx.clear_cache()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, used + 12 * MIB):
        receipt = shop.space.snapshot(huge, live)
        assert not receipt.stored, receipt
        assert "memory" in receipt.reason.lower() or "allocate" in receipt.reason, receipt
        hit = shop.space.resume(huge[:100_001])
        assert hit.caches is None, hit.decision
        assert hit.decision.reason is kvkeep.Reason.STORE_FAILED
        assert "memory" in refused(folder.with_name("another")).problem
    assert shop.space.snapshot(huge, live).stored
    assert shop.space.resume(huge[:100_001]).offset == 100_000
    shop.stores_again()


def become_nobody(folder: Path) -> None:
    """Root may write everything: give the store away, and go on as another user."""
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, -1)
    for parent in folder.parents:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    os.seteuid(65534)


def read_only(folder: Path) -> None:
    """A folder that this user may read and not write."""
    shop = Shop(folder)
    assert shop.put().stored
    shop.check()
    shop.store.close()
    try:
        folder.chmod(0o500)
        for file in folder.iterdir():
            file.chmod(0o400)
        if os.geteuid() == 0:
            become_nobody(folder)
        assert isinstance(refused(folder), StoreReadOnly)
        with kvkeep.open(folder, read_only=True) as store:
            space = store.space(identity={"rows": KIND}, layout=caches(KIND, ()))
            tokens = tokens_of(0, 401)
            hit = space.resume(tokens)
            assert hit.offset == 400
            assert not wrong(KIND, tokens, 400, hit.caches or [])
            receipt = space.snapshot(tokens, caches(KIND, tokens))
            assert not receipt.stored, receipt
    finally:
        os.seteuid(os.getuid())
        for path in (folder, *folder.iterdir()):
            os.chown(path, os.getuid(), -1)
            path.chmod(0o700 if path == folder else 0o600)
    shop.store = kvkeep.open(folder, disk_reserve=1)
    shop.space = shop.store.space(identity={"rows": KIND}, layout=caches(KIND, ()))
    shop.stores_again()


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case for case in (file_size, full_disk, descriptors, address_space, read_only)
}


if __name__ == "__main__":
    light.install()
    logging.disable(logging.WARNING)
    CASES[sys.argv[1]](Path(sys.argv[2]))
    print("done")
