"""How a lookup came to its decision, step by step: the walk, the recipes, what was near.

Runs the lookup's own walk and the policy's own functions, and restores nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore.policy import Decision, LayerLimit, Reason, weigh
from kvkeep.prefixstore.records import Node, unpack
from kvkeep.prefixstore.tokens import Tokens, insides
from kvkeep.prefixstore.trie import Facts, Path, children

CONTINUES = 64
"""Token ids shown of a stored continuation."""

BRANCHES = 8
"""Continuations looked at where several leave the same place."""


@dataclass(frozen=True)
class Step:
    """One edge of the walk: tokens ``[start, stop)`` of it are stored, ``shared`` of them match."""

    node: int
    start: int
    stop: int
    shared: int
    branches: int


@dataclass(frozen=True)
class RecipeTrace:
    """One recipe on the path: where it could be resumed, and what its layers allowed.

    ``floor`` is its minimum-resumable offset; ``rows`` how far the rows of every layer reach
    without a gap. ``chosen`` is the one that the decision carries out.
    """

    kinds: tuple[str, ...]
    floor: int
    rows: int
    offset: int
    at_point: bool
    chosen: bool
    limits: tuple[LayerLimit, ...]


@dataclass(frozen=True)
class Near:
    """A resume point in the neighbourhood; ``usable`` unless its state is damaged."""

    offset: int
    origin: str
    created: float
    usable: bool
    beyond: bool


@dataclass(frozen=True)
class Trace:
    """A decision with everything that led to it.

    ``continues`` are stored tokens behind the place where the prompt parts, one run for each
    branch that goes on there. ``near`` are the resume points around ``matched``. ``blocked`` says
    why the record that the walk came to last cannot be read, ``None`` where all can.
    """

    decision: Decision
    steps: tuple[Step, ...]
    recipes: tuple[RecipeTrace, ...]
    near: tuple[Near, ...]
    continues: tuple[tuple[int, ...], ...]
    blocked: Reason | None


def trace(
    txn: Transaction,
    space: bytes,
    tokens: Tokens,
    decision: Decision,
    path: Path,
    facts: Facts,
    step: int,
    quarantined: Container[int],
) -> Trace:
    """The trace of a ``decision`` that was made for ``tokens`` on ``path``, from ``facts``."""
    steps = tuple(
        Step(
            node.id,
            node.start,
            node.stop,
            min(node.stop, path.matched) - node.start,
            sum(1 for _ in children(txn, space, node.id)),
        )
        for node in path.nodes
    )
    return Trace(
        decision,
        steps,
        tuple(_recipes(facts, tokens, decision, step)),
        tuple(near_points(path, decision.matched, quarantined)),
        tuple(continuations(txn, space, path)),
        path.fault,
    )


def _recipes(facts: Facts, tokens: Tokens, decision: Decision, step: int) -> Iterator[RecipeTrace]:
    inside = insides(tokens)
    chosen = False
    for held, candidate in zip(facts.held, facts.candidates, strict=True):
        weighed = weigh(len(tokens), facts.matched, candidate, step, inside)
        covered = [held.coverage(i) for i in range(len(held.recipe.families))]
        first = [ranges[0][1] if ranges and ranges[0][0] == 0 else 0 for ranges in covered]
        mine = not chosen and 0 < weighed.offset == decision.offset
        chosen = chosen or mine
        yield RecipeTrace(
            kinds=tuple(sorted(set(held.recipe.kinds))),
            floor=candidate.floor,
            rows=min(first, default=0),
            offset=weighed.offset,
            at_point=weighed.point is not None,
            chosen=mine,
            limits=weighed.limits,
        )


def near_points(path: Path, matched: int, quarantined: Container[int]) -> Iterator[Near]:
    """The last two resume points up to the parting, and the first one beyond it."""
    points = sorted(
        {(p.offset, p.origin, p.created, p.state) for node in path.nodes for p in node.points}
    )
    before = [p for p in points if p[0] <= matched]
    beyond = [p for p in points if p[0] > matched]
    for offset, origin, created, state in before[-2:] + beyond[:1]:
        yield Near(offset, origin, created, state not in quarantined, offset > matched)


def continuations(txn: Transaction, space: bytes, path: Path) -> Iterator[tuple[int, ...]]:
    """What is stored behind the parting: the rest of an edge, or the edges that begin there."""
    if not path.nodes:
        return
    last = path.nodes[-1]
    if path.matched < last.stop:
        yield _run(txn, space, last, path.matched - last.start)
        return
    for key in islice(children(txn, space, last.id), BRANCHES):
        yield _run(txn, space, _node(txn, key), 0)


def _run(txn: Transaction, space: bytes, node: Node | None, skip: int) -> tuple[int, ...]:
    """Up to ``CONTINUES`` tokens from inside ``node`` on, along the first branch each time."""
    out: list[int] = []
    while node is not None and len(out) < CONTINUES:
        out += node.tokens[skip:].tolist()
        skip = 0
        key = next(children(txn, space, node.id), None)
        node = _node(txn, key) if key is not None else None
    return tuple(out[:CONTINUES])


def _node(txn: Transaction, key: bytes) -> Node | None:
    data = txn.get("nodes", key)
    try:
        return unpack(key, data) if data is not None else None
    except (CorruptFrame, NewerFormat):
        return None
