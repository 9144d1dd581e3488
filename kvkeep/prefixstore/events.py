"""The ring of events in a store: bounded, shared by processes, always on.

A caller only hands an event over; the writer's thread writes what gathered, in batches. Each
write also counts the events into totals of their spaces, which outlive the ring.

Keys sort in the order of writing, whatever clocks do: the time of the event, or one more than
the last key where that is not later. So a read from a time on starts at a key, and a clock
that was wrong for a while neither reorders the ring nor keeps it from being trimmed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import msgpack

from kvkeep.errors import CorruptFrame, KvkeepError
from kvkeep.persistence.environment import Environment, Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.event import Event
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.ledger import Ledger, counter
from kvkeep.prefixstore.records import Node, unpack
from kvkeep.prefixstore.shelf import mark_of
from kvkeep.prefixstore.totals import Totals

log = logging.getLogger("kvkeep")

RING = 100_000
BATCH = 64
MOST_ASKED = 4096
"""Spaces that were asked and never stored in, whose fields are kept for reports."""

JUMP = 600.0
"""Seconds that one event may be older than another before it: processes write in batches."""

AHEAD = 60.0
"""Seconds that an event may lie in the future of the one who reads it."""

NUMBER, LAST, LOST = "events", "events_last", "events_lost"
TOTALS, RATE, ASKED = b"totals/", b"rate/", b"asked/"
"""Names in ``meta``: events ever written, the last key's first half, events that could not be
written; and, with a space id behind them, its totals, its prefill rate, its fields."""

Task = Callable[[], None]


class Used(NamedTuple):
    """What a lookup resumed: the keys of the nodes from the root on, and the state, or 0."""

    nodes: tuple[bytes, ...] = ()
    state: int = 0


NOTHING = Used()


class EventLog:
    """Collects events and uses, and writes them in batches on the writer's thread.

    ``run`` runs a task there at once; ``later`` once nothing else came for a moment. ``keeps``
    is how many token ids a lookup keeps of what was asked where the prompts part: none, unless
    the store was opened so.
    """

    def __init__(
        self, env: Environment, run: Callable[[Task], None], later: Callable[[Task], None]
    ) -> None:
        self._env = env
        self._run, self._later = run, later
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._used: dict[Used, tuple[int, int]] = {}
        self._rates: dict[bytes, Rate] = {}
        self._identities: dict[bytes, Identity] = {}
        self._lost = 0
        self.keeps = 0

    def add(self, event: Event, used: Used = NOTHING) -> None:
        """Note an event, and what it used. A reader notes nothing."""
        if self._env.read_only:
            return
        with self._lock:
            self._events.append(event)
            if used.nodes:
                hits = self._used.get(used, (0, 0))[1] + 1
                self._used[used] = (time.time_ns(), hits)
            gathered = len(self._events)
        if gathered >= BATCH:
            self._run(self.write)
        elif gathered == 1:
            self._later(self.write)

    def know(self, identity: Identity) -> None:
        """Remember what a space is, for events of one that nothing was ever stored in."""
        self._identities[identity.id] = identity

    def rate(self, space: bytes) -> float:
        """The measured prefill rate of a space in tokens a second; 0 where unknown."""
        return self._rate(space).speed

    def measured(self, space: bytes, tokens: int, seconds: float) -> None:
        """Count a stretch of prefill towards the rate of a space."""
        self._rates[space] = self._rate(space).plus(tokens, seconds)

    def write(self) -> None:
        """Write what was collected, in one transaction. What cannot be written is counted."""
        with self._lock:
            events, self._events = self._events, []
            used, self._used = self._used, {}
        if not events and not used:
            return
        try:
            with self._env.begin(write=True) as txn:
                if used:
                    ledger = Ledger(txn)
                    _touch(ledger, used)
                    ledger.settle()
                append(txn, events)
                self._keep(txn, {event.space for event in events})
                if self._lost:
                    txn.put("meta", LOST.encode(), layout.u64(counter(txn, LOST) + self._lost))
            self._lost = 0
        except KvkeepError as error:
            self._lost += len(events)
            log.warning("kvkeep: %d events were not written: %s", len(events), error.problem)

    def touch(self, ledger: Ledger) -> None:
        """Mark what lookups used as used now: before something is chosen to be evicted."""
        with self._lock:
            used, self._used = self._used, {}
        _touch(ledger, used)

    def _rate(self, space: bytes) -> Rate:
        found = self._rates.get(space)
        if found is not None:
            return found
        try:
            with self._env.begin() as txn:
                found = Rate.unpack(txn.get("meta", RATE + space))
        except KvkeepError:
            return Rate()
        return self._rates.setdefault(space, found)

    def _keep(self, txn: Transaction, spaces: set[bytes]) -> None:
        for space in spaces:
            rate = self._rates.get(space)
            if rate is not None and rate.tokens:
                txn.put("meta", RATE + space, rate.pack())
            identity = self._identities.pop(space, None)
            if identity is not None and txn.get("spaces", space) is None:
                _describe(txn, identity)


@dataclass(frozen=True)
class Rate:
    """Tokens that a model read, and the seconds that took; old ones fade."""

    tokens: float = 0.0
    seconds: float = 0.0

    FADES = 65_536

    @property
    def speed(self) -> float:
        """Tokens a second; 0 where nothing was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def plus(self, tokens: int, seconds: float) -> Rate:
        """With one more stretch of reading. What takes no time or reads nothing is left out."""
        if tokens <= 0 or seconds <= 0:
            return self
        old = 0.5 if self.tokens > self.FADES else 1.0
        return Rate(old * self.tokens + tokens, old * self.seconds + seconds)

    def pack(self) -> bytes:
        """The two numbers as msgpack."""
        return bytes(msgpack.packb([self.tokens, self.seconds]))

    @staticmethod
    def unpack(data: memoryview | None) -> Rate:
        """The numbers of ``pack``; none where they are missing or make no sense."""
        try:
            tokens, seconds = msgpack.unpackb(data) if data is not None else (0, 0)
            rate = Rate(float(tokens), float(seconds))
        except (ValueError, TypeError, msgpack.UnpackException):
            return Rate()
        return rate if 0 <= rate.speed < float("inf") else Rate()


