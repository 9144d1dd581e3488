"""Lookup and snapshot events: one small record each, in a bounded ring in the store.

An event holds numerator and denominator together and no prompt text, so that every total is
a sum over the same records. Events are written in batches by the writer's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import msgpack

from kvkeep.persistence.environment import Environment, Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.records import detach, unpack

RING = 100_000
BATCH = 64


@dataclass(frozen=True)
class Event:
    """One lookup or snapshot. Tokens count positions, ``seconds`` is the time it took."""

    what: str  # "lookup" or "snapshot"
    time: float
    space: bytes
    reason: str
    prompt: int = 0
    matched: int = 0
    resumed: int = 0
    new: int = 0
    known: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    kinds: str = ""

    def pack(self) -> bytes:
        """The event as msgpack, fields in order."""
        return bytes(msgpack.packb([getattr(self, f.name) for f in fields(self)]))

    @staticmethod
    def unpack(data: Any) -> Event | None:
        """The event, or ``None`` where the record is not one of ours."""
        try:
            return Event(*msgpack.unpackb(data))
        except (ValueError, TypeError):
            return None


class EventLog:
    """Collects events and uses, and writes them in batches through ``run``."""

    def __init__(self, env: Environment, run: Callable[[Callable[[], None]], None]) -> None:
        self._env = env
        self._run = run
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._used: dict[bytes, int] = {}
        self._number = 0

    def add(self, event: Event, used: tuple[bytes, ...] = ()) -> None:
        """Note an event, and the keys of the nodes that it used; nothing in a read-only store."""
        if self._env.read_only:
            return
        with self._lock:
            self._events.append(event)
            self._used.update(dict.fromkeys(used, time.time_ns()))
            due = len(self._events) >= BATCH
        if due:
            self._run(self.write)

    def write(self) -> None:
        """Write what was collected, in one transaction."""
        with self._lock:
            events, self._events = self._events, []
            used, self._used = self._used, {}
        if not events and not used:
            return
        with self._env.begin(write=True) as txn:
            ledger = Ledger(txn)
            for node_key, when in used.items():
                data = txn.get("nodes", node_key)
                if data is not None:
                    ledger.touch([detach(unpack(node_key, data))], when)
            for event in events:
                self._number += 1
                txn.put("events", layout.pair(int(event.time * 1e9), self._number), event.pack())
            excess = txn.count("events") - RING
            for key in list(txn.keys("events"))[: max(0, excess)]:
                txn.delete("events", key)


def read_events(txn: Transaction, since: float = 0.0) -> Iterator[Event]:
    """The events from ``since`` (seconds since the epoch) on, oldest first."""
    for _, value in txn.items("events", start=layout.pair(int(since * 1e9), 0)):
        event = Event.unpack(value)
        if event is not None:
            yield event
