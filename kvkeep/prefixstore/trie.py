"""Walking the radix trie, and turning what lies on a path into facts for the policy."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from kvkeep.errors import CorruptFrame, Damaged, NewerFormat
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.policy import Aside, Candidate, Group, Point, Reason
from kvkeep.prefixstore.ranges import Ranges, merged
from kvkeep.prefixstore.recipe import Recipe
from kvkeep.prefixstore.records import Node, PointRecord, unpack
from kvkeep.prefixstore.tokens import Tokens, common_prefix


@dataclass(frozen=True)
class Path:
    """The nodes along a prompt, from the root, and how many tokens they match.

    The last node may reach beyond ``matched``. ``broken`` is the key of a record that could
    not be read, where the walk had to stop. ``expired``: what comes next is too old to be used.
    """

    nodes: tuple[Node, ...]
    matched: int
    broken: bytes | None = None
    newer: bool = False
    expired: bool = False

    @property
    def fault(self) -> Reason | None:
        """Why the record where the walk had to stop could not be read."""
        if self.broken is None:
            return None
        return Reason.NEWER_FORMAT if self.newer else Reason.CORRUPT


class Rows(NamedTuple):
    """A row chunk on a path: its positions, its id, and its frame's bytes and checksum."""

    start: int
    stop: int
    chunk: int
    size: int
    check: int


@dataclass(frozen=True)
class Held:
    """What a path stores for one recipe: chunks and resume points, cut at ``matched``.

    ``aside`` are the chunks that are quarantined.
    """

    recipe_id: bytes
    recipe: Recipe
    chunks: Mapping[int, list[Rows]]  # by family
    points: tuple[PointRecord, ...]
    aside: Mapping[int, list[Rows]] = field(default_factory=dict)  # by family

    def coverage(self, family: int) -> Ranges:
        """The positions of ``family`` whose rows are stored."""
        return merged((rows.start, rows.stop) for rows in self.chunks.get(family, ()))


@dataclass
class Facts:
    """The candidates of a path in the policy's terms, with what they stand for."""

    matched: int
    held: list[Held] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)


def walk(txn: Transaction, space: bytes, tokens: Tokens) -> Path:
    """The stored path of ``tokens``: one read for each edge, one comparison for each run."""
    nodes: list[Node] = []
    parent, at = layout.ROOT, 0
    while at < len(tokens):
        key = layout.node_key(space, parent, int(tokens[at]))
        data = txn.get("nodes", key)
        if data is None:
            break
        try:
            node = unpack(key, data)
            if node.start != at:
                raise CorruptFrame(f"A node starts at {node.start} where {at} is due")
        except CorruptFrame:
            return Path(tuple(nodes), at, broken=key)
        except NewerFormat:
            return Path(tuple(nodes), at, broken=key, newer=True)
        shared = common_prefix(tokens[at:], node.tokens)
        if shared == 0:
            return Path(tuple(nodes), at, broken=key)
        nodes.append(node)
        at += shared
        if shared < len(node.tokens):
            break
        parent = node.id
    return Path(tuple(nodes), at)


def children(txn: Transaction, space: bytes, parent: int) -> Iterator[bytes]:
    """The keys of the nodes below ``parent``."""
    return txn.keys("nodes", prefix=layout.children_prefix(space, parent))


def has_children(txn: Transaction, space: bytes, parent: int) -> bool:
    """Whether ``parent`` is an inner node."""
    return next(children(txn, space, parent), None) is not None


def load_recipe(txn: Transaction, recipe_id: bytes) -> Recipe | None:
    """The recipe of that id; ``None`` where it is missing, damaged or of an unknown kind."""
    data = txn.get("recipes", recipe_id)
    return _recipe(bytes(data), recipe_id) if data is not None else None