def append(txn: Transaction, events: Sequence[Event]) -> None:
    """Write events into the ring and count them into the totals, in a write transaction."""
    if not events:
        return
    if not counter(txn, NUMBER):
        _count_older(txn)
    number, last = counter(txn, NUMBER), counter(txn, LAST)
    counted: dict[bytes, Totals] = {}
    for event in events:
        number += 1
        last = max(_nanoseconds(event.time), last + 1)
        txn.put("events", layout.pair(last, number), event.pack(), append=True)
        counted.setdefault(event.space, Totals()).add(event)
    txn.put("meta", NUMBER.encode(), layout.u64(number))
    txn.put("meta", LAST.encode(), layout.u64(last))
    for space, part in counted.items():
        data = txn.get("meta", TOTALS + space)
        known = Totals.unpack(data) if data is not None else None
        part.first = known.first if known is not None else number
        if known is not None:
            part.merge(known)
        txn.put("meta", TOTALS + space, part.pack())
    excess = txn.count("events") - RING
    for key in list(islice(txn.keys("events"), max(0, excess))):
        txn.delete("events", key)


@dataclass
class Gaps:
    """What a reading of the ring could not vouch for.

    ``unreadable`` records were skipped. ``ahead`` events lie in the future. ``jumps`` times
    the clock went back. ``lost`` events could not be written. ``trimmed`` ones have fallen
    out of the ring; ``oldest`` is the time of the oldest that was read, 0 without any.
    """

    unreadable: int = 0
    ahead: int = 0
    jumps: int = 0
    lost: int = 0
    trimmed: int = 0
    oldest: float = 0.0


