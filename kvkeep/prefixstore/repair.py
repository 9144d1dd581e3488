"""Removing from a store what ``recount`` found that cannot be used, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvkeep.errors import CorruptFrame, Damaged, NewerFormat
from kvkeep.persistence.environment import Environment, Transaction
from kvkeep.persistence.opening import DATA_FILE, REBUILD
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.bookkeeping import rebuild
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.records import Node, detach, unpack
from kvkeep.prefixstore.recount import (
    Audit,
    bytes_in_use,
    fault_of,
    owned_by_nodes,
    readable,
    recipe_fault,
    space_fault,
    verify,
)


def repair(env: Environment) -> Audit:
    """Remove what cannot be used and recount; returns the audit that called for it.

    Damaged and missing chunks are taken out of their nodes, resume points that lost their
    state go, and so does what a lost recipe described; unreadable or unreachable nodes and
    orphans are deleted; a space is described again when it is next used. Records of a newer
    format stay, with all that they may own. What is counted and ordered beside them is made
    anew. Raises ``Damaged`` for damaged pages, which the records cannot mend.
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
        while gone := _unusable(txn, whole=not audit.newer_nodes):
            for key in gone:
                _drop(ledger, key)
        for key, data in list(txn.items("spaces")):
            if space_fault(key, data):
                txn.delete("spaces", key)
        lost = _drop_recipes(txn)
        for node in [detach(node) for _, node in readable(txn)]:
            _mend(ledger, node, bad, lost)
        for chunk in bad:
            ledger.drop_chunk(chunk)
        ledger.recount_ids()
        owned = owned_by_nodes(txn)
        rebuild(ledger, used=bytes_in_use(txn, owned, whole=not audit.newer_nodes))
        ledger.settle()
    return audit


def _unusable(txn: Transaction, *, whole: bool) -> list[bytes]:
    """Nodes that are damaged, or, in a ``whole`` trie, whose parent is not stored."""
    ids, parents, gone = {layout.ROOT}, [], []
    for key, data in txn.items("nodes"):
        try:
            node = unpack(key, data)
        except CorruptFrame:
            gone.append(key)
            continue
        except NewerFormat:
            continue
        if fault_of(node):
            gone.append(key)
            continue
        ids.add(node.id)
        parents.append((key, layout.from_u64(key[16:24])))
    return gone + [key for key, parent in parents if whole and parent not in ids]


def _drop(ledger: Ledger, key: bytes) -> None:
    data = ledger.txn.get("nodes", key)
    if data is None:
        return
    try:
        ledger.drop_node(detach(unpack(key, data)))
    except CorruptFrame:
        ledger.txn.delete("nodes", key)


def _drop_recipes(txn: Transaction) -> set[bytes]:
    """Delete damaged recipes; those that nodes refer to in vain."""
    listed = set(txn.keys("recipes")) | {r for _, node in readable(txn) for r in node.recipes}
    lost = {recipe for recipe in listed if recipe_fault(txn, recipe)}
    for recipe in lost:
        txn.delete("recipes", recipe)
    return lost


def _mend(ledger: Ledger, node: Node, bad: set[int], lost: set[bytes]) -> None:
    """Take out of a node what is bad and what belongs to a lost recipe."""
    mended = node.without_recipes(lost)
    keep = ~np.isin(mended.refs["chunk"], list(bad))
    points = tuple(p for p in mended.points if p.state not in bad)
    mended = replace(mended, refs=mended.refs[keep], points=points)
    gone = set(node.frames()) - set(mended.frames())
    if gone or len(mended.points) != len(node.points) or mended.recipes != node.recipes:
        ledger.put_node(mended)
    for frame in gone:
        ledger.drop_chunk(frame.id)
