"""What a store's spaces work with: the environment, its writer, its events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgpack

from kvkeep.errors import StoreClosed, StoreReadOnly
from kvkeep.persistence.environment import Environment
from kvkeep.prefixstore.events import EventLog
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.quarantine import Quarantine
from kvkeep.prefixstore.writer import Limits, Writer


@dataclass
class Core:
    """The moving parts of one open store, shared by its spaces."""

    env: Environment
    quarantine: Quarantine
    writer: Writer
    events: EventLog
    _known: set[bytes] = field(default_factory=set)

    @staticmethod
    def start(env: Environment, limits: Limits) -> Core:
        """The parts of a store on ``env``."""
        quarantine = Quarantine(env)
        writer = Writer(env, limits, quarantine)
        return Core(env, quarantine, writer, EventLog(env, writer.call, writer.later))

    def register(self, found: Identity) -> None:
        """Write down a space that something is about to be stored in."""
        self.check_writable()
        if found.id in self._known:
            return
        record = {"fields": found.fields, "label": found.label, "created": time.time()}
        with self.env.begin(write=True) as txn:
            if txn.get("spaces", found.id) is None:
                txn.put("spaces", found.id, msgpack.packb(record))
        self._known.add(found.id)

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
