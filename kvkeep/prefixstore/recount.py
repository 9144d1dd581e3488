"""Checking and recounting a store from its own records. Reads only; see ``repair``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.environment import Environment, Transaction
from kvkeep.persistence.frame import Frame
from kvkeep.persistence.opening import DATA_FILE
from kvkeep.prefixstore import bookkeeping, layout
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.ledger import counter, highest_id
from kvkeep.prefixstore.owned import Owned, where
from kvkeep.prefixstore.recipe import recipe_id
from kvkeep.prefixstore.records import Node, check_of, unpack
from kvkeep.prefixstore.trie import load_recipe

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Problem:
    """One finding. A newer format and an orphan are not ``damage``."""

    what: str
    where: str
    detail: str
    damage: bool = True


@dataclass
class Audit:
    """What a recount found: ``nodes`` that could be read and others that could not, chunks and
    their bytes, resume points.
    """

    nodes: int = 0
    unread: int = 0
    chunks: int = 0
    points: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """Whether any finding is damage."""
        return any(problem.damage for problem in self.problems)

    @property
    def newer_nodes(self) -> bool:
        """Whether there are nodes that cannot be read: what they own cannot be told apart."""
        return any(p.what == "newer" and p.where.startswith("node ") for p in self.problems)

    def found(self, what: str, where: str, detail: str, *, damage: bool = True) -> None:
        """Note a problem."""
        self.problems.append(Problem(what, where, detail, damage))


def verify(env: Environment, progress: Progress | None = None) -> Audit:
    """Read every record of the store, check it, and recount what the counters claim.

    LMDB's pages come first. Where one is damaged, that is all that is reported: the records
    behind it cannot be counted. ``progress`` is called with bytes read so far and bytes in all.
    Changes nothing.
    """
    audit = Audit()
    for fault in env.check().faults:
        audit.found("damaged", DATA_FILE, fault)
    if audit.problems:
        return audit
    with env.begin() as txn:
        owned = _check_nodes(audit, txn)
        _check_chunks(audit, txn, owned, progress)
        bookkeeping.check(
            txn,
            lambda where, detail: audit.found("count", where, detail),
            whole=not audit.unread,
        )
        _check_spaces(audit, txn)
        if counter(txn, "next_id") < highest_id(txn):
            audit.found("count", "meta", "the next id is taken")
        used, recorded = bytes_in_use(txn, owned, whole=True), counter(txn, "used")
        if used != recorded and not audit.unread:
            audit.found("count", "meta", f"counted {used:,} bytes, recorded {recorded:,}")
    return audit


def bytes_in_use(txn: Transaction, owned: Owned, *, whole: bool) -> int:
    """What the counter of used bytes should say, where nodes that can be read own what ``owned``
    says.

    Not ``whole``: there are nodes that cannot be read, which own what nobody else does.
    """
    used = sum(layout.footprint(len(data)) for _, data in txn.items("nodes"))
    frames = owned.frames()
    ids, first = np.unique(frames["id"], return_index=True)
    used += sum(layout.footprint(int(size)) for size in frames["size"][first])
    if not whole:
        known = {*ids.tolist(), *_pending(txn)}
        for key, data in txn.items("chunks"):
            if layout.from_u64(key) not in known and txn.get("quarantine", key) is None:
                used += layout.footprint(len(data))
    return used


def readable(txn: Transaction) -> Iterator[tuple[bytes, Node]]:
    """Every node that can be read, with its key."""
    for key, data in txn.items("nodes"):
        with suppress(CorruptFrame, NewerFormat):
            yield key, unpack(key, data)


def owned_by_nodes(txn: Transaction) -> Owned:
    """What the nodes own that can be read."""
    return Owned(node for _, node in readable(txn))


def fault_of(node: Node) -> str:
    """What is wrong with a node whose checksum is right; nothing if nothing is."""
    key = layout.node_key(node.space, layout.from_u64(node.key[16:24]), int(node.tokens[0]))
    if key != node.key:
        return "its first token is not the one it is filed under"
    outside = (node.refs["start"] < node.start) | (node.refs["stop"] > node.stop)
    if outside.any() or any(not node.start < p.offset <= node.stop for p in node.points):
        return "it refers to positions outside its run"
    return ""


def recipe_fault(txn: Transaction, recipe: bytes) -> str:
    """Why a recipe that nodes refer to is lost; nothing if it is not."""
    data = txn.get("recipes", recipe)
    if data is None:
        return "nodes refer to it"
    return "" if recipe_id(data) == recipe else "it does not match its id"


def _check_nodes(audit: Audit, txn: Transaction) -> Owned:
    """What the nodes own that can be read."""
    owned = Owned()
    recipes = set(txn.keys("recipes"))
    for key, data in txn.items("nodes"):
        try:
            node = unpack(key, data)
        except CorruptFrame as error:
            audit.unread += 1
            audit.found("damaged", where(key[16:]), error.problem)
            continue
        except NewerFormat as error:
            audit.unread += 1
            audit.found("newer", where(key[16:]), error.problem, damage=False)
            continue
        audit.nodes += 1
        audit.points += len(node.points)
        owned.add(node)
        recipes.update(node.recipes)
        if fault := fault_of(node):
            audit.found("damaged", where(key[16:]), fault)
    if not audit.newer_nodes:
        for number in owned.orphans():
            audit.found("unreachable", owned.where(number), "its parent is not stored")
    for recipe in sorted(recipes):
        name = f"recipe {recipe.hex()}"
        if fault := recipe_fault(txn, recipe):
            audit.found("damaged", name, fault)
        elif load_recipe(txn, recipe) is None:
            audit.found("newer", name, "it cannot be read by this version", damage=False)
    return owned


def _check_chunks(audit: Audit, txn: Transaction, owned: Owned, progress: Progress | None) -> None:
    total, pending = counter(txn, "used"), _pending(txn)
    frames = owned.frames()
    for again in np.flatnonzero(frames["id"][1:] == frames["id"][:-1]):
        first, second = frames["node"][again : again + 2].tolist()
        audit.found("chunk owned twice", owned.where(second), f"also by {owned.run(first)}")

    def missing(frame: Any) -> None:
        audit.found("missing", f"chunk {frame['id']}", f"{owned.run(frame['node'])} refers to it")

    at = 0
    for key, data in txn.items("chunks"):
        chunk = layout.from_u64(key)
        name, owner, due = f"chunk {chunk}", "nobody", None
        while at < len(frames) and frames[at]["id"] < chunk:
            missing(frames[at])
            at += 1
        while at < len(frames) and frames[at]["id"] == chunk:
            *_, due, number = frames[at].item()
            owner, at = owned.run(number), at + 1
        audit.chunks += 1
        audit.bytes += len(data)
        if progress is not None:
            progress(audit.bytes, max(total, audit.bytes))
        try:
            _check_frame(data, due)
            if txn.get("quarantine", key) is not None:
                raise CorruptFrame("It was put aside")
        except NewerFormat as error:
            audit.found("newer", name, error.problem, damage=False)
        except CorruptFrame as error:
            audit.found("damaged", name, f"{error.problem} ({owner})")
        else:
            if due is None and chunk not in pending and not audit.newer_nodes:
                audit.found("orphan", name, "no node refers to it", damage=False)
    for frame in frames[at:]:
        missing(frame)


def _check_frame(data: memoryview, check: int | None) -> None:
    frame = Frame.open(data)
    if check is not None and check_of(data) != check:
        raise CorruptFrame("Another frame lies in its place")
    for name in frame.specs:
        frame.read(name)


def space_fault(key: bytes, data: memoryview) -> str:
    """What is wrong with the record of a space; nothing if nothing is."""
    try:
        return "" if Identity.unpack(data)[0].id == key else "it is the record of another"
    except CorruptFrame as error:
        return error.problem


def _check_spaces(audit: Audit, txn: Transaction) -> None:
    for key, data in txn.items("spaces"):
        if fault := space_fault(key, data):
            audit.found("damaged", f"space {key.hex()}", fault)


def _pending(txn: Transaction) -> set[int]:
    """Chunks that are written and not yet published."""
    return {layout.from_pair(key)[1] for key in txn.keys("pending")}
