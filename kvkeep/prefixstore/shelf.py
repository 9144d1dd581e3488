"""The order of eviction in the tables of a store: ``uses``, ``lru`` and ``ages``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.eviction.order import Mark

BATCH = 64


class StoreShelf:
    """A ``Shelf`` in one transaction. ``floor`` is for its owner to write down."""

    def __init__(self, txn: Transaction, floor: int) -> None:
        self.floor = floor
        self._txn = txn

    def get(self, node: int) -> Mark | None:
        """The mark of a node."""
        return mark_of(self._txn, node)

    def put(self, node: int, mark: Mark) -> None:
        """Keep the mark of a node, in place of an older one."""
        old = self.get(node)
        if old == mark:
            return
        self._take_out(node, old)
        self._txn.put("uses", layout.u64(node), layout.use_record(mark))
        self._txn.put("lru", layout.rank_key(mark.rank, mark.start, node), mark.key)
        self._txn.put("ages", layout.age_key(mark, node), mark.key)

    def drop(self, node: int) -> None:
        """Forget a node."""
        self._take_out(node, self.get(node))
        self._txn.delete("uses", layout.u64(node))

    def ascending(self) -> Iterator[tuple[int, Mark]]:
        """All nodes by rank; among equals the deepest first. Nodes may be dropped meanwhile."""
        for key in batched_keys(self._txn, "lru"):
            rank, start, node = layout.from_rank_key(key)
            mark = self.get(node)
            if mark is not None and (mark.rank, mark.start) == (rank, start):
                yield node, mark

    def ageing(self, space: bytes) -> Iterator[tuple[int, Mark]]:
        """The nodes of a space, the least recently used first. They may be dropped meanwhile."""
        for key in batched_keys(self._txn, "ages", space):
            when, node = layout.from_age_key(key)
            mark = self.get(node)
            if mark is not None and mark.when == when:
                yield node, mark

    def _take_out(self, node: int, mark: Mark | None) -> None:
        if mark is not None:
            self._txn.delete("lru", layout.rank_key(mark.rank, mark.start, node))
            self._txn.delete("ages", layout.age_key(mark, node))


def mark_of(txn: Transaction, node: int) -> Mark | None:
    """The mark of a node; ``None`` where it has none."""
    data = txn.get("uses", layout.u64(node))
    return layout.from_use_record(data) if data is not None else None


def batched_keys(txn: Transaction, database: str, prefix: bytes = b"") -> Iterator[bytes]:
    """The keys of a table that is written to meanwhile, read a few at a time."""
    start = prefix
    while keys := list(islice(txn.keys(database, prefix=prefix, start=start), BATCH)):
        yield from keys
        start = keys[-1] + b"\0"
