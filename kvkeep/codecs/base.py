"""What every codec answers.

A codec translates one kind of live cache into plain facts, and back:

* **rows**: tensors with a token axis. Row *i* belongs to position *i* and does not
  depend on later tokens, so rows are stored by position and shared between prompts.
* **state**: what sums up the whole prefix (recurrent state, the layout of a ring). It is
  valid at exactly one offset.

A live cache keeps its rows in *planes*: arrays whose token axis counts **slots**. Where a
position lies is said by segments, ``Segment(position, slot, length)``, so that a plain
cache, a ring and a chunked window are read and rebuilt by the same few lines.

A codec never changes the cache it is shown, never imports our other rooms, and imports the
class that it encodes inside the methods that need it. Nothing that it returns may keep a
buffer of the live cache alive, except the planes and the state's tensors, which the caller
copies out and drops at once.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.errors import BatchCache, EmptyCache, MalformedCache

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    Host = np.ndarray[Any, np.dtype[Any]]

Scalar = int | float | str | bool | None
Meta = Mapping[str, Scalar | Sequence[int]]

GROWTH_STEP = 256
"""Positions by which mlx-lm's caches grow; a rebuilt cache has room up to the next multiple."""


RECORD = "minimum_resumable_offset"
"""Attribute of a live cache by which whoever fed it vouches for its history."""


class Segment(NamedTuple):
    """``length`` positions from ``position`` on lie in the slots from ``slot`` on."""

    position: int
    slot: int
    length: int


@dataclass(frozen=True)
class RowSpec:
    """One row tensor: its name, MLX dtype name, shape with 0 on the token axis, and that axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: int = 2

    def sized(self, length: int) -> tuple[int, ...]:
        """The shape of ``length`` rows."""
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    @property
    def bytes_per_token(self) -> int:
        """Physical bytes of one row."""
        size = itemsize(self.dtype)
        for extent in self.sized(1):
            size *= extent
        return size


@dataclass(frozen=True)
class Reach:
    """Which rows a layer reads when it resumes at *p*, away from a snapshot.

    ``window=None`` reads ``[0, p)``; a number reads ``[0, keep)`` and the newest
    ``window - keep`` positions before *p*; 0 reads no rows. ``stateful`` kinds resume only
    at a snapshot, because their state is valid at one offset.
    """

    window: int | None = None
    keep: int = 0
    stateful: bool = False

    def ranges(self, p: int) -> tuple[tuple[int, int], ...]:
        """The half-open position ranges that must be covered to resume at ``p``."""
        if self.window == 0 or p <= 0:
            return ()
        if self.window is None or p <= self.window:
            return ((0, p),)
        tail = (p - (self.window - self.keep), p)
        return ((0, self.keep), tail) if self.keep else (tail,)


@dataclass(frozen=True)
class Description:
    """The facts of one live cache.

    ``offset`` is ``None`` for kinds that hold no offset of their own (recurrent state).
    ``floor`` is the minimum-resumable offset of what is held now. ``boundary`` is the
    precision boundary of the rows, ``None`` for kinds whose rows never change precision;
    rows under different boundaries are different data. ``params`` fix the kind (bits,
    window size …) and never change during a cache's life. ``held`` says where the rows lie.
    """

    kind: str
    version: int
    params: Mapping[str, Scalar]
    offset: int | None
    floor: int | None
    reach: Reach
    boundary: int | None = None
    rows: tuple[RowSpec, ...] = ()
    held: tuple[Segment, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Physical bytes that one more token costs; 0 for recurrent state."""
        return sum(spec.bytes_per_token for spec in self.rows)


@dataclass(frozen=True)
class State:
    """What is valid at this offset only: small metadata, and tensors by name."""

    meta: Meta = field(default_factory=dict)
    tensors: Mapping[str, mx.array] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """Where rows go in a rebuilt cache: slots to allocate, and the segments to fill."""

    capacity: int
    segments: tuple[Segment, ...]


