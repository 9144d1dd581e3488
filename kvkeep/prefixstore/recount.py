"""Recounting a store from its own records. ``verify`` reads only; ``repair`` is separate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from kvkeep.errors import CorruptFrame, Damaged, NewerFormat
from kvkeep.persistence.environment import DATA_FILE, REBUILD, Environment, Transaction
from kvkeep.persistence.frame import Frame
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.ledger import Ledger, counter
from kvkeep.prefixstore.records import Node, Stored, check_of, detach, unpack
from kvkeep.prefixstore.trie import load_recipe

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Problem:
    """One finding. ``repairable`` ones go away with ``repair``; a newer format is not damage."""

    what: str
    where: str
    detail: str
    damage: bool = True


@dataclass
class Audit:
    """What a recount found."""

    nodes: int = 0
    chunks: int = 0
    points: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """Whether any finding is damage."""
        return any(problem.damage for problem in self.problems)


def verify(env: Environment, progress: Progress | None = None) -> Audit:
    """Read every record of the store, check it, and recount what the counters claim.

    LMDB's pages come first. Where one is damaged, that is all that is reported: the records
    behind it cannot be counted. ``progress`` is called with bytes read so far and bytes in all.
    Changes nothing.
    """
    audit = Audit()
    for fault in env.check().faults:
        _found(audit, "damaged", DATA_FILE, fault)
    if audit.problems:
        return audit
    with env.begin() as txn:
        total = counter(txn, "used")
        owners: dict[int, tuple[str, Stored]] = {}
        used = 0
        ids: set[int] = {layout.ROOT}
        parents: list[tuple[str, int]] = []
        for key, data in txn.items("nodes"):
            used += layout.footprint(len(data))
            where = f"node {key[16:].hex()}"
            node = _node(audit, key, data, where)
            if node is None:
                continue
            ids.add(node.id)
            parents.append((where, layout.from_u64(key[16:24])))
            _check_node(audit, txn, node, where)
            for frame in node.frames():
                if frame.id in owners:
                    _found(audit, "chunk owned twice", where, f"also by {owners[frame.id][0]}")
                owners[frame.id] = _span(node), frame
        for where, parent in parents:
            if parent not in ids:
                _found(audit, "unreachable", where, "its parent is not stored")
        waiting = {layout.from_pair(k)[1] for k in txn.keys("pending")}
        for key, data in txn.items("chunks"):
            chunk = layout.from_u64(key)
            audit.chunks += 1
            audit.bytes += len(data)
            if progress is not None:
                progress(audit.bytes, max(total, audit.bytes))
            if chunk in owners:
                used += layout.footprint(len(data))
            elif chunk not in waiting and txn.get("quarantine", key) is None:
                _found(audit, "orphan", f"chunk {chunk}", "no node refers to it", damage=False)
            _check_frame(audit, data, f"chunk {chunk}", *owners.get(chunk, ("nobody", None)))
        for chunk, (owner, _) in owners.items():
            if txn.get("chunks", layout.u64(chunk)) is None:
                _found(audit, "missing", f"chunk {chunk}", f"{owner} refers to it")
        _check_uses(audit, txn)
        if used != total and not any(p.what == "damaged" for p in audit.problems):
            _found(audit, "count", "meta", f"counted {used:,} bytes, recorded {total:,}")
    return audit


def repair(env: Environment) -> Audit:
    """Remove what cannot be used and recount; returns the audit that called for it.

    Damaged and missing chunks are taken out of their nodes, resume points that lost their
    state go, unreadable or unreachable nodes and orphans are deleted. Records of a newer
    format stay. Raises ``Damaged`` for damaged pages, which the records cannot mend.
    """
    audit = verify(env)
    for problem in audit.problems:
        if problem.where == DATA_FILE:
            raise Damaged(f"{env.folder}: {problem.detail}", remedy=REBUILD)
    bad = {
        int(problem.where.split()[1])
        for problem in audit.problems
        if problem.where.startswith("chunk ") and problem.what != "newer"
    }
    with env.begin(write=True) as txn:
        ledger = Ledger(txn)
        while gone := _unreachable(txn):
            for key in gone:
                _drop_unreadable(ledger, key)
        bad |= {layout.from_u64(key) for key in txn.keys("quarantine")}
        for node in [detach(node) for node in _readable(txn)]:
            keep = ~np.isin(node.refs["chunk"], list(bad))
            points = tuple(p for p in node.points if p.state not in bad)
            if not keep.all() or len(points) != len(node.points):
                ledger.put_node(replace(node, refs=node.refs[keep], points=points))
        for chunk in bad:
            ledger.drop_chunk(chunk, owned=False)
            txn.delete("quarantine", layout.u64(chunk))
        ledger.used = _recount(txn)
        ledger.settle()
    return audit


def _node(audit: Audit, key: bytes, data: memoryview, where: str) -> Node | None:
    try:
        node = unpack(key, data)
    except CorruptFrame as error:
        _found(audit, "damaged", where, error.problem)
        return None
    except NewerFormat as error:
        _found(audit, "newer", where, error.problem, damage=False)
        return None
    audit.nodes += 1
    audit.points += len(node.points)
    return node


def _check_node(audit: Audit, txn: Transaction, node: Node, where: str) -> None:
    if (
        layout.node_key(node.space, layout.from_u64(node.key[16:24]), int(node.tokens[0]))
        != node.key
    ):
        _found(audit, "damaged", where, "its first token is not the one it is filed under")
    outside = (node.refs["start"] < node.start) | (node.refs["stop"] > node.stop)
    if outside.any() or any(not node.start < p.offset <= node.stop for p in node.points):
        _found(audit, "damaged", where, "it refers to positions outside its run")
    if txn.get("uses", layout.u64(node.id)) is None:
        _found(audit, "count", where, "it has no record of its last use")
    for recipe in node.recipes:
        if load_recipe(txn, recipe) is None:
            _found(audit, "newer", where, "its recipe cannot be read by this version", damage=False)


def _check_frame(
    audit: Audit, data: memoryview, where: str, owner: str, due: Stored | None
) -> None:
    try:
        frame = Frame.open(data)
        if due is not None and check_of(data) != due.check:
            raise CorruptFrame("Another frame lies in its place")
        for name in frame.specs:
            frame.read(name)
    except NewerFormat as error:
        _found(audit, "newer", where, error.problem, damage=False)
    except CorruptFrame as error:
        _found(audit, "damaged", where, f"{error.problem} ({owner})")


def _check_uses(audit: Audit, txn: Transaction) -> None:
    for key, node_key in txn.items("lru"):
        when, start, node_id = layout.from_lru_key(key)
        data = txn.get("uses", layout.u64(node_id))
        if data is None or layout.from_use_record(data) != (when, start, bytes(node_key)):
            _found(audit, "count", f"use of node {node_id}", "its two records disagree")
        elif txn.get("nodes", bytes(node_key)) is None:
            _found(audit, "count", f"use of node {node_id}", "the node is not stored")


def _unreachable(txn: Transaction) -> list[bytes]:
    """Nodes that cannot be read, or whose parent is not stored."""
    ids, parents, gone = {layout.ROOT}, [], []
    for key, data in txn.items("nodes"):
        try:
            node = unpack(key, data)
        except CorruptFrame:
            gone.append(key)
            continue
        except NewerFormat:
            continue
        ids.add(node.id)
        parents.append((key, layout.from_u64(key[16:24])))
    return gone + [key for key, parent in parents if parent not in ids]


def _drop_unreadable(ledger: Ledger, key: bytes) -> None:
    data = ledger.txn.get("nodes", key)
    if data is None:
        return
    try:
        ledger.drop_node(detach(unpack(key, data)))
    except CorruptFrame:
        ledger.txn.delete("nodes", key)
        for use, record in list(ledger.txn.items("uses")):
            if layout.from_use_record(record)[2] == key:
                when, start, _ = layout.from_use_record(record)
                ledger.txn.delete("lru", layout.lru_key(when, start, layout.from_u64(use)))
                ledger.txn.delete("uses", use)


def _recount(txn: Transaction) -> int:
    used = sum(layout.footprint(len(data)) for _, data in txn.items("nodes"))
    for chunk in {chunk for node in _readable(txn) for chunk in node.chunk_ids()}:
        data = txn.get("chunks", layout.u64(chunk))
        used += layout.footprint(len(data)) if data is not None else 0
    return used


def _readable(txn: Transaction) -> Iterator[Node]:
    for key, data in txn.items("nodes"):
        with suppress(CorruptFrame, NewerFormat):
            yield unpack(key, data)


def _span(node: Node) -> str:
    return f"tokens {node.start:,}-{node.stop:,} of node {node.id}"


def _found(audit: Audit, what: str, where: str, detail: str, *, damage: bool = True) -> None:
    audit.problems.append(Problem(what, where, detail, damage))
