"""What a store's spaces work with: the environment, its writer, its events."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import msgpack

from kvkeep.errors import StoreClosed, StoreReadOnly
from kvkeep.persistence.environment import Environment, Transaction
from kvkeep.prefixstore import tenants
from kvkeep.prefixstore.events import EventLog
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.pins import Pin, add_pin
from kvkeep.prefixstore.quarantine import Quarantine
from kvkeep.prefixstore.recount import space_fault
from kvkeep.prefixstore.room import Room, budget_of
from kvkeep.prefixstore.sizes import parse_size
from kvkeep.prefixstore.tenants import key_of
from kvkeep.prefixstore.tokens import Tokens
from kvkeep.prefixstore.ttl import NANOSECONDS, read_ttl, write_ttl
from kvkeep.prefixstore.writer import Limits, Writer


@dataclass
class Core:
    """The moving parts of one open store, shared by its spaces.

    ``finished`` names answers that are complete and still to be removed (``unfinished.py``).
    """

    env: Environment
    quarantine: Quarantine
    writer: Writer
    events: EventLog
    finished: set[bytes] = field(default_factory=set)

    @staticmethod
    def start(env: Environment, limits: Limits) -> Core:
        """The parts of a store on ``env``."""
        quarantine = Quarantine(env)
        writer = Writer(env, limits, quarantine)
        events = EventLog(env, writer.call, writer.later)
        writer.settle_uses = events.touch
        return Core(env, quarantine, writer, events)

    def register(self, found: Identity) -> None:
        """Write down a space that something is about to be stored in."""
        self.check_writable()
        with self.env.begin() as txn:
            known = txn.get("spaces", found.id)
            if known is not None and not space_fault(found.id, known):
                return
        record = {"fields": found.fields, "label": found.label, "created": time.time()}
        with self.env.begin(write=True) as txn:
            known = txn.get("spaces", found.id)
            if known is None or space_fault(found.id, known):
                txn.put("spaces", found.id, msgpack.packb(record))

    def limit(self, identity: Identity, ttl: float | None, quota: float | str | None) -> None:
        """Write down the time to live of a space, and the quota of its tenant."""
        limit = _bytes(quota)
        with self.env.begin() as txn:
            old_ttl, old = read_ttl(txn, identity.id), tenants.read_tenant(txn, key_of(identity))
        same = ttl is None or ttl == (math.inf if old_ttl is None else old_ttl / NANOSECONDS)
        if same and limit in (None, old.quota):
            return
        self.check_writable()
        self.flush()
        with self.env.begin(write=True) as txn:
            if ttl is not None:
                write_ttl(txn, identity.id, ttl)
            if limit is not None:
                old = tenants.read_tenant(txn, key_of(identity))
                tenants.write_tenant(txn, key_of(identity), old._replace(quota=limit))
            self._make_room(txn, identity.id)

    def pin(self, space: bytes, tokens: Tokens, seconds: float | None) -> Pin:
        """Pin what is stored of ``tokens``. Raises ``NothingToPin`` or ``TooMuchPinned``."""
        self.check_writable()
        self.flush()
        with self.env.begin(write=True) as txn:
            ledger = Ledger(txn)
            pin = add_pin(ledger, space, tokens, seconds, self._budget(txn))
            ledger.settle()
            self._make_room(txn, space)
            return pin

    def _make_room(self, txn: Transaction, space: bytes) -> None:
        """Hold the limits after one of them, or what counts to it, has changed."""
        ledger = Ledger(txn)
        room = Room(ledger, self._budget(txn))
        room.make(space, 0)
        room.report()
        ledger.settle()

    def _budget(self, txn: Transaction) -> int:
        return budget_of(txn, self.writer.max_bytes)

    def check_writable(self) -> None:
        """Raise ``StoreReadOnly`` where the store was opened for reading only."""
        if self.env.read_only:
            raise StoreReadOnly("The store was opened for reading only")

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything accepted so far is durable or refused; whether it is in time.

        Raises ``StoreClosed``, so that no thread is started for a store that is gone.
        """
        if not self.env.usable:
            raise StoreClosed(f"{self.env.folder}: this store is closed, or a parent process's")
        if self.env.read_only:
            return True
        self.writer.call(self.events.write)
        return self.writer.flush(timeout)

    def close(self) -> None:
        """Flush, end the threads, and give the environment back."""
        try:
            if self.env.usable:
                self.flush()
        finally:
            if self.env.usable:
                self.writer.close()
            self.env.close()


def _bytes(quota: float | str | None) -> int | None:
    """The bytes of a quota, 0 to lift it; ``None`` where none is given."""
    if quota is None:
        return None
    return 0 if quota == math.inf else parse_size(quota if isinstance(quota, str) else int(quota))
