"""The header of a frame: which tensors it holds, how, and where. ``docs/format.md`` has every byte.

Tensors of one dtype and shape that follow each other are stored as one **stack**, compressed
together: a chunk has the same few tensors for every layer, and each alone is small.

Nothing that a header claims is believed before it is checked against the bytes at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgpack

from kvkeep.errors import CorruptFrame
from kvkeep.persistence.encoding import MOST_GAIN, RAW, encodings_of
from kvkeep.persistence.tensors import HOST_DTYPES, TensorSpec

ALIGNMENT = 64
STACK = 1 << 20
"""Bytes of a stack that no further tensor joins: small enough to stay in a core's cache."""

MOST_HEADER = 1 << 22
MOST_TENSORS = 1 << 14
MOST_AXES = 8
MOST_NAME = 256
MOST_PAYLOAD = (1 << 32) - 2 * MOST_HEADER
SMALL_TABLE = 1 << 16
"""Bytes of a packed table that is worth remembering."""

_ARRAY_OF_TWO = b"\x92"
_PLAIN = (int, str, bytes, bool, float, type(None))
_UNPACKING = (ValueError, TypeError, msgpack.UnpackException)


@dataclass(frozen=True)
class Stack:
    """Tensors of one dtype and shape, stored as one: in ``size`` bytes at ``offset``.

    ``spec`` is all of them together, with a first axis that counts them.
    """

    names: tuple[str, ...]
    spec: TensorSpec
    encoding: int
    offset: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return self.spec.shape[1:]


@dataclass(frozen=True)
class Table:
    """All stacks of a frame in their order, and every tensor by its name in the same order."""

    stacks: tuple[Stack, ...]
    specs: Mapping[str, TensorSpec]
    places: Mapping[str, tuple[Stack, int]]
    """In which stack each tensor is, and where in it."""


def aligned(size: int) -> int:
    """``size``, or the next multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def end_of(stacks: Sequence[Stack]) -> int:
    """Bytes of the payload that ``stacks`` fill."""
    return stacks[-1].offset + stacks[-1].size if stacks else 0


def stacked(specs: Sequence[TensorSpec]) -> list[Stack]:
    """``specs`` as stacks that lie one after the other, nothing compressed."""
    stacks = []
    at = 0
    for group in _alike(specs):
        first = group[0]
        whole = TensorSpec(first.name, first.dtype, (len(group), *first.shape))
        names = tuple(spec.name for spec in group)
        stacks.append(Stack(names, whole, RAW, at, whole.nbytes))
        at = aligned(at + whole.nbytes)
    return stacks


def _alike(specs: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    group: list[TensorSpec] = []
    for spec in specs:
        if group and (
            (spec.dtype, spec.shape) != (group[0].dtype, group[0].shape)
            or len(group) * spec.nbytes >= STACK
        ):
            yield group
            group = []
        group.append(spec)
    if group:
        yield group


def pack_header(stacks: Sequence[Stack], extra: bytes) -> bytes:
    """The header of a frame with ``stacks``; ``extra`` is packed already."""
    table: bytes = msgpack.packb(
        [[s.names, s.spec.dtype, s.shape, s.encoding, s.offset, s.size] for s in stacks]
    )
    return _ARRAY_OF_TWO + table + extra


def check_limits(stacks: Sequence[Stack], header: bytes, payload: int) -> None:
    """Raise ``ValueError`` where a frame would be one that no reader takes."""
    try:
        unpack_header(header)
    except CorruptFrame as error:
        raise ValueError(error.problem) from error
    names = [name for stack in stacks for name in stack.names]
    if (
        len(set(names)) != len(names)
        or len(names) > MOST_TENSORS
        or len(header) > MOST_HEADER
        or payload > MOST_PAYLOAD
        or any(not 0 < len(name) <= MOST_NAME for name in names)
        or any(len(stack.shape) > MOST_AXES for stack in stacks)
    ):
        raise ValueError("These tensors do not fit one frame: too many, too large, or named twice")


def unpack_header(packed: bytes) -> tuple[bytes, dict[str, Any]]:
    """The table of stacks, still packed, and ``extra``."""
    unpacker = _unpacker(packed)
    try:
        if unpacker.read_array_header() != 2:
            raise CorruptFrame("A frame's header has another form")
        start = unpacker.tell()
        unpacker.skip()
        table = packed[start : unpacker.tell()]
        extra = unpacker.unpack()
        complete = unpacker.tell() == len(packed)
    except _UNPACKING as error:
        raise CorruptFrame(f"A frame's header cannot be read ({error})") from error
    if not complete or type(extra) is not dict or not _is_plain(extra):
        raise CorruptFrame("A frame's header has another form")
    return table, extra


def _unpacker(packed: bytes) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(
        use_list=True,
        raw=False,
        strict_map_key=True,
        ext_hook=_no_extension,
        max_buffer_size=max(len(packed), 1),
        max_array_len=min(len(packed), MOST_TENSORS),
        max_map_len=min(len(packed), MOST_TENSORS),
    )
    unpacker.feed(packed)
    return unpacker


def _is_plain(extra: dict[Any, Any]) -> bool:
    """Whether all keys are strings and all values are msgpack's own types."""
    waiting: list[Any] = [extra]
    while waiting:
        value = waiting.pop()
        if type(value) is dict:
            if any(type(key) is not str for key in value):
                return False
            waiting += value.values()
        elif type(value) is list:
            waiting += value
        elif type(value) not in _PLAIN:
            return False
    return True


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