def read_events(
    txn: Transaction, since: float = 0.0, gaps: Gaps | None = None, after: bytes = b""
) -> Iterator[tuple[bytes, Event]]:
    """Keys and events from ``since`` (seconds since the epoch) on, in the order of writing.

    ``after`` is the key of an event that was read before. ``gaps`` is filled in meanwhile.
    """
    gaps = gaps if gaps is not None else Gaps()
    gaps.lost = counter(txn, LOST)
    gaps.trimmed = max(0, counter(txn, NUMBER) - txn.count("events"))
    latest, now = 0.0, time.time()
    start = max(layout.pair(_nanoseconds(since), 0), after + b"\0" if after else b"")
    for key, value in txn.items("events", start=start):
        event = Event.unpack(value)
        if event is None:
            gaps.unreadable += 1
            continue
        if event.time < latest - JUMP:
            gaps.jumps += 1
            latest = event.time
        latest = max(latest, event.time)
        if event.time < since:
            continue
        gaps.ahead += event.time > now + AHEAD
        gaps.oldest = min(gaps.oldest or event.time, event.time)
        yield key, event


def all_totals(txn: Transaction) -> dict[bytes, Totals]:
    """Totals by space since the store was made, also of events that left the ring."""
    found = {}
    for key, value in txn.items("meta", prefix=TOTALS):
        totals = Totals.unpack(value)
        if totals is not None:
            found[key[len(TOTALS) :]] = totals
    return found


def asked_spaces(txn: Transaction) -> dict[bytes, Identity]:
    """Spaces that events speak of and that nothing was stored in."""
    found = {}
    for key, value in txn.items("meta", prefix=ASKED):
        with suppress(CorruptFrame):
            found[key[len(ASKED) :]] = Identity.unpack(value)[0]
    return found


def rates(txn: Transaction) -> dict[bytes, float]:
    """Prefill rates by space, in tokens a second."""
    prefix = len(RATE)
    return {k[prefix:]: Rate.unpack(v).speed for k, v in txn.items("meta", prefix=RATE)}


def _count_older(txn: Transaction) -> None:
    """Bring a ring that an older kvkeep wrote, without totals, up to this version."""
    older: dict[bytes, Totals] = {}
    last = number = 0
    for key, value in txn.items("events"):
        number, last = number + 1, layout.from_pair(key)[0]
        event = Event.unpack(value)
        if event is not None:
            older.setdefault(event.space, Totals()).add(event)
    for space, total in older.items():
        txn.put("meta", TOTALS + space, total.pack())
    txn.put("meta", NUMBER.encode(), layout.u64(number))
    txn.put("meta", LAST.encode(), layout.u64(last))


def _describe(txn: Transaction, identity: Identity) -> None:
    key = ASKED + identity.id
    if txn.get("meta", key) is None and len(list(txn.keys("meta", prefix=ASKED))) < MOST_ASKED:
        record = {"fields": identity.fields, "label": identity.label}
        txn.put("meta", key, msgpack.packb(record))


def _nanoseconds(seconds: float) -> int:
    return min(max(int(seconds * 1e9), 0), (1 << 63) - 1)


def _touch(ledger: Ledger, used: dict[Used, tuple[int, int]]) -> None:
    """Mark the nodes of each path that are still there, and the state, as used."""
    txn = ledger.txn
    for (keys, state), (when, hits) in used.items():
        deepest = next((key for key in reversed(keys) if txn.get("nodes", key) is not None), None)
        if deepest is not None:
            ledger.touch(_whole_path(txn, deepest), when, hits=hits)
        if state:
            ledger.states.use(state, when)


def _whole_path(txn: Transaction, key: bytes) -> list[Node]:
    """The nodes from the root to that of ``key``, as they are now: edges may have been split.

    They are valid until the next write.
    """
    path: list[Node] = []
    while (data := txn.get("nodes", key)) is not None:
        path.append(unpack(key, data))
        above = mark_of(txn, layout.from_u64(key[16:24]))
        if above is None:
            break
        key = above.key
    return path[::-1]
