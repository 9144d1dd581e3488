"""Times to live: what a space did not use for so long is not served any more, and goes.

Life counts from the last use: a lookup that resumed a node, or a snapshot that builds on it.
What is pinned does not expire while the pin holds.
"""

from __future__ import annotations

import time
from dataclasses import replace

from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.pins import protected
from kvkeep.prefixstore.shelf import mark_of
from kvkeep.prefixstore.trie import Path

NANOSECONDS = 1_000_000_000
LONGEST = (1 << 63) - 1


def read_ttl(txn: Transaction, space: bytes) -> int | None:
    """The nanoseconds that an unused node of ``space`` lives; ``None`` without a limit."""
    data = txn.get("ttls", space)
    return layout.from_u64(data) if data is not None else None


def write_ttl(txn: Transaction, space: bytes, seconds: float) -> None:
    """Give a space a time to live, or none where ``seconds`` is infinite."""
    if seconds * NANOSECONDS >= LONGEST:
        txn.delete("ttls", space)
    else:
        txn.put("ttls", space, layout.u64(max(0, int(seconds * NANOSECONDS))))


def fresh(txn: Transaction, path: Path) -> Path:
    """The part of a path that has not expired."""
    ttl = read_ttl(txn, path.nodes[0].space) if path.nodes else None
    if ttl is None:
        return path
    before = time.time_ns() - ttl
    pinned: frozenset[int] | None = None
    for index, node in enumerate(path.nodes):
        mark = mark_of(txn, node.id)
        if mark is None or mark.when >= before:
            continue
        if pinned is None:
            hard, soft = protected(txn)
            pinned = frozenset(hard | soft)
        if node.id not in pinned:
            return replace(path, nodes=path.nodes[:index], matched=node.start, expired=True)
    return path
