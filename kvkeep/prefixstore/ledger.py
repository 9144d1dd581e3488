"""Nodes and chunks written in one transaction, with all that is counted beside them.

The counts are exact: every value that a node owns is added and subtracted here and nowhere
else, in the transaction that writes or deletes it. So are the orders of eviction and of
thinning, which follow the nodes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgpack

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout, tenants
from kvkeep.prefixstore.eviction import DEFAULT, POLICIES
from kvkeep.prefixstore.eviction.order import Step, touch
from kvkeep.prefixstore.records import Node, PointRecord, Stored, check_of, unpack
from kvkeep.prefixstore.shelf import StoreShelf
from kvkeep.prefixstore.states import StateMark, States

POLICY = b"eviction"
COUNTERS = ("used", "state_bytes", "next_id", "floor", "state_floor")
"""Counters in ``meta``: bytes in use, of these in states, the last id, the highest rank that
was evicted, the highest score that was thinned."""


WITH_IDS = ("chunks", "uses")
"""Databases whose keys are the ids of chunks and of nodes."""


class Ledger:
    """A write transaction on the trie. Call ``settle`` before the transaction commits.

    ``space`` is the space of frames that are owned before a node refers to them.
    """

    def __init__(self, txn: Transaction, space: bytes = b"") -> None:
        self.txn = txn
        self.space = space
        self.used = counter(txn, "used")
        self.state_bytes = counter(txn, "state_bytes")
        self.shelf = StoreShelf(txn, counter(txn, "floor"))
        self.states = States(txn, counter(txn, "state_floor"))
        self.policy = POLICIES[policy_name(txn)]
        self._next = counter(txn, "next_id")
        self._spent: Counter[bytes] = Counter()

    def new_id(self) -> int:
        """An id that no node and no chunk has, whatever became of the counter."""
        self._next += 1
        if self._next >> 63 or self._is_taken(self._next):
            self._next = highest_id(self.txn) + 1
        return self._next

    def recount_ids(self) -> None:
        """Have new ids begin above every one that is taken."""
        self._next = highest_id(self.txn)

    def settle(self) -> None:
        """Write the counters."""
        found = (self.used, self.state_bytes, self._next, self.shelf.floor, self.states.floor)
        for name, value in zip(COUNTERS, found, strict=True):
            self.txn.put("meta", name.encode(), layout.u64(value))
        for key in self._spent:
            tenants.write_tenant(self.txn, key, self._tenant(key))
        self._spent.clear()

    def tenant(self, space: bytes) -> tenants.Tenant:
        """Quota and use of the tenant of ``space``, with what this transaction changed."""
        return self._tenant(tenants.tenant_of(self.txn, space))

    def recount(self, used: int, spent: Counter[bytes]) -> None:
        """Count ``used`` bytes in all, and those that each space ``spent``."""
        self.used = used
        self._spent.clear()
        for key in list(self.txn.keys("tenants")):
            tenants.write_tenant(self.txn, key, self._tenant(key)._replace(used=0))
        for space, used in spent.items():
            self._spent[tenants.tenant_of(self.txn, space)] += used

    def put_chunk(self, frame: Any) -> Stored:
        """Store a frame that nothing refers to yet; not counted until a node owns it."""
        chunk = self.new_id()
        self.txn.put("chunks", layout.u64(chunk), frame, append=True)
        return Stored(chunk, len(frame), check_of(frame))

    def own(self, size: int) -> None:
        """Count a frame of ``size`` bytes that a node of ``space`` now refers to."""
        self._count(self.space, layout.footprint(size))

    def disown(self, frame: Stored, reason: str) -> None:
        """Put an owned frame aside that no node refers to any longer, because it is damaged."""
        self._count(self.space, -layout.footprint(frame.size))
        quarantine(self.txn, frame.id, reason)

    def drop_chunk(self, chunk: int) -> None:
        """Delete a frame that no node refers to."""
        self.txn.delete("chunks", layout.u64(chunk))
        self.txn.delete("quarantine", layout.u64(chunk))

    def release(self, frame: Stored) -> None:
        """Delete a frame that a node owned. Counts what was counted, whatever is there now."""
        self._count(self.space, -layout.footprint(frame.size))
        self.drop_chunk(frame.id)

    def put_node(self, node: Node) -> None:
        """Write a node record, new or changed, and follow its states."""
        self._follow(node)
        data = node.pack()
        self._replace(node, data)
        self.txn.put("nodes", node.key, data)

    def drop_node(self, node: Node) -> int:
        """Delete a node with all that it owns; the bytes that this gave back."""
        before, self.space = self.used, node.space
        for point in node.points:
            self._forget_state(point.state)
        for frame in node.frames():
            self.release(frame)
        self._replace(node, b"")
        self.txn.delete("nodes", node.key)
        self.txn.delete("pins", layout.u64(node.id))
        self.shelf.drop(node.id)
        return before - self.used

    def drop_parts(self, node: Node, kept: Node) -> int:
        """Write ``kept`` in place of ``node``, whose other chunks go; the bytes given back."""
        before, self.space = self.used, node.space
        for frame in set(node.frames()) - set(kept.frames()):
            self.release(frame)
        self.put_node(kept)
        return before - self.used

    def split(self, node: Node, halves: Sequence[Node]) -> None:
        """Write the halves of a node, which were used when it was."""
        mark = self.shelf.get(node.id)
        for half in halves:
            self.put_node(half)
            if mark is not None:
                self.shelf.put(half.id, mark._replace(start=half.start, key=half.key))

    def touch(
        self,
        path: Sequence[Node],
        when: int | None = None,
        *,
        hits: int = 0,
        returned: bool = False,
    ) -> None:
        """Mark the nodes from the root to some node as used at ``when``, by default now.

        In nanoseconds since the epoch. See ``order.touch``. ``path`` is not read from after the
        first write.
        """
        steps = [Step(n.id, n.start, len(n.tokens), node_bytes(n), n.key) for n in path]
        now = time.time_ns() if when is None else when
        touch(self.shelf, self.policy, steps, now, hits=hits, returned=returned)

    def _is_taken(self, number: int) -> bool:
        key = layout.u64(number)
        return any(self.txn.get(database, key) is not None for database in WITH_IDS)

    def _follow(self, node: Node) -> None:
        """Have the marks of states say what the node's record is about to say."""
        new = {point.state: point for point in node.points if point.state}
        for point in self._old_points(node):
            if point.state and point.state not in new:
                self._forget_state(point.state)
        for chunk, point in new.items():
            mark = self.states.get(chunk)
            if mark is None:
                when = int(point.created * 1e9)
                mark = StateMark(0, when, point.offset, node.id, point.size, 0, False)
                self.state_bytes += layout.footprint(point.size)
                self.states.put(chunk, mark)
            elif mark.node != node.id:
                self.states.put(chunk, mark._replace(node=node.id))

    def _old_points(self, node: Node) -> tuple[PointRecord, ...]:
        """The points of the record that is replaced; none where that is another node's.

        The upper half of a split takes the place of the whole node, whose points it shares
        with the lower half.
        """
        data = self.txn.get("nodes", node.key)
        if data is not None:
            with suppress(CorruptFrame, NewerFormat):
                old = unpack(node.key, data)
                return old.points if old.id == node.id else ()
        return ()

    def _forget_state(self, chunk: int) -> None:
        mark = self.states.get(chunk) if chunk else None
        if mark is not None:
            self.state_bytes -= layout.footprint(mark.size)
            self.states.drop(chunk)

    def _replace(self, node: Node, data: bytes) -> None:
        old = self.txn.get("nodes", node.key)
        change = layout.footprint(len(data)) if data else 0
        self._count(node.space, change - (layout.footprint(len(old)) if old is not None else 0))

    def _count(self, space: bytes, change: int) -> None:
        self.used += change
        self._spent[tenants.tenant_of(self.txn, space)] += change

    def _tenant(self, key: bytes) -> tenants.Tenant:
        found = tenants.read_tenant(self.txn, key)
        return found._replace(used=max(0, found.used + self._spent[key]))


def node_bytes(node: Node) -> int:
    """Bytes of the rows and states that a node owns."""
    return int(node.refs["size"].sum()) + sum(point.size for point in node.points)


def highest_id(txn: Transaction) -> int:
    """The highest id of a node or a chunk, 0 where there is none."""
    keys = (key for database in WITH_IDS for key in txn.keys(database))
    return max(map(layout.from_u64, keys), default=0)


def quarantine(txn: Transaction, chunk: int, reason: str) -> None:
    """Note that a frame must not be used. It is kept: reading deletes nothing."""
    txn.put("quarantine", layout.u64(chunk), msgpack.packb([reason, time.time()]))


def counter(txn: Transaction, name: str) -> int:
    """A counter of the store; 0 where it was never written."""
    data = txn.get("meta", name.encode())
    return layout.from_u64(data) if data is not None else 0


def policy_name(txn: Transaction) -> str:
    """The eviction policy in force; the default where it was never chosen, or is not known."""
    data = txn.get("meta", POLICY)
    name = bytes(data).decode("ascii", "replace") if data is not None else DEFAULT
    return name if name in POLICIES else DEFAULT