class Codec(ABC):
    """One storage kind. ``kind`` is chosen, frozen once released, and never a class name."""

    kind: str
    version: int = 1

    @abstractmethod
    def matches(self, cache: object) -> bool:
        """Whether this codec encodes ``cache``. Looks at the exact class, not at a base."""

    @abstractmethod
    def describe(self, cache: Any) -> Description:
        """The facts of ``cache``.

        Raises ``EmptyCache``, ``BatchCache`` or ``MalformedCache``. Evaluates nothing.
        """

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """The row tensors by name as they lie in memory, with slots on the token axis."""
        return {}

    def view(
        self, cache: Any, facts: Description, start: int, stop: int
    ) -> tuple[Mapping[str, mx.array], tuple[Segment, ...]]:
        """Planes that have what is held of the positions ``[start, stop)``, and where it lies.

        All planes as they lie, unless a kind has to put them together first.
        """
        return self.planes(cache), facts.held

    def state(self, cache: Any) -> State:
        """What is valid at this offset only."""
        return State()

    @abstractmethod
    def place(self, params: Mapping[str, Scalar], meta: Meta | None, p: int) -> Placement:
        """Where the rows of a cache rebuilt at ``p`` go.

        ``meta`` is that of a snapshot taken exactly at ``p``, or ``None`` to resume
        elsewhere. Leaves room so that the next token does not copy the whole cache.
        """

    def needs(
        self, params: Mapping[str, Scalar], meta: Meta | None, p: int
    ) -> tuple[tuple[int, int], ...]:
        """The half-open position ranges that must be covered to resume at ``p``."""
        return merged(
            (s.position, s.position + s.length) for s in self.place(params, meta, p).segments
        )

    @abstractmethod
    def build(
        self,
        params: Mapping[str, Scalar],
        meta: Meta | None,
        p: int,
        planes: Mapping[str, mx.array],
        tensors: Mapping[str, mx.array],
        boundary: int | None,
    ) -> Any:
        """The live cache at offset ``p``, owning ``planes`` and the state ``tensors``."""


class Composite(ABC):
    """A kind that only holds other caches. Its inner kinds are part of its kind.

    What it is made with, ``params``, is recorded with each leaf inside it.
    """

    kind: str
    version: int = 1

    @abstractmethod
    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is such a holder."""

    @abstractmethod
    def children(self, cache: Any) -> tuple[Any, ...]:
        """The inner caches, in order."""

    def params(self, cache: Any) -> Mapping[str, Scalar]:
        """What fixes the holder and never changes during its life."""
        return {}

    def spelled(self, inner: Sequence[str]) -> str:
        """The kind with the inner kinds, of which ``inner`` are held now."""
        return f"{self.kind}({','.join(inner)})"

    @abstractmethod
    def assemble(self, children: Sequence[Any], params: Mapping[str, Scalar]) -> Any:
        """A holder of ``children``. Raises ``MalformedCache`` where it cannot be."""


def is_a(cache: object, module: str, name: str) -> bool:
    """Whether the class of ``cache`` is exactly that one. Imports nothing: who has one, has it."""
    return type(cache) is getattr(sys.modules.get(module), name, None)


def itemsize(dtype: str) -> int:
    """Bytes of one element of the MLX dtype named ``dtype``."""
    return _ITEMSIZE[dtype]


_ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}


def dtype_name(array: mx.array) -> str:
    """The MLX dtype's plain name: ``bfloat16``, ``uint32`` …"""
    return str(array.dtype).rpartition(".")[2]


def row_spec(name: str, array: mx.array, axis: int = 2) -> RowSpec:
    """The row tensor that ``array``, a plane, holds."""
    shape = array.shape
    return RowSpec(name, dtype_name(array), (*shape[:axis], 0, *shape[axis + 1 :]), axis)


def grown(positions: int, step: int = GROWTH_STEP) -> int:
    """Slots for ``positions`` and at least one more, a multiple of ``step``."""
    return (positions + step) // step * step


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same positions as sorted, disjoint, non-empty half-open ranges."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return tuple(out)


def entry(facts: Mapping[str, object], name: str) -> int:
    """The integer of at least 0 that parameters or metadata hold under ``name``.

    Raises ``MalformedCache`` where there is something else.
    """
    value = facts.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise MalformedCache(f"{name} is {value!r} where an integer of at least 0 is due")


def whole(cache: object, name: str) -> int:
    """The integer of at least 0 in the attribute ``name`` of ``cache``.

    Raises ``BatchCache`` for an array, one number per request; ``MalformedCache`` otherwise.
    """
    value = getattr(cache, name, None)
    field_name = f"{type(cache).__name__}.{name}"
    if getattr(value, "ndim", 0):
        raise BatchCache(f"{field_name} holds one number per request")
    return entry({field_name: value}, field_name)


