"""A node of the trie as bytes.

A node holds the edge that leads to it: a run of tokens from ``start`` on, references to the
row chunks within that run, and the resume points on it. Everything that a lookup reads is in
one value, behind one checksum.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.frame import CHECKED
from kvkeep.persistence.packing import unpack_plain
from kvkeep.prefixstore.ranges import Ranges

VERSION = 1
KEY = 32
RECIPE_ID = 16
MOST_POINTS = 1 << 14
MOST_RECORD = 1 << 28
"""Bytes of a record. A node of a million tokens has a few MiB."""

_HEAD = struct.Struct(
    "<"
    "Q"  # xxh3-64 of the key that the record is filed under and of everything after this field
    "H"  # version of this record
    "H"  # bytes of one token: 4 or 8
    "I"  # chunk references
    "I"  # bytes of the msgpack part
    "I"  # tokens
    "Q"  # node id
    "Q"  # start offset
)

_DIGEST = struct.Struct("<Q")

REF = np.dtype(
    [
        ("recipe", "<u4"),  # index into the node's list of recipe ids
        ("family", "<u4"),
        ("start", "<u8"),
        ("stop", "<u8"),
        ("chunk", "<u8"),
        ("size", "<u8"),  # bytes of the frame
        ("check", "<u8"),  # its checksum
    ]
)

Refs = NDArray[Any]


class Stored(NamedTuple):
    """A frame in ``chunks``: its id, its bytes, and the checksum that it carries.

    References repeat the checksum, so that a frame that is whole but lies where another one
    belongs does not pass for that.
    """

    id: int
    size: int
    check: int


class PointRecord(NamedTuple):
    """A resume point as it is stored.

    ``needs`` lists, per family, the rows that the caches held when the snapshot was taken.
    ``state`` is the chunk id of the state frame, 0 where the recipe has none; ``check`` is the
    frame's checksum.
    """

    offset: int
    recipe: int
    origin: str
    created: float
    state: int
    size: int
    check: int
    needs: tuple[tuple[int, Ranges], ...]

    @property
    def frame(self) -> Stored:
        """The frame of its state."""
        return Stored(self.state, self.size, self.check)


@dataclass(frozen=True)
class Node:
    """One edge of the trie and what hangs on it. ``tokens`` covers ``[start, stop)``."""

    id: int
    key: bytes
    start: int
    tokens: NDArray[Any]
    recipes: tuple[bytes, ...] = ()
    refs: Refs = field(default_factory=lambda: np.empty(0, REF))
    points: tuple[PointRecord, ...] = ()

    @property
    def stop(self) -> int:
        """The offset at the end of the run."""
        return self.start + len(self.tokens)

    @property
    def space(self) -> bytes:
        """The space that the node belongs to."""
        return self.key[:16]

    def recipe_index(self, recipe: bytes) -> tuple[Node, int]:
        """The index of ``recipe`` in the node's list, on a node that has it."""
        if recipe in self.recipes:
            return self, self.recipes.index(recipe)
        return replace(self, recipes=(*self.recipes, recipe)), len(self.recipes)

    def with_ref(self, recipe: bytes, family: int, start: int, stop: int, frame: Stored) -> Node:
        """The node with one more chunk, in order of recipe, family and position."""
        node, index = self.recipe_index(recipe)
        row = np.array([(index, family, start, stop, *frame)], REF)
        refs = np.concatenate([node.refs, row])
        return replace(node, refs=refs[np.lexsort((refs["start"], refs["family"], refs["recipe"]))])

    def with_point(self, recipe: bytes, point: PointRecord) -> Node:
        """The node with one more resume point, in order of offset."""
        node, index = self.recipe_index(recipe)
        points = sorted((*node.points, point._replace(recipe=index)), key=lambda p: p.offset)
        return replace(node, points=tuple(points))

    def without_point(self, point: PointRecord) -> Node:
        """The node without one of its resume points."""
        return replace(self, points=tuple(p for p in self.points if p is not point))

    def without_recipes(self, lost: Container[bytes]) -> Node:
        """The node without what it holds for some recipes."""
        kept = [i for i, recipe in enumerate(self.recipes) if recipe not in lost]
        place = {old: new for new, old in enumerate(kept)}
        refs = self.refs[np.isin(self.refs["recipe"], kept)]
        refs["recipe"] = [place[old] for old in refs["recipe"].tolist()]
        return replace(
            self,
            recipes=tuple(self.recipes[i] for i in kept),
            refs=refs,
            points=tuple(
                p._replace(recipe=place[p.recipe]) for p in self.points if p.recipe in place
            ),
        )

    def find_point(self, recipe: bytes, offset: int) -> PointRecord | None:
        """The resume point of ``recipe`` at ``offset``."""
        for point in self.points:
            if point.offset == offset and self.recipes[point.recipe] == recipe:
                return point
        return None

    def frames(self) -> list[Stored]:
        """Every value in ``chunks`` that lives and dies with this node."""
        rows = [Stored(*frame) for frame in self.refs[["chunk", "size", "check"]].tolist()]
        return rows + [p.frame for p in self.points if p.state]

    def chunk_ids(self) -> list[int]:
        """The ids of ``frames``."""
        return [frame.id for frame in self.frames()]

    def pack(self) -> bytes:
        """The record."""
        tokens = narrow(self.tokens)
        meta = msgpack.packb({"recipes": self.recipes, "points": self.points})
        refs = np.ascontiguousarray(self.refs)
        body = _HEAD.pack(
            0, VERSION, tokens.itemsize, len(refs), len(meta), len(tokens), self.id, self.start
        )[_DIGEST.size :]
        return sealed(self.key, body + refs.tobytes() + meta + tokens.tobytes())


