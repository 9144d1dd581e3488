"""A store in memory: the radix trie of a space over block ids, without rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from kvkeep.prefixstore.eviction.base import Policy
from kvkeep.prefixstore.eviction.gone import digest_of, slot_of
from kvkeep.prefixstore.eviction.order import Mark, Step, touch, victims
from kvkeep.prefixstore.tokens import Tokens, common_prefix


class MemoryShelf:
    """The order of eviction in memory: a dictionary, and a heap that forgets lazily."""

    def __init__(self) -> None:
        self.floor = 0
        self._marks: dict[int, Mark] = {}
        self._heap: list[tuple[int, int, int]] = []

    def get(self, node: int) -> Mark | None:
        """The mark of a node."""
        return self._marks.get(node)

    def put(self, node: int, mark: Mark) -> None:
        """Keep the mark of a node."""
        old = self._marks.get(node)
        self._marks[node] = mark
        if old is None or (old.rank, old.start) != (mark.rank, mark.start):
            heappush(self._heap, (mark.rank, -mark.start, node))
        if len(self._heap) > 4 * len(self._marks) + 64:
            self._heap = [(m.rank, -m.start, n) for n, m in self._marks.items()]
            heapify(self._heap)

    def drop(self, node: int) -> None:
        """Forget a node."""
        self._marks.pop(node, None)

    def ascending(self) -> Iterator[tuple[int, Mark]]:
        """All nodes by rank; among equals the deepest first."""
        passed = []
        try:
            while self._heap:
                entry = heappop(self._heap)
                rank, depth, node = entry
                mark = self._marks.get(node)
                if mark is not None and (mark.rank, -mark.start) == (rank, depth):
                    passed.append(entry)
                    yield node, mark
        finally:
            for entry in passed:
                if entry[2] in self._marks:
                    heappush(self._heap, entry)


_NONE = np.empty(0, np.int64)


@dataclass(eq=False)
class Edge:
    """A node: the run of blocks that leads to it, from block ``start`` on."""

    id: int
    start: int
    run: Tokens
    parent: Edge | None
    below: dict[int, Edge] = field(default_factory=dict)


@dataclass
class Trie:
    """What a store of ``capacity`` blocks keeps; without a capacity, everything.

    ``block_tokens`` and ``block_bytes`` are what one block counts.
    """

    policy: Policy
    capacity: int | None = None
    block_tokens: int = 1
    block_bytes: int = 1
    blocks: int = 0
    evictions: int = 0
    evicted_blocks: int = 0
    shelf: MemoryShelf = field(default_factory=MemoryShelf)
    _gone: dict[int, bytes] = field(default_factory=dict)
    _root: Edge = field(default_factory=lambda: Edge(0, 0, _NONE, None))
    _last: int = 0

    def request(self, blocks: Tokens, when: int) -> tuple[int, int | None]:
        """Look ``blocks`` up at ``when``, then store them, making room first.

        How many leading blocks were kept, and how many were new; ``None`` for the latter where
        they do not fit beside what they build on, which stays.
        """
        path, matched = self._walk(blocks)
        self._touch(path, when, hits=1)
        new = len(blocks) - matched
        returned = bool(new) and self._was_evicted(blocks[: matched + 1])
        if new and not self._make_room(new, {edge.id for edge in path}):
            return matched, None
        if new:
            self._append(path, blocks, matched)
        self._touch(path, when, returned=returned)
        return matched, new

    def _append(self, path: list[Edge], blocks: Tokens, matched: int) -> None:
        if path and matched < path[-1].start + len(path[-1].run):
            path[-1] = self._split(path[-1], matched)
        parent = path[-1] if path else self._root
        edge = Edge(self._new_id(), matched, blocks[matched:].copy(), parent)
        parent.below[int(blocks[matched])] = edge
        self.blocks += len(edge.run)
        path.append(edge)

    def _walk(self, blocks: Tokens) -> tuple[list[Edge], int]:
        path: list[Edge] = []
        edge, at = self._root, 0
        while at < len(blocks):
            below = edge.below.get(int(blocks[at]))
            if below is None:
                break
            path.append(below)
            shared = common_prefix(blocks[at:], below.run)
            at += shared
            if shared < len(below.run):
                break
            edge = below
        return path, at

    def _touch(self, path: list[Edge], when: int, *, hits: int = 0, returned: bool = False) -> None:
        if self.capacity is None:
            return
        steps = [
            Step(e.id, e.start, len(e.run) * self.block_tokens, len(e.run) * self.block_bytes, e)
            for e in path
        ]
        touch(self.shelf, self.policy, steps, when, hits=hits, returned=returned)

    def _make_room(self, new: int, spare: set[int]) -> bool:
        if self.capacity is None:
            return True
        if self.blocks + new > self.capacity:
            for _, mark in victims(self.shelf, _is_leaf, spare):
                excess = self.blocks + new - self.capacity
                if excess <= 0:
                    break
                self._give_up(mark.key, excess)
        return self.blocks + new <= self.capacity

    def _give_up(self, edge: Edge, excess: int) -> None:
        """Evict a leaf from its end, whole where that is not more than what is needed."""
        gone = min(excess, len(edge.run))
        self._remember(edge, len(edge.run) - gone)
        self.blocks -= gone
        self.evicted_blocks += gone
        self.evictions += 1
        if gone < len(edge.run):
            edge.run = edge.run[:-gone]
            return
        self.shelf.drop(edge.id)
        if edge.parent is not None:
            del edge.parent.below[int(edge.run[0])]

    def _remember(self, edge: Edge, kept: int) -> None:
        """Note that what follows the first ``kept`` blocks of an edge goes."""
        runs, above = [edge.run[: kept + 1]], edge.parent
        while above is not None:
            runs.append(above.run)
            above = above.parent
        digest = digest_of(b"", reversed(runs))
        self._gone[slot_of(digest)] = digest

    def _was_evicted(self, blocks: Tokens) -> bool:
        if not self._gone:
            return False
        digest = digest_of(b"", [blocks])
        return self._gone.get(slot_of(digest)) == digest

    def _split(self, edge: Edge, at: int) -> Edge:
        """Cut an edge in two at block ``at``; the upper half. The lower keeps its id."""
        cut = at - edge.start
        upper = Edge(self._new_id(), edge.start, edge.run[:cut], edge.parent)
        if edge.parent is not None:
            edge.parent.below[int(edge.run[0])] = upper
        edge.start, edge.run, edge.parent = at, edge.run[cut:], upper
        upper.below[int(edge.run[0])] = edge
        mark = self.shelf.get(edge.id)
        if mark is not None:
            self.shelf.put(upper.id, mark._replace(start=upper.start, key=upper))
            self.shelf.put(edge.id, mark._replace(start=edge.start))
        return upper

    def _new_id(self) -> int:
        self._last += 1
        return self._last


def _is_leaf(_: int, mark: Mark) -> bool:
    return not mark.key.below
