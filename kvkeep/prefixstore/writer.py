"""Write-behind: one bounded queue, one writer thread, bytes only.

Room is made for all of a snapshot in its first transaction. Its chunks are committed one by one,
unseen, each durable as it goes; the transaction of the last one publishes it. A small snapshot is
one transaction. What a crash leaves unpublished is listed in ``pending``
and freed by the next process that finds its writer gone.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgpack

from kvkeep.errors import CorruptFrame, KvkeepError, StoreFull
from kvkeep.persistence.environment import Environment, Transaction
from kvkeep.persistence.packing import unpack_plain
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.copying import RowDraft
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.prepare import Prepared
from kvkeep.prefixstore.publish import Chunk, Snapshot, Vanished, publish
from kvkeep.prefixstore.quarantine import Quarantine
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.room import BUDGET, Room, budget_of
from kvkeep.prefixstore.sizes import format_size
from kvkeep.prefixstore.tokens import Tokens
from kvkeep.prefixstore.trie import Path, walk

log = logging.getLogger("kvkeep")

QUEUE_BYTES = 4 << 30
ONE_TRANSACTION = 16 << 20
ORPHAN_SECONDS = 3600.0
IDLE_SECONDS = 1.0

Task = Callable[[], None]


@dataclass(frozen=True)
class Limits:
    """The byte budget of the store, and the bytes of disk that must stay free."""

    max_bytes: int
    disk_reserve: int


class Writer:
    """Takes prepared snapshots and small write tasks, in order, on a thread of its own."""

    def __init__(self, env: Environment, limits: Limits, quarantine: Quarantine) -> None:
        self._env = env
        self._limits = limits
        self._quarantine = quarantine
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._queued: list[Prepared] = []
        self._building: list[tuple[bytes, Tokens]] = []
        self._room = threading.Condition()
        self._thread: threading.Thread | None = None
        self._later: tuple[float, Task] | None = None
        self.settle_uses: Callable[[Ledger], None] = lambda _: None
        """Marks what was used and is not yet written down so, before room is made."""
        self._seal = ThreadPoolExecutor(2, "kvkeep-seal")

    def queued(self, space: bytes) -> list[Prepared]:
        """Snapshots of ``space`` that are accepted and not yet published."""
        with self._room:
            return [p for p in self._queued if p.snapshot.space == space]

    @contextmanager
    def building(self, space: bytes, tokens: Tokens) -> Iterator[None]:
        """While a snapshot is prepared and submitted: what it finds stored should stay."""
        item = (space, tokens)
        with self._room:
            self._building.append(item)
        try:
            yield
        finally:
            with self._room:
                self._building = [other for other in self._building if other is not item]

    def submit(self, prepared: Prepared, wait: bool = True) -> Receipt:
        """Accept a snapshot; with ``wait``, once the queue has room for it."""
        receipt = Receipt(prepared.tokens_new, prepared.tokens_known)
        with self._room:
            while wait and self._queued and self._bytes() + prepared.nbytes > QUEUE_BYTES:
                self._room.wait()
            self._queued.append(prepared)
            # In one step: what is queued first is what later snapshots build on.
            self.call(lambda: self._store(prepared, receipt))
        return receipt

    def call(self, task: Task) -> None:
        """Run ``task`` on the writer's thread, after everything accepted before it."""
        with self._room:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvkeep-write", daemon=True)
                self._thread.start()
        self._tasks.put(task)

    def later(self, task: Task) -> None:
        """Run ``task`` once, in a second or as soon after it as nothing else is to do."""
        self._later = (time.monotonic() + IDLE_SECONDS, task)
        self.call(_nothing)

    @property
    def max_bytes(self) -> int:
        """The byte budget that the store was opened with."""
        return self._limits.max_bytes

    @property
    def waiting(self) -> tuple[int, int]:
        """Snapshots that are accepted and not yet published, and their bytes in memory."""
        with self._room:
            return len(self._queued), self._bytes()

    @property
    def is_full(self) -> bool:
        """Whether another snapshot had better be left out than wait for its turn."""
        return self.waiting[1] >= QUEUE_BYTES // 2

    def settled(self, prepared: Prepared) -> None:
        """Return once ``prepared`` is published or refused."""
        with self._room:
            self._room.wait_for(lambda: not any(p is prepared for p in self._queued))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything accepted so far is durable or refused; whether it is."""
        if self._thread is None or not self._thread.is_alive():
            return True
        done = threading.Event()
        self._tasks.put(done.set)
        return done.wait(timeout)

    def close(self) -> None:
        """Flush, and end the thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
        self._seal.shutdown()

    def _bytes(self) -> int:
        return sum(p.nbytes for p in self._queued)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except Exception:
                log.exception("kvkeep: a write task failed; the store is as before it")

    def _next(self) -> Task | None:
        later = self._later
        if later is None:
            return self._tasks.get()
        try:
            return self._tasks.get(timeout=max(0.0, later[0] - time.monotonic()))
        except queue.Empty:
            self._later = None
            return later[1]

    def _store(self, prepared: Prepared, receipt: Receipt) -> None:
        try:
            written = self._write(prepared)
            self._env.sync()
            receipt.settle(True, written, "stored" if written else "already_stored")
        except StoreFull as error:
            receipt.settle(False, 0, error.problem)
        except Vanished as error:
            receipt.settle(False, 0, str(error))
        except KvkeepError as error:
            receipt.settle(False, 0, error.problem)
        except Exception as error:
            log.exception("kvkeep: a snapshot was not stored")
            receipt.settle(False, 0, f"failed: {error}")
        finally:
            with self._room:
                self._queued = [other for other in self._queued if other is not prepared]
                self._room.notify_all()

    def _write(self, prepared: Prepared) -> int:
        """Store and publish; the bytes of rows and state written."""
        if self._already(prepared):
            with self._env.begin(write=True) as txn:
                ledger = Ledger(txn)
                publish(ledger, prepared.snapshot, (), None, self._quarantine.ids())
                ledger.settle()
            return 0
        self._check_disk(prepared.nbytes)
        state = self._seal.submit(prepared.state.seal) if prepared.state is not None else None
        sealed = self._sealed(prepared.rows)
        # One to a transaction: LMDB then has the same memory again for the next.
        alone = len(prepared.rows) - 1 if prepared.nbytes > ONE_TRANSACTION else 0
        job = secrets.randbits(64)
        chunks: list[Chunk] = []
        try:
            for one in islice(sealed, max(0, alone)):
                with self._env.begin(write=True) as txn:
                    ledger = Ledger(txn)
                    if not chunks:
                        self._make_room(ledger, prepared)
                        txn.put("pending", layout.pair(job, 0), _pending(prepared.nbytes))
                    chunks.append(_put(ledger, one))
                    ledger.settle()
                    txn.put("pending", layout.pair(job, chunks[-1].frame.id), _pending(0))
            rest = list(sealed)
            final = state.result() if state is not None else None
            with self._env.begin(write=True) as txn:
                ledger = Ledger(txn)
                if not chunks:
                    self._make_room(ledger, prepared)
                for key in list(txn.keys("pending", prefix=layout.u64(job))):
                    txn.delete("pending", key)
                every = [*chunks, *(_put(ledger, one) for one in rest)]
                return self._publish(ledger, prepared, every, final)
        except BaseException:
            if chunks:
                self._abandon(job)
            raise

    def _publish(
        self,
        ledger: Ledger,
        prepared: Prepared,
        chunks: Sequence[Chunk],
        state: memoryview | None,
    ) -> int:
        stored = ledger.put_chunk(state) if state is not None else None
        written = publish(ledger, prepared.snapshot, chunks, stored, self._quarantine.ids())
        # Node records, and edges that were split, may have taken more than was made free.
        self._fit(ledger, prepared, 0)
        ledger.settle()
        return written

    def _already(self, prepared: Prepared) -> bool:
        """Whether this very resume point is stored, so that there is nothing to write."""
        snapshot = prepared.snapshot
        if prepared.rows:
            return False
        with self._env.begin() as txn:
            path = walk(txn, snapshot.space, snapshot.tokens)
            if path.matched < len(snapshot.tokens):
                return False
            points = [node.find_point(snapshot.recipe.id, path.matched) for node in path.nodes]
            lacking = {0} | self._quarantine.ids() if prepared.state is not None else set()
            return any(point is not None and point.state not in lacking for point in points)

    def _make_room(self, ledger: Ledger, prepared: Prepared) -> None:
        snapshot = prepared.snapshot
        tokens = layout.footprint(len(snapshot.tokens) * 8)
        rows = sum(layout.footprint(row.draft.nbytes) for row in prepared.rows)
        state = layout.footprint(prepared.state.nbytes) if prepared.state is not None else 0
        self._fit(ledger, prepared, rows + state + tokens, state)

    def _fit(self, ledger: Ledger, prepared: Prepared, more: int, more_state: int = 0) -> None:
        """Evict what the snapshot does not build on until ``more`` bytes fit the budgets.

        What others build on that are still to be written goes only where nothing else can.
        """
        txn, snapshot = ledger.txn, prepared.snapshot
        room = Room(ledger, budget_of(txn, self._limits.max_bytes) - _reserved(txn))
        if not room.is_due(snapshot.space, more):
            return
        path = walk(txn, snapshot.space, snapshot.tokens)
        if ledger.used + more > room.budget:
            self.settle_uses(ledger)
        own = {node.id for node in path.nodes}
        room.last = set(_last_state(path, snapshot))
        for room.spare in (own | self._awaited(txn), own):
            over = room.make(snapshot.space, more, more_state)
            if not over:
                break
        room.report()
        if over == BUDGET:
            raise StoreFull(
                f"A snapshot of {format_size(prepared.nbytes)} does not fit the budget of "
                f"{format_size(budget_of(txn, self._limits.max_bytes))} beside what it builds on "
                "and what is pinned"
            )
        if over:
            raise StoreFull(
                f"A snapshot of {format_size(prepared.nbytes)} does not fit the quota of its salt, "
                f"{format_size(ledger.tenant(snapshot.space).quota)}, beside what it builds on "
                "and what is pinned"
            )

    def _awaited(self, txn: Transaction) -> set[int]:
        """The nodes that accepted snapshots, and those in preparation, build on."""
        with self._room:
            awaited = [
                *self._building,
                *((p.snapshot.space, p.snapshot.tokens) for p in self._queued),
            ]
        return {node.id for space, tokens in awaited for node in walk(txn, space, tokens).nodes}

    def _check_disk(self, wanted: int) -> None:
        free = self._env.free_bytes()
        if free - wanted < self._limits.disk_reserve:
            raise StoreFull(
                f"The store's disk has {format_size(free)} free, and would be below its reserve of "
                f"{format_size(self._limits.disk_reserve)} after this snapshot"
            )

    def _sealed(self, rows: Iterable[RowDraft]) -> Iterator[tuple[RowDraft, Any]]:
        """Rows with their sealed frames, in order; two are sealed ahead of the writing."""
        ahead: deque[tuple[RowDraft, Future[Any]]] = deque()
        for row in rows:
            ahead.append((row, self._seal.submit(row.draft.seal)))
            if len(ahead) > 2:
                first, future = ahead.popleft()
                yield first, future.result()
        for first, future in ahead:
            yield first, future.result()

    def _abandon(self, job: int) -> None:
        """Free what an unfinished snapshot left; a crash here leaves it to ``free_orphans``."""
        try:
            with self._env.begin(write=True) as txn:
                _free(Ledger(txn), layout.u64(job))
        except KvkeepError as error:
            log.warning("kvkeep: unpublished chunks stay until the next open: %s", error.problem)