def sealed(key: bytes, body: bytes) -> bytes:
    """The record that is filed under ``key``: its checksum, which covers the key, and ``body``."""
    return _DIGEST.pack(_digest(key, body)) + body


def _digest(key: bytes, body: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(key)
    state.update(body)
    return state.intdigest()


def unpack(key: bytes, data: memoryview | bytes) -> Node:
    """The node of a record; its arrays are views on ``data``.

    Raises ``CorruptFrame`` or ``NewerFormat`` before anything in it is used.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size or len(key) != KEY:
        raise CorruptFrame(f"A node record of {len(view)} bytes is too short")
    digest, version, width, n_refs, n_meta, n_tokens, node_id, start = _HEAD.unpack(
        view[: _HEAD.size]
    )
    # Lengths come first: a damaged page may claim a value that reaches beyond the file.
    refs_end = _HEAD.size + n_refs * REF.itemsize
    meta_end = refs_end + n_meta
    fits = width in (4, 8) and meta_end + n_tokens * width == len(view) and n_tokens > 0
    if (version <= VERSION and not fits) or len(view) > MOST_RECORD:
        raise CorruptFrame("A node record's lengths do not add up")
    if _digest(key, view[_DIGEST.size :]) != digest:
        raise CorruptFrame("A node record does not match its checksum")
    if version > VERSION:
        raise NewerFormat(f"A node record has version {version}; this kvkeep reads {VERSION}")
    recipes, points = _read_meta(unpack_plain(view[refs_end:meta_end], MOST_POINTS))
    refs = np.frombuffer(view, REF, n_refs, _HEAD.size)
    if n_refs and int(refs["recipe"].max()) >= len(recipes):
        raise CorruptFrame("A node record refers to a recipe that it does not list")
    return Node(
        node_id,
        key,
        start,
        np.frombuffer(view, "<i4" if width == 4 else "<i8", n_tokens, meta_end),
        recipes,
        refs,
        points,
    )


def _read_meta(meta: Any) -> tuple[tuple[bytes, ...], tuple[PointRecord, ...]]:
    """Recipe ids and resume points, each of the types that it should have."""
    try:
        recipes, points = meta["recipes"], meta["points"]
        fine = type(recipes) is tuple and type(points) is tuple
        for recipe in recipes:
            fine = fine and type(recipe) is bytes and len(recipe) == RECIPE_ID
        for point in points:
            fine = fine and _is_point(point, len(recipes))
    except (KeyError, TypeError, ValueError):
        fine = False
    if not fine:
        raise CorruptFrame("A node record lists something else than recipes and resume points")
    return recipes, tuple(PointRecord(*point) for point in points)


def _is_point(point: Any, recipes: int) -> bool:
    """Plain comparisons, because every lookup does this. Raises ``TypeError``, ``ValueError``."""
    offset, recipe, origin, created, state, size, check, needs = point
    if not type(offset) is type(recipe) is type(state) is type(size) is type(check) is int:
        return False
    if type(origin) is not str or type(created) not in (float, int) or type(needs) is not tuple:
        return False
    for family, ranges in needs:
        if type(family) is not int or family < 0 or type(ranges) is not tuple:
            return False
        for start, stop in ranges:
            if not type(start) is type(stop) is int or not 0 <= start < stop:
                return False
    # A created time that is no number would end every listing.
    return (
        0 <= recipe < recipes and min(offset, state, size, check) >= 0 and 0 <= created < math.inf
    )


def check_of(frame: Any) -> int:
    """The checksum that a frame carries."""
    return int.from_bytes(frame[CHECKED : CHECKED + 8], "little")


def narrow(tokens: NDArray[Any]) -> NDArray[Any]:
    """The same ids in four bytes each, where all of them fit."""
    if tokens.dtype == np.int32 or not len(tokens):
        return np.ascontiguousarray(tokens, np.int32)
    limits = np.iinfo(np.int32)
    fits = int(tokens.min()) >= limits.min and int(tokens.max()) <= limits.max
    return np.ascontiguousarray(tokens, np.int32 if fits else np.int64)


def detach(node: Node) -> Node:
    """The node with arrays of its own, valid after its transaction."""
    return replace(node, tokens=node.tokens.copy(), refs=node.refs.copy())
