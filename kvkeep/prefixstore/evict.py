"""Giving nodes up, and what becomes of no use by their going."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import merge

import numpy as np

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.prefixstore import lapsed, layout
from kvkeep.prefixstore.eviction.order import Mark, victims
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.records import Node, detach, unpack
from kvkeep.prefixstore.shelf import mark_of
from kvkeep.prefixstore.trie import children, has_children, load_recipe

LOOKED_AT = 256
"""Nodes below another that are looked at for a resume point, before one is taken for granted."""


@dataclass(frozen=True)
class Evicted:
    """What an eviction removed. ``nodes`` are those that went whole; ``states`` went alone."""

    nodes: int = 0
    tokens: int = 0
    bytes: int = 0
    states: int = 0

    def __add__(self, other: Evicted) -> Evicted:
        return Evicted(
            self.nodes + other.nodes,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.states + other.states,
        )


class Tally:
    """What went, by space and reason."""

    def __init__(self) -> None:
        self.parts: dict[tuple[bytes, str], Evicted] = {}

    def add(self, space: bytes, reason: str, gone: Evicted) -> None:
        """Count one more going."""
        key = (space, reason)
        self.parts[key] = self.parts.get(key, Evicted()) + gone

    @property
    def total(self) -> Evicted:
        """All of it."""
        return sum(self.parts.values(), Evicted())


def leaves(ledger: Ledger, spare: Container[int]) -> Iterator[Node]:
    """The leaves in the order of the policy, except those in ``spare``.

    Whoever takes one gives it up, in part or whole, before the next is asked for.
    """
    found = True
    while found:  # again, where an order that was damaged put a node before what hangs on it
        found = False
        for node_id, mark in victims(ledger.shelf, lambda n, m: _is_leaf(ledger, n, m), spare):
            node = _read(ledger, mark)
            if node is not None and node.id == node_id:
                found = True
                yield node


def oldest(ledger: Ledger, spaces: Iterable[bytes], spare: Container[int]) -> Iterator[Node]:
    """The leaves of ``spaces``, the least recently used first, whatever the policy."""
    named, found = list(spaces), True
    while found:
        found = False
        streams = (ledger.shelf.ageing(space) for space in named)
        for node_id, mark in merge(*streams, key=lambda item: (item[1].when, -item[1].start)):
            if node_id not in spare and _is_leaf(ledger, node_id, mark):
                node = _read(ledger, mark)
                if node is not None and node.id == node_id:
                    found = True
                    yield node


def give_up(
    ledger: Ledger,
    node: Node,
    excess: int | None = None,
    spare: Container[int] = (),
    *,
    expired: bool = False,
) -> Evicted:
    """Drop a leaf; or only its end, where that gives ``excess`` bytes back.

    Rows that nothing can use without it go too, except those of nodes in ``spare``.
    """
    cut = _cut(node, excess) if excess is not None else node.start
    lapsed.remember(ledger.txn, node, cut, expired=expired)
    before = ledger.used
    if cut == node.start:
        gone = Evicted(1, len(node.tokens))
        ledger.drop_node(node)
        at = layout.from_u64(node.key[16:24])
    else:
        gone = Evicted(0, node.stop - cut)
        kept = replace(
            node,
            tokens=node.tokens[: cut - node.start],
            refs=node.refs[node.refs["start"] < cut],
            points=tuple(p for p in node.points if p.offset <= cut),
        )
        ledger.drop_parts(node, kept)
        at = node.id
    for recipe in node.recipes:
        gone += prune(ledger, at, recipe, spare)
    return replace(gone, bytes=before - ledger.used)


def thin(ledger: Ledger, chunk: int, spare: Container[int]) -> tuple[bytes, Evicted] | None:
    """Drop a resume point with its state, and rows that no other one reads any more.

    Rows of nodes in ``spare`` stay. The space and what went; ``None`` where the record of its
    node cannot be read.
    """
    state = ledger.states.get(chunk)
    mark = mark_of(ledger.txn, state.node) if state is not None else None
    node = _read(ledger, mark) if mark is not None else None
    point = next((p for p in node.points if p.state == chunk), None) if node is not None else None
    if node is None or point is None:
        return None
    before = ledger.used
    ledger.drop_parts(node, node.without_point(point))
    gone = prune(ledger, node.id, node.recipes[point.recipe], spare)
    return node.space, replace(gone, states=1, bytes=before - ledger.used)


def prune(ledger: Ledger, node_id: int, recipe_id: bytes, spare: Container[int]) -> Evicted:
    """Drop rows that no resume point can use any more, from a node upward; nodes that went.

    Only of recipes with state: without one of their resume points behind them, rows serve
    nobody. A node that is left with nothing, and nothing below it, goes as well. Ends at a node
    in ``spare``.
    """
    gone = Evicted()
    recipe = load_recipe(ledger.txn, recipe_id)
    if recipe is None or not any(layer.reach.stateful for layer in recipe.layers):
        return gone
    while node_id != layout.ROOT and node_id not in spare:
        mark = mark_of(ledger.txn, node_id)
        node = _read(ledger, mark) if mark is not None else None
        if node is None or recipe_id not in node.recipes or _resumes_below(ledger, node, recipe_id):
            break
        index = node.recipes.index(recipe_id)
        last = max((p.offset for p in node.points if p.recipe == index), default=node.start)
        dead = (node.refs["recipe"] == index) & (node.refs["start"] >= last)
        kept = replace(node, refs=node.refs[~dead])
        if len(kept.refs) or kept.points or has_children(ledger.txn, node.space, node.id):
            if dead.any():
                ledger.drop_parts(node, kept)
        else:
            ledger.drop_node(node)
            gone += Evicted(1, len(node.tokens))
        if last > node.start:
            break
        node_id = layout.from_u64(node.key[16:24])
    return gone


def _resumes_below(ledger: Ledger, node: Node, recipe: bytes) -> bool:
    """Whether a resume point of ``recipe`` lies on a node below this one."""
    waiting, seen = [node.id], 0
    while waiting:
        for key in list(children(ledger.txn, node.space, waiting.pop())):
            seen += 1
            data = ledger.txn.get("nodes", key)
            try:
                below = unpack(key, data) if data is not None else None
            except (CorruptFrame, NewerFormat):
                return True
            if below is None:
                continue
            if seen > LOOKED_AT or any(below.recipes[p.recipe] == recipe for p in below.points):
                return True
            waiting.append(below.id)
    return False


def _cut(node: Node, excess: int) -> int:
    """The highest offset that no chunk straddles and behind which ``excess`` bytes lie.

    The start of the node where there is none.
    """
    sizes: Counter[int] = Counter()
    for point in node.points:
        sizes[point.offset - 1] += layout.footprint(point.size) if point.state else 0
    for start, size in zip(node.refs["start"].tolist(), node.refs["size"].tolist(), strict=True):
        sizes[start] += layout.footprint(size)
    starts = np.unique(node.refs["start"])[::-1].tolist()
    order = sorted(sizes, reverse=True)
    freed = at = 0
    for cut in starts:
        while at < len(order) and order[at] >= cut:
            freed += sizes[order[at]]
            at += 1
        straddled = (node.refs["start"] < cut) & (node.refs["stop"] > cut)
        if freed >= excess and cut > node.start and not straddled.any():
            return int(cut)
    return node.start


def _is_leaf(ledger: Ledger, node: int, mark: Mark) -> bool:
    return not has_children(ledger.txn, mark.key[:16], node)


def _read(ledger: Ledger, mark: Mark) -> Node | None:
    """The node of a mark; what cannot be read is never deleted by the way."""
    data = ledger.txn.get("nodes", mark.key)
    if data is None:
        return None
    try:
        return detach(unpack(mark.key, data))
    except (CorruptFrame, NewerFormat):
        return None
