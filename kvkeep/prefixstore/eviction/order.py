"""The order of eviction: what is the same for every policy, and for store and simulation.

Three rules make one ascending pass meet every leaf before the node that becomes a leaf by its
going: a path is always touched as a whole, a node never ranks below what hangs on it, and
among equals the deepest comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from kvkeep.prefixstore.eviction.base import MAX_RANK, Policy, Use

MAX_HITS = (1 << 32) - 1


class Mark(NamedTuple):
    """What is kept of a node: its rank, last use, place and hits. ``key`` finds the node."""

    rank: int
    when: int
    start: int
    hits: int
    key: Any


class Step(NamedTuple):
    """One node of a path, with the facts that a policy may ask for."""

    id: int
    start: int
    tokens: int
    nbytes: int
    key: Any


class Shelf(Protocol):
    """Where marks are kept: tables of the store, or the memory of a simulation."""

    floor: int
    """The highest rank that was evicted; 0 before the first use."""

    def get(self, node: int) -> Mark | None:
        """The mark of a node."""

    def put(self, node: int, mark: Mark) -> None:
        """Keep the mark of a node, in place of an older one."""

    def drop(self, node: int) -> None:
        """Forget a node."""

    def ascending(self) -> Iterator[tuple[int, Mark]]:
        """All nodes by rank; among equals the deepest first. Nodes may be dropped meanwhile."""


def touch(
    shelf: Shelf,
    policy: Policy,
    path: Sequence[Step],
    when: int,
    *,
    hits: int = 0,
    returned: bool = False,
) -> None:
    """Note a use at ``when`` of the nodes from the root to some node, in this order.

    ``hits`` lookups resumed them. ``returned``: those that are new were stored before, and
    evicted not long ago. Moves no use and no rank back.
    """
    shelf.floor = shelf.floor or when
    least = 0
    for step in reversed(path):
        old = shelf.get(step.id)
        known = min(old.hits + hits, MAX_HITS) if old is not None else int(returned)
        latest = max(when, old.when) if old is not None else when
        rank = policy.rank(Use(latest, known, step.tokens, step.nbytes), shelf.floor)
        least = min(max(rank, least, old.rank if old is not None else 0), MAX_RANK)
        shelf.put(step.id, Mark(least, latest, step.start, known, step.key))


def victims(
    shelf: Shelf, is_leaf: Callable[[int, Mark], bool], spare: Container[int]
) -> Iterator[tuple[int, Mark]]:
    """The nodes that go, one after the other, except those in ``spare``.

    Whoever takes one drops it, before the next is asked for.
    """
    for node, mark in shelf.ascending():
        if node not in spare and is_leaf(node, mark):
            yield node, mark
            shelf.floor = max(shelf.floor, mark.rank)
