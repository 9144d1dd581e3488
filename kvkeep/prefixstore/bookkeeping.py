"""What is kept beside the nodes and follows from them: counts, and orders of eviction.

``check`` compares it with the nodes, ``rebuild`` makes it anew from them. What cannot be made
anew, such as the time of a last use, is kept where it can still be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout, tenants
from kvkeep.prefixstore.eviction.base import Use
from kvkeep.prefixstore.eviction.order import Mark
from kvkeep.prefixstore.ledger import Ledger, counter, node_bytes
from kvkeep.prefixstore.records import Node, unpack
from kvkeep.prefixstore.shelf import mark_of
from kvkeep.prefixstore.states import StateMark, state_of

Found = Callable[[str, str], None]
"""Takes what a finding is about, and what is wrong there."""

DERIVED = ("uses", "lru", "ages", "states", "fading")


def check(txn: Transaction, found: Found, *, whole: bool) -> None:
    """Report every record beside the nodes that does not agree with them.

    Not ``whole``: some nodes cannot be read. Then only what belongs to the others is compared.
    """
    spent: Counter[bytes] = Counter()
    nodes = states = state_bytes = 0
    for key, length, node in _nodes(txn):
        nodes += 1
        spent[tenants.tenant_of(txn, key[:16])] += layout.footprint(length)
        if node is None:
            continue
        _check_mark(txn, node, found)
        owned = sum(layout.footprint(frame.size) for frame in node.frames())
        spent[tenants.tenant_of(txn, key[:16])] += owned
        for point in node.points:
            if point.state:
                states += 1
                state_bytes += layout.footprint(point.size)
                _check_state(txn, point.state, node, found)
    if whole:
        _check_counts(txn, found, nodes, states, spent)
        if state_bytes != counter(txn, "state_bytes"):
            noted = counter(txn, "state_bytes")
            found("meta", f"counted {state_bytes:,} bytes of states, {noted:,} noted")


def _check_counts(
    txn: Transaction, found: Found, nodes: int, states: int, spent: Counter[bytes]
) -> None:
    counts = {name: txn.count(name) for name in DERIVED}
    for name, due in zip(DERIVED, (nodes, nodes, nodes, states, states), strict=True):
        if counts[name] != due:
            found(name, f"{counts[name]:,} records where {due:,} are due")
    for tenant in {bytes(k) for k in txn.keys("tenants")} | set(spent):
        noted = tenants.read_tenant(txn, tenant).used
        if noted != spent[tenant]:
            found("tenants", f"counted {spent[tenant]:,} bytes of one, {noted:,} noted")


def rebuild(ledger: Ledger, *, used: int, reorder: bool = False) -> None:
    """Count ``used`` bytes in all and what each tenant uses, and order nodes and states again.

    With ``reorder`` nodes are ranked anew, as the policy in force would have them. What is kept
    for nodes of a newer format stays.
    """
    txn = ledger.txn
    marks: dict[int, Mark] = {}
    states: dict[int, StateMark] = {}
    parents: dict[int, int] = {}
    uses: dict[int, Use] = {}
    unread: set[bytes] = set()
    spent: Counter[bytes] = Counter()
    for key, length, node in _nodes(txn):
        spent[key[:16]] += layout.footprint(length)
        if node is None:
            unread.add(key)
            continue
        old = _mark(txn, node.id)
        rank, when, hits = (old.rank, old.when, old.hits) if old is not None else (0, 0, 0)
        marks[node.id] = Mark(rank, when, node.start, hits, key)
        uses[node.id] = Use(when, hits, len(node.tokens), node_bytes(node))
        parents[node.id] = layout.from_u64(key[16:24])
        spent[key[:16]] += sum(layout.footprint(frame.size) for frame in node.frames())
        for point in node.points:
            if point.state:
                kept = _state(txn, point.state)
                fresh = StateMark(0, int(point.created * 1e9), point.offset, node.id, 0, 0, False)
                mark = kept if kept is not None else fresh
                states[point.state] = mark._replace(
                    offset=point.offset, node=node.id, size=point.size
                )
    if reorder:
        ledger.shelf.floor = min((mark.when for mark in marks.values()), default=0)
        for node_id, use in uses.items():
            rank = ledger.policy.rank(use, ledger.shelf.floor)
            marks[node_id] = marks[node_id]._replace(rank=rank)
    for node_id in sorted(marks, key=lambda n: -marks[n].start):
        above, mine = marks.get(parents[node_id]), marks[node_id]
        if above is not None:
            marks[parents[node_id]] = above._replace(
                rank=max(above.rank, mine.rank), when=max(above.when, mine.when)
            )
    _keep(txn, unread, marks, states)
    _empty(txn, marks)
    for node_id, node_mark in marks.items():
        ledger.shelf.put(node_id, node_mark)
    for chunk, state in states.items():
        ledger.states.put(chunk, state)
    ledger.state_bytes = sum(layout.footprint(state.size) for state in states.values())
    ledger.recount(used, spent)


def _keep(
    txn: Transaction, unread: set[bytes], marks: dict[int, Mark], states: dict[int, StateMark]
) -> None:
    """Add the marks of nodes that are stored and cannot be read, and of their states."""
    if not unread:
        return
    for key in list(txn.keys("uses")):
        mark = _mark(txn, layout.from_u64(key))
        if mark is not None and mark.key in unread:
            marks[layout.from_u64(key)] = mark
    for key in list(txn.keys("states")):
        state = _state(txn, layout.from_u64(key))
        if state is not None and state.node in marks:
            states.setdefault(layout.from_u64(key), state)


def _empty(txn: Transaction, marks: dict[int, Mark]) -> None:
    """Clear the derived tables, and drop pins on nodes that are not stored."""
    for name in DERIVED:
        for key in list(txn.keys(name)):
            txn.delete(name, key)
    kept = {layout.u64(node) for node in marks}
    for key in list(txn.keys("pins")):
        if key not in kept:
            txn.delete("pins", key)


def _check_mark(txn: Transaction, node: Node, found: Found) -> None:
    mark = _mark(txn, node.id)
    if mark is None or mark.key != node.key or mark.start != node.start:
        found(f"use of node {node.id:x}", "it is not that of the node")
        return
    ranked = txn.get("lru", layout.rank_key(mark.rank, mark.start, node.id))
    aged = txn.get("ages", layout.age_key(mark, node.id))
    if ranked is None or aged is None or not bytes(ranked) == bytes(aged) == node.key:
        found(f"use of node {node.id:x}", "its records disagree")


def _check_state(txn: Transaction, chunk: int, owner: Node, found: Found) -> None:
    mark = _state(txn, chunk)
    if mark is None or mark.node != owner.id:
        found(f"state {chunk}", "it has no place in the order of thinning")
    elif txn.get("fading", layout.rank_key(mark.score, mark.offset, chunk)) is None:
        found(f"state {chunk}", "its two records disagree")


def _nodes(txn: Transaction) -> Iterator[tuple[bytes, int, Node | None]]:
    """Key, bytes and node of every record; no node where it cannot be read."""
    for key, data in txn.items("nodes"):
        node = None
        with suppress(CorruptFrame, NewerFormat):
            node = unpack(key, data)
        yield key, len(data), node


def _mark(txn: Transaction, node: int) -> Mark | None:
    with suppress(CorruptFrame):
        return mark_of(txn, node)
    return None


def _state(txn: Transaction, chunk: int) -> StateMark | None:
    with suppress(CorruptFrame):
        return state_of(txn, chunk)
    return None
