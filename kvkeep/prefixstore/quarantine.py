"""Frames that must not be used: damaged ones, noted in the store, and ones of a newer format.

Quarantined records are kept. Reading deletes nothing; ``repair`` does, when it is asked to.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from kvkeep.errors import StoreUnusable
from kvkeep.persistence.environment import Environment
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.ledger import quarantine
from kvkeep.prefixstore.restore import BrokenChunk

log = logging.getLogger("kvkeep")


class Quarantine:
    """The quarantine of a store, and what this process found and could not note down."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._found: frozenset[int] = frozenset()
        self.newer: frozenset[int] = frozenset()
        """Chunk ids of these that are not damaged, but of a newer format."""

    def ids(self) -> frozenset[int]:
        """Chunk ids that must not be used."""
        with self._env.begin() as txn:
            return self._found | {layout.from_u64(key) for key in txn.keys("quarantine")}

    def add(self, broken: BrokenChunk) -> None:
        """Stop using a frame. Damage is noted in the store where that can be written."""
        self._found |= {broken.chunk}
        if broken.newer:
            self.newer |= {broken.chunk}
        if broken.newer or self._env.read_only:
            return
        log.warning("kvkeep: chunk %d is damaged and put aside: %s", broken.chunk, broken)
        with suppress(StoreUnusable):
            with self._env.begin(write=True) as txn:
                quarantine(txn, broken.chunk, str(broken))
            # From now on the store says it, until a repair that may give the number away again.
            self._found -= {broken.chunk}

    def clear(self) -> None:
        """Forget what this process found, after a repair."""
        self._found = self.newer = frozenset()