@lru_cache(maxsize=256)
def _recipe(data: bytes, recipe_id: bytes) -> Recipe | None:
    try:
        recipe = Recipe.unpack(data)
        usable = all(layer.codec for layer in recipe.layers) and recipe.id == recipe_id
    except (NewerFormat, CorruptFrame):
        return None
    return recipe if usable else None


def check_path(path: Path) -> None:
    """Raise ``Damaged`` or ``NewerFormat`` where nothing can be stored behind ``path``.

    A record that cannot be read stays where it is, and what is behind it is out of reach.
    """
    if path.fault is Reason.NEWER_FORMAT:
        raise NewerFormat(
            "A record on the stored path is of a newer kvkeep: nothing is stored behind it by "
            "this one"
        )
    if path.fault is Reason.CORRUPT:
        raise Damaged(
            "A record on the stored path is damaged: nothing is stored behind it until "
            "`kvkeep verify --repair` has removed it"
        )


def held_on(txn: Transaction, path: Path, quarantined: Container[int]) -> list[Held]:
    """What ``path`` stores for every recipe on it, quarantined chunks apart from the others."""
    chunks: dict[bytes, dict[int, list[Rows]]] = {}
    aside: dict[bytes, dict[int, list[Rows]]] = {}
    points: dict[bytes, list[PointRecord]] = {}
    for node in path.nodes:
        for recipe_id in node.recipes:
            chunks.setdefault(recipe_id, {})
        refs = node.refs[node.refs["start"] < path.matched]
        for index, family, start, stop, chunk, size, check in refs.tolist():
            of = aside if chunk in quarantined else chunks
            mine = of.setdefault(node.recipes[index], {}).setdefault(family, [])
            mine.append(Rows(start, min(stop, path.matched), chunk, size, check))
        for point in node.points:
            if point.offset <= path.matched:
                points.setdefault(node.recipes[point.recipe], []).append(point)
    out = []
    for recipe_id in chunks:
        recipe = load_recipe(txn, recipe_id)
        if recipe is not None:
            families = len(recipe.families)
            found = tuple(
                point
                for point in points.get(recipe_id, ())
                if all(family < families for family, _ in point.needs)
            )
            out.append(Held(recipe_id, recipe, chunks[recipe_id], found, aside.get(recipe_id, {})))
    return out


def facts_of(
    txn: Transaction, path: Path, quarantined: Container[int], newer: Container[int] = ()
) -> Facts:
    """The policy's view of ``path``; of the quarantined, ``newer`` are not damaged."""
    facts = Facts(path.matched)

    def fault(chunk: int) -> Reason | None:
        if chunk not in quarantined:
            return None
        return Reason.NEWER_FORMAT if chunk in newer else Reason.CORRUPT

    for held in held_on(txn, path, quarantined):
        families = range(len(held.recipe.families))
        facts.held.append(held)
        facts.candidates.append(
            Candidate(
                groups=_groups(held.recipe),
                coverage=tuple(held.coverage(f) for f in families),
                points=tuple(
                    Point(
                        p.offset,
                        tuple((f, tuple(tuple(r) for r in ranges)) for f, ranges in p.needs),  # type: ignore[misc]
                        fault(p.state),
                    )
                    for p in held.points
                ),
                aside=tuple(
                    Aside(cause, family, ((rows.start, rows.stop),))
                    for family in families
                    for rows in held.aside.get(family, ())
                    if (cause := fault(rows.chunk)) is not None
                ),
            )
        )
    return facts


def _groups(recipe: Recipe) -> tuple[Group, ...]:
    families = {i: f for f, family in enumerate(recipe.families) for i in family.layers}
    groups: dict[tuple[Any, ...], list[str]] = {}
    for i, layer in enumerate(recipe.layers):
        key = (layer.kind, layer.reach, layer.floor, families.get(i))
        groups.setdefault(key, []).append(layer.path)
    return tuple(
        Group(tuple(paths), kind, reach, floor, family)
        for (kind, reach, floor, family), paths in groups.items()
    )