def committed(cache: Any) -> int:
    """The offset of a cache that has ``keys`` and ``values``, at least 1.

    Raises ``EmptyCache`` where no token is covered, ``BatchCache`` or ``MalformedCache``.
    """
    name = type(cache).__name__
    offset = whole(cache, "offset")
    if (cache.keys is None) != (cache.values is None):
        raise MalformedCache(f"{name} holds only one of keys and values")
    if cache.keys is None and offset:
        raise MalformedCache(f"{name} claims {offset} positions but holds no keys")
    if not offset:
        raise EmptyCache(f"{name} covers no token")
    return offset


def recorded_floor(cache: object, highest: int, name: str = RECORD) -> int | None:
    """The record of a live cache, an integer in ``[0, highest]``; ``None`` is unknown history.

    ``name`` is the attribute that holds it.
    """
    value = getattr(cache, name, None)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= highest:
        return value
    return None


def recorded_boundary(cache: object, offset: int, name: str = RECORD) -> int:
    """The precision boundary that a live cache records, as ``recorded_floor`` reads it.

    Unknown history fails closed: ``offset``.
    """
    recorded = recorded_floor(cache, offset, name)
    return offset if recorded is None else recorded


def boundary_at(boundary: int | None, p: int) -> int:
    """What a cache rebuilt at ``p`` records. Raises ``MalformedCache`` below the boundary."""
    if boundary is not None and boundary > p:
        raise MalformedCache(f"Rows converted at {boundary} cannot resume at {p}")
    return p if boundary is None else boundary


def check_planes(cache: object, planes: Sequence[mx.array], slots: int) -> None:
    """Refuse planes of several requests, of unequal length, or with fewer than ``slots`` slots.

    Planes are ``[B, H, T, D]``. Raises ``BatchCache`` or ``MalformedCache``.
    """
    name = type(cache).__name__
    for plane in planes:
        axes = getattr(plane, "ndim", None)
        if axes != 4:
            found = type(plane).__name__ if axes is None else f"an array of {axes} axes"
            raise MalformedCache(f"{name} holds {found} where an array of 4 axes is due")
        if plane.shape[0] != 1:
            raise BatchCache(f"{name} holds {plane.shape[0]} requests")
        if plane.shape[2] < slots:
            raise MalformedCache(f"{name} claims {slots} positions but holds {plane.shape[2]}")
    lengths = {plane.shape[2] for plane in planes}
    if len(lengths) > 1:
        raise MalformedCache(f"{name} holds arrays of unequal length: {sorted(lengths)}")


PARTS = ("packed", "scales", "biases")
"""The planes of quantized rows, in mlx's order."""


def packed_planes(cache: Any) -> dict[str, mx.array]:
    """The six planes of a cache whose keys and values are quantized, by name.

    Raises ``MalformedCache`` where a side is not packed words, scales and biases.
    """
    planes = {}
    for side, parts in (("keys", cache.keys), ("values", cache.values)):
        if not isinstance(parts, tuple | list) or len(parts) != len(PARTS):
            raise MalformedCache(f"{type(cache).__name__}.{side} is not {', '.join(PARTS)}")
        planes.update({f"{side[0]}.{part}": x for part, x in zip(PARTS, parts, strict=True)})
    return planes


def packed_sides(planes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Keys and values of ``packed_planes``, each a tuple of three planes."""
    keys, values = (tuple(planes[f"{side}.{part}"] for part in PARTS) for side in "kv")
    return keys, values


def check_packed(cache: object, planes: Mapping[str, mx.array], bits: int, group_size: int) -> None:
    """Refuse planes that are not ``bits`` per value in groups of ``group_size``.

    Raises ``MalformedCache``.
    """
    name = type(cache).__name__
    for side in ("k", "v"):
        dtypes = [dtype_name(planes[f"{side}.{part}"]) for part in PARTS]
        if dtypes[0] != "uint32" or dtypes[1] != dtypes[2]:
            raise MalformedCache(
                f"{name} holds {dtypes[0]} words, {dtypes[1]} scales and {dtypes[2]} biases; "
                "words are uint32, and the others alike"
            )
        packed, scales, biases = (planes[f"{side}.{part}"].shape[3] for part in PARTS)
        if scales != biases or packed * 32 != scales * group_size * bits:
            raise MalformedCache(
                f"{name} holds {packed} packed words, {scales} scales and {biases} biases per "
                f"row, which is not {bits} bits in groups of {group_size}"
            )