def read_table(packed: bytes, payload: int, version: int) -> Table:
    """The stacks of a frame of ``version`` with ``payload`` bytes. Raises ``CorruptFrame``.

    Frames of one recipe mostly have the same table.
    """
    known = _known_table if len(packed) <= SMALL_TABLE else _known_table.__wrapped__
    return known(packed, payload, version)


@lru_cache(maxsize=16)
def _known_table(packed: bytes, payload: int, version: int) -> Table:
    try:
        rows = _unpacker(packed).unpack()
    except _UNPACKING as error:
        raise CorruptFrame(f"A frame's header cannot be read ({error})") from error
    if type(rows) is not list:
        raise CorruptFrame("A frame's header has another form")
    stacks: list[Stack] = []
    specs: dict[str, TensorSpec] = {}
    places: dict[str, tuple[Stack, int]] = {}
    end = 0
    for row in rows:
        stack = _read_stack(row, version)
        for i, name in enumerate(stack.names):
            if name in specs:
                raise CorruptFrame(f"A frame holds {name} twice")
            specs[name] = TensorSpec(name, stack.spec.dtype, stack.shape)
            places[name] = stack, i
        if stack.offset != aligned(end):
            raise CorruptFrame(f"{stack.spec.name}: tensors overlap or leave a gap")
        end = stack.offset + stack.size
        if end > payload:
            raise CorruptFrame(f"{stack.spec.name}: reaches beyond the payload")
        stacks.append(stack)
    if end != payload:
        raise CorruptFrame(f"A frame's tensors end at {end} of {payload} bytes")
    if len(specs) > MOST_TENSORS:
        raise CorruptFrame(f"A frame holds {len(specs):,} tensors")
    return Table(tuple(stacks), MappingProxyType(specs), MappingProxyType(places))


def _read_stack(row: Any, version: int) -> Stack:
    match row:
        case [names, str(dtype), list(shape), encoding, offset, size]:
            if any(type(n) is not int or n < 0 for n in (*shape, encoding, offset, size)):
                raise CorruptFrame("A frame's header has something else where a number is due")
        case _:
            raise CorruptFrame("A frame's header has another form")
    if version == 1:
        names = [names]
    if type(names) is not list or not names:
        raise CorruptFrame("A frame's header has another form")
    if any(type(name) is not str or not 0 < len(name) <= MOST_NAME for name in names):
        raise CorruptFrame("A frame holds a tensor without a proper name")
    if len(shape) > MOST_AXES or dtype not in HOST_DTYPES:
        raise CorruptFrame("A frame holds a tensor of unknown dtype or too many axes")
    spec = TensorSpec(names[0], dtype, (len(names), *shape))
    if encoding not in encodings_of(spec):
        raise CorruptFrame(f"{spec.name}: no encoding {encoding} of {dtype}")
    if spec.nbytes != size if encoding == RAW else not 0 < size <= spec.nbytes <= size * MOST_GAIN:
        raise CorruptFrame(f"{spec.name}: {dtype}{spec.shape} does not fit {size} stored bytes")
    return Stack(tuple(names), spec, encoding, offset, size)
