"""Nodes and chunks written in one transaction, with the byte count kept beside them.

The count of used bytes is exact: every value that a node owns is added and subtracted here
and nowhere else, in the transaction that writes or deletes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgpack

from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.records import Node, Stored, check_of


class Ledger:
    """A write transaction on the trie. Call ``settle`` before the transaction commits."""

    def __init__(self, txn: Transaction) -> None:
        self.txn = txn
        self.used = counter(txn, "used")
        self._next = counter(txn, "next_id")

    def new_id(self) -> int:
        """An id that no node and no chunk ever had."""
        self._next += 1
        return self._next

    def settle(self) -> None:
        """Write the counters."""
        self.txn.put("meta", b"used", layout.u64(self.used))
        self.txn.put("meta", b"next_id", layout.u64(self._next))

    def put_chunk(self, frame: Any) -> Stored:
        """Store a frame that nothing refers to yet; not counted until a node owns it."""
        chunk = self.new_id()
        self.txn.put("chunks", layout.u64(chunk), frame, append=True)
        return Stored(chunk, len(frame), check_of(frame))

    def own(self, size: int) -> None:
        """Count a frame of ``size`` bytes that a node now refers to."""
        self.used += layout.footprint(size)

    def disown(self, frame: Stored, reason: str) -> None:
        """Put an owned frame aside that no node refers to any longer, because it is damaged."""
        self.used -= layout.footprint(frame.size)
        quarantine(self.txn, frame.id, reason)

    def drop_chunk(self, chunk: int) -> None:
        """Delete a frame that no node refers to."""
        self.txn.delete("chunks", layout.u64(chunk))
        self.txn.delete("quarantine", layout.u64(chunk))

    def release(self, frame: Stored) -> None:
        """Delete a frame that a node owned. Counts what was counted, whatever is there now."""
        self.used -= layout.footprint(frame.size)
        self.drop_chunk(frame.id)

    def put_node(self, node: Node) -> None:
        """Write a node record, new or changed."""
        old = self.txn.get("nodes", node.key)
        if old is not None:
            self.used -= layout.footprint(len(old))
        data = node.pack()
        self.txn.put("nodes", node.key, data)
        self.used += layout.footprint(len(data))

    def drop_node(self, node: Node) -> int:
        """Delete a node with all that it owns; the bytes that this gave back."""
        before = self.used
        for frame in node.frames():
            self.release(frame)
        data = self.txn.get("nodes", node.key)
        if data is not None:
            self.used -= layout.footprint(len(data))
            self.txn.delete("nodes", node.key)
        self._forget(node.id)
        return before - self.used

    def touch(self, nodes: Iterable[Node], when: int | None = None) -> None:
        """Mark nodes as used at ``when`` (nanoseconds since the epoch, default now).

        Never moves a use back, so that no node is older than what hangs below it.
        """
        now = time.time_ns() if when is None else when
        for node in nodes:
            latest = max(now, self.last_use(node))
            self._forget(node.id)
            use = layout.use_record(latest, node.start, node.key)
            self.txn.put("uses", layout.u64(node.id), use)
            self.txn.put("lru", layout.lru_key(latest, node.start, node.id), node.key)

    def last_use(self, node: Node) -> int:
        """When the node was last used, in nanoseconds since the epoch; 0 if never."""
        data = self.txn.get("uses", layout.u64(node.id))
        return layout.from_use_record(data)[0] if data is not None else 0

    def _forget(self, node_id: int) -> None:
        key = layout.u64(node_id)
        data = self.txn.get("uses", key)
        if data is None:
            return
        when, start, _ = layout.from_use_record(data)
        self.txn.delete("lru", layout.lru_key(when, start, node_id))
        self.txn.delete("uses", key)


def quarantine(txn: Transaction, chunk: int, reason: str) -> None:
    """Note that a frame must not be used. It is kept: reading deletes nothing."""
    txn.put("quarantine", layout.u64(chunk), msgpack.packb([reason, time.time()]))


def counter(txn: Transaction, name: str) -> int:
    """A counter of the store; 0 where it was never written."""
    data = txn.get("meta", name.encode())
    return layout.from_u64(data) if data is not None else 0
