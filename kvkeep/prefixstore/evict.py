"""Making room: the least recently used leaves go first.

A node is hardly ever used later than its ancestors, and among equals the deepest sorts first, so
that a pass over ``lru`` meets leaves before the nodes that become leaves by their going.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.records import detach, unpack
from kvkeep.prefixstore.trie import has_children


@dataclass(frozen=True)
class Evicted:
    """What an eviction removed."""

    nodes: int = 0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: Evicted) -> Evicted:
        return Evicted(
            self.nodes + other.nodes, self.tokens + other.tokens, self.bytes + other.bytes
        )


def evict(
    ledger: Ledger,
    *,
    to: int | None = None,
    before: int | None = None,
    space: bytes | None = None,
    protect: Container[int] = (),
) -> Evicted:
    """Drop leaves, least recently used first, until no more than ``to`` bytes are used.

    Only leaves last used before ``before`` (nanoseconds since the epoch) and of ``space``
    go, where these are given; ``to=None`` drops all of them. Nodes whose ids are in
    ``protect`` stay.
    """
    gone = Evicted()
    while True:
        more = _sweep(ledger, to, before, space, protect)
        gone += more
        # Again: an edge that was split after it was last used may come before its children.
        if not more.nodes or (to is not None and ledger.used <= to):
            return gone


def _sweep(
    ledger: Ledger,
    to: int | None,
    before: int | None,
    space: bytes | None,
    protect: Container[int],
) -> Evicted:
    """One pass over all nodes in order of use."""
    gone = Evicted()
    for key, value in list(ledger.txn.items("lru")):
        if to is not None and ledger.used <= to:
            break
        when, _, node_id = layout.from_lru_key(key)
        if before is not None and when >= before:
            break
        node_key = bytes(value)
        if (space is not None and node_key[:16] != space) or node_id in protect:
            continue
        if has_children(ledger.txn, node_key[:16], node_id):
            continue
        data = ledger.txn.get("nodes", node_key)
        if data is None:
            continue
        try:
            node = detach(unpack(node_key, data))
        except (CorruptFrame, NewerFormat):
            continue  # what cannot be read is never deleted by the way
        if node.id != node_id:
            continue
        gone += Evicted(1, len(node.tokens), ledger.drop_node(node))
    return gone
