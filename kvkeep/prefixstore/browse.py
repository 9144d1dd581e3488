"""What is stored, for people: spaces, conversations, and one path in detail. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.records import Node, unpack
from kvkeep.prefixstore.shelf import mark_of
from kvkeep.prefixstore.tenants import key_of, read_tenant
from kvkeep.prefixstore.trie import Path, children, has_children, held_on, load_recipe
from kvkeep.prefixstore.ttl import NANOSECONDS, read_ttl


@dataclass(frozen=True)
class SpaceInfo:
    """One space: how much it keeps and when it was last used (seconds since the epoch).

    ``ttl`` is its time to live in seconds, ``quota`` the bytes that all spaces under its salt
    may use; ``None`` without one.
    """

    id: str
    label: str
    fields: dict[str, str]
    kinds: tuple[str, ...]
    conversations: int
    nodes: int
    bytes: int
    created: float
    last_use: float
    ttl: float | None = None
    quota: int | None = None


@dataclass(frozen=True)
class Conversation:
    """One stored sequence that no longer one continues: a leaf of the trie.

    ``own_tokens``, ``bytes`` and ``points`` are what no other conversation shares.
    """

    id: str
    space: str
    tokens: int
    own_tokens: int
    bytes: int
    points: int
    kinds: tuple[str, ...]
    last_use: float


@dataclass(frozen=True)
class PointInfo:
    """A resume point on a path, with what it takes to resume there."""

    offset: int
    origin: str
    created: float
    kinds: tuple[str, ...]
    floor: int
    boundaries: tuple[int, ...]
    state_bytes: int


@dataclass(frozen=True)
class RowsInfo:
    """The rows that a path stores for one family of one recipe."""

    kinds: tuple[str, ...]
    layers: int
    covered: tuple[tuple[int, int], ...]
    chunks: int
    bytes_per_token: int


@dataclass(frozen=True)
class PathInfo:
    """A stored path: how many of its tokens are stored, and what hangs on them."""

    tokens: int
    matched: int
    nodes: int
    points: tuple[PointInfo, ...]
    rows: tuple[RowsInfo, ...]


def spaces(txn: Transaction) -> Iterator[SpaceInfo]:
    """Every space of the store."""
    for key, value in txn.items("spaces"):
        try:
            identity, created = Identity.unpack(value)
        except CorruptFrame:
            identity, created = Identity((), "damaged record"), 0.0
        found = _Found()
        for node in nodes(txn, key):
            found.add(txn, node)
        yield SpaceInfo(
            id=key.hex(),
            label=identity.label,
            fields=dict(identity.fields),
            kinds=kinds_of(txn, found.recipes),
            conversations=found.leaves,
            nodes=found.nodes,
            bytes=found.bytes,
            created=created,
            last_use=found.last_use,
            ttl=ttl / NANOSECONDS if (ttl := read_ttl(txn, key)) is not None else None,
            quota=read_tenant(txn, key_of(identity)).quota or None,
        )


def conversations(txn: Transaction) -> Iterator[Conversation]:
    """Every leaf of the trie."""
    for key in txn.keys("spaces"):
        for node in nodes(txn, key):
            if not has_children(txn, key, node.id):
                own = list(_unshared(txn, node))
                yield Conversation(
                    id=f"{node.id:x}",
                    space=key.hex(),
                    tokens=node.stop,
                    own_tokens=sum(len(x.tokens) for x in own),
                    bytes=sum(bytes_of(x) for x in own),
                    points=sum(len(x.points) for x in own),
                    kinds=kinds_of(txn, set(node.recipes)),
                    last_use=last_use(txn, node),
                )


def inspect(txn: Transaction, path: Path, tokens: int) -> PathInfo:
    """What ``path`` holds for a prompt of ``tokens`` tokens."""
    points, rows = [], []
    for held in held_on(txn, path, ()):
        recipe = held.recipe
        boundaries = tuple(sorted({x.boundary for x in recipe.layers if x.boundary is not None}))
        for p in held.points:
            floor = max((layer.floor for layer in recipe.layers), default=0)
            points.append(
                PointInfo(p.offset, p.origin, p.created, recipe.kinds, floor, boundaries, p.size)
            )
        for index, family in enumerate(recipe.families):
            rows.append(
                RowsInfo(
                    tuple(sorted({recipe.layers[i].kind for i in family.layers})),
                    len(family.layers),
                    held.coverage(index),
                    len(held.chunks.get(index, ())),
                    family.bytes_per_token,
                )
            )
    points.sort(key=lambda p: p.offset)
    return PathInfo(tokens, path.matched, len(path.nodes), tuple(points), tuple(rows))


def conversation_tokens(txn: Transaction, conversation: str) -> list[int]:
    """The tokens of a conversation, by the id that ``conversations`` gave. Empty if unknown."""
    runs: list[list[int]] = []
    at = int(conversation, 16)
    while at != layout.ROOT:
        node = _node(txn, at)
        if node is None:
            return []
        runs.append(node.tokens.tolist())
        at = layout.from_u64(node.key[16:24])
    return [token for run in reversed(runs) for token in run]


def nodes(txn: Transaction, space: bytes) -> Iterator[Node]:
    """The readable nodes of a space; their arrays are valid as long as ``txn``."""
    for key, data in txn.items("nodes", prefix=space):
        try:
            yield unpack(key, data)
        except (CorruptFrame, NewerFormat):
            continue


def _unshared(txn: Transaction, leaf: Node) -> Iterator[Node]:
    """``leaf`` and the nodes above it, up to where another conversation parts."""
    node: Node | None = leaf
    while node is not None:
        yield node
        parent = layout.from_u64(node.key[16:24])
        siblings = children(txn, node.space, parent)
        alone = next(siblings, None) is not None and next(siblings, None) is None
        node = _node(txn, parent) if parent != layout.ROOT and alone else None


def _node(txn: Transaction, node_id: int) -> Node | None:
    """A node by its id; ``None`` where there is none, or it cannot be read."""
    mark = mark_of(txn, node_id)
    data = txn.get("nodes", mark.key) if mark is not None else None
    if mark is None or data is None:
        return None
    with suppress(CorruptFrame, NewerFormat):
        node = unpack(mark.key, data)
        return node if node.id == node_id else None
    return None


class _Found:
    """What the nodes of a space add up to. They are counted as they are read, and not kept."""

    def __init__(self) -> None:
        self.nodes = self.leaves = self.bytes = 0
        self.last_use = 0.0
        self.recipes: set[bytes] = set()

    def add(self, txn: Transaction, node: Node) -> None:
        """Count one more node."""
        self.nodes += 1
        self.leaves += not has_children(txn, node.space, node.id)
        self.bytes += bytes_of(node)
        self.last_use = max(self.last_use, last_use(txn, node))
        self.recipes.update(node.recipes)


def bytes_of(node: Node) -> int:
    """Bytes of the rows and states that a node owns."""
    return int(node.refs["size"].sum()) + sum(p.size for p in node.points)


def kinds_of(txn: Transaction, recipes: set[bytes]) -> tuple[str, ...]:
    """The kinds of all caches of the recipes, sorted."""
    found = (load_recipe(txn, recipe) for recipe in recipes)
    return tuple(sorted({kind for recipe in found if recipe for kind in recipe.kinds}))


def last_use(txn: Transaction, node: Node) -> float:
    """When a node was last used, in seconds since the epoch; 0 for never."""
    data = txn.get("uses", layout.u64(node.id))
    return layout.from_use_record(data).when / 1e9 if data is not None else 0.0