def free_orphans(env: Environment) -> int:
    """Free chunks whose writer died before it published them; how many."""
    with env.begin() as txn:
        jobs = {}
        for key, value in txn.items("pending"):
            job, _ = layout.from_pair(key)
            _, pid, when = _read_pending(value)
            jobs[job] = _gone(pid) or time.time() - when > ORPHAN_SECONDS
    dead = [job for job, gone in jobs.items() if gone]
    if not dead:
        return 0
    with env.begin(write=True) as txn:
        return sum(_free(Ledger(txn), layout.u64(job)) for job in dead)


def _free(ledger: Ledger, prefix: bytes) -> int:
    freed = 0
    for key in list(ledger.txn.keys("pending", prefix=prefix)):
        chunk = layout.from_pair(key)[1]
        if chunk:
            ledger.drop_chunk(chunk)
            freed += 1
        ledger.txn.delete("pending", key)
    return freed


def _reserved(txn: Transaction) -> int:
    """Bytes that snapshots in flight, in any process, were promised."""
    return sum(_read_pending(value)[0] for _, value in txn.items("pending"))


def _read_pending(value: Any) -> tuple[int, int, float]:
    """Bytes that were promised, to which process, and when. A damaged record is nobody's."""
    with suppress(CorruptFrame):
        match unpack_plain(value):
            case (int(nbytes), int(pid), int() | float() as when) if nbytes >= 0 < pid < 1 << 31:
                return nbytes, pid, when
    return 0, 0, 0.0


def _pending(nbytes: int) -> bytes:
    return bytes(msgpack.packb([nbytes, os.getpid(), time.time()]))


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _last_state(path: Path, snapshot: Snapshot) -> Iterator[int]:
    """The state of the last resume point of the path, and of the one before it."""
    found = [
        point.state
        for node in path.nodes
        for point in node.points
        if point.state
        and point.offset <= min(path.matched, len(snapshot.tokens))
        and node.recipes[point.recipe] == snapshot.recipe.id
    ]
    yield from found[-2:]


def _nothing() -> None:
    """Wakes the thread, so that it looks for what is to be done later."""


def _put(ledger: Ledger, sealed: tuple[RowDraft, Any]) -> Chunk:
    row, data = sealed
    return Chunk(row.family, row.start, row.stop, ledger.put_chunk(data))
