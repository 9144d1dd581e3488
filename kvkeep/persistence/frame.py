"""A frame: the one byte format of everything that holds tensors. ``docs/format.md`` has every byte.

::

    fixed header   HEAD, 32 bytes
    header         msgpack: [[[name, dtype, shape, encoding, offset, size], …], extra]
    zeros          up to a multiple of ALIGNMENT
    payload        the stored bytes of each tensor, each at a multiple of ALIGNMENT, zeros between

``Draft`` writes one, ``Frame`` reads one. Nothing of a frame is used before all of it is verified.

>>> draft = Draft([TensorSpec("keys", "float32", (1, 2, 3, 4))], {"start": 0})
>>> draft.views["keys"][...] = 1.5
>>> frame = Frame.open(draft.seal())
>>> frame.extra, float(frame.read("keys").sum())
({'start': 0}, 36.0)
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgpack
import numpy as np
import xxhash

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.buffers import fresh
from kvkeep.persistence.encoding import (
    MOST_GAIN,
    RAW,
    decode,
    decode_into,
    encode,
    encodings_of,
)
from kvkeep.persistence.tensors import HOST_DTYPES, TensorSpec

if TYPE_CHECKING:
    Host = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"KVKF"
VERSION = 1
ALIGNMENT = 64

HEAD = struct.Struct(
    "<"
    "4s"  # MAGIC
    "H"  # VERSION of what follows this struct; readers leave higher ones alone
    "H"  # flags, none defined; readers leave frames with unknown ones alone
    "I"  # bytes of the msgpack header
    "I"  # zero
    "Q"  # bytes of the payload
    "Q"  # xxh3-64 of the 24 bytes before this field and of everything after it
)
CHECKED = HEAD.size - 8

_ARRAY_OF_TWO = b"\x92"
_PLAIN = (int, str, bytes, bool, float, type(None))
_UNPACKING = (ValueError, TypeError, msgpack.UnpackException)

MOST_HEADER = 1 << 22
MOST_TENSORS = 1 << 14
MOST_AXES = 8
MOST_NAME = 256
MOST_PAYLOAD = (1 << 32) - 2 * MOST_HEADER
SMALL_TABLE = 1 << 16
"""Bytes of a packed table that is worth remembering."""


@dataclass(frozen=True)
class _Part:
    spec: TensorSpec
    encoding: int
    offset: int
    size: int


@dataclass(frozen=True)
class _Table:
    parts: Mapping[str, _Part]
    specs: Mapping[str, TensorSpec]


class Draft:
    """A frame in the making: memory for the header and the raw payload in one piece.

    Fill ``views`` (name: numpy array in the host dtype and the tensor's shape), then ``seal``.
    ``extra`` is a small mapping of msgpack's own types, with string keys. Raises ``ValueError``
    where the tensors or ``extra`` are beyond what a frame can hold, and msgpack's ``TypeError``.
    """

    def __init__(self, specs: Sequence[TensorSpec], extra: Mapping[str, Any]) -> None:
        self._extra: bytes = msgpack.packb(dict(extra))
        parts = []
        at = 0
        for spec in specs:
            parts.append(_Part(spec, RAW, at, spec.nbytes))
            at = _aligned(at + spec.nbytes)
        self._parts = parts
        end = parts[-1].offset + parts[-1].size if parts else 0
        header = _pack_header(parts, self._extra)
        _check_limits(parts, header, end)
        self._start = _aligned(HEAD.size + len(header))
        self.nbytes = self._start + end
        """Bytes of the frame if nothing is compressed, which is what the draft holds."""
        self._buffer: Host | None = fresh(self.nbytes)
        self._buffer[: self._start] = 0
        self.views: dict[str, Host] = {}
        for part in parts:
            flat = self._buffer[self._start + part.offset :][: part.size]
            self.views[part.spec.name] = flat.view(part.spec.host_dtype).reshape(part.spec.shape)
        for part, follower in pairwise(parts):
            self._buffer[self._start + part.offset + part.size : self._start + follower.offset] = 0

    def seal(self, compression: Literal["auto", "none"] = "auto") -> memoryview:
        """The finished frame. May be called once, in any thread; ``views`` is empty afterwards.

        ``auto`` compresses each tensor that gains from it. The frame lies in the draft's own
        memory; where every tensor stays raw, no byte of the payload moves.
        """
        buffer = self._buffer
        if buffer is None:
            raise RuntimeError("This draft is sealed already")
        self._buffer = None
        self.views = {}
        parts = self._parts
        if compression == "auto":
            parts = _compress(parts, buffer[self._start :])
        return _close(buffer, self._start, parts, self._extra)


class Frame:
    """A verified frame over somebody else's bytes, which must outlive what is read from it.

    Over a value in LMDB's map that is the end of the transaction.
    """

    def __init__(self, view: memoryview, start: int, table: _Table, extra: dict[str, Any]) -> None:
        self._payload = np.frombuffer(view, np.uint8)[start:]
        self._parts = table.parts
        self.nbytes = len(view)
        self.extra = extra
        self.specs = table.specs

    @classmethod
    def open(cls, buffer: bytes | bytearray | memoryview) -> Frame:
        """The frame in ``buffer``, all of it verified, none of it copied.

        Raises ``CorruptFrame`` with the reason, or ``NewerFormat``.
        """
        view = memoryview(buffer).cast("B").toreadonly()
        header, start = _split(view)
        table, extra = _unpack_header(header)
        return cls(view, start, _read_table(table, len(view) - start), extra)

    def read(self, name: str) -> Host:
        """The tensor ``name`` in its host dtype, read-only; a view where it is stored raw.

        Raises ``KeyError``, or ``CorruptFrame`` where compressed bytes are not its own.
        """
        part = self._parts[name]
        tensor = decode(part.spec, part.encoding, self._stored(part))
        tensor.flags.writeable = False
        return tensor

    def copy_into(self, name: str, out: Host, axis: int, start: int, stop: int) -> None:
        """Copy the rows ``[start, stop)`` of tensor ``name`` along ``axis`` into ``out``.

        ``out`` has the host dtype and exactly the rows' shape, else ``CorruptFrame`` is raised:
        the frame does not hold what the caller was told.
        """
        part = self._parts[name]
        spec, shape = part.spec, part.spec.shape
        rows = (*shape[:axis], stop - start, *shape[axis + 1 :])
        due = 0 <= start <= stop <= shape[axis] and out.shape == rows
        if not due or out.dtype != spec.host_dtype:
            raise CorruptFrame(f"{name}: {spec.dtype}{shape} where {out.dtype}{out.shape} is due")
        index = (*(slice(None),) * axis, slice(start, stop))
        decode_into(spec, part.encoding, self._stored(part), index, out)

    def _stored(self, part: _Part) -> Host:
        return self._payload[part.offset : part.offset + part.size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pack_header(parts: Sequence[_Part], extra: bytes) -> bytes:
    table: bytes = msgpack.packb(
        [[p.spec.name, p.spec.dtype, p.spec.shape, p.encoding, p.offset, p.size] for p in parts]
    )
    return _ARRAY_OF_TWO + table + extra


def _check_limits(parts: Sequence[_Part], header: bytes, payload: int) -> None:
    try:
        _unpack_header(header)
    except CorruptFrame as error:
        raise ValueError(error.problem) from error
    names = {part.spec.name for part in parts}
    if (
        len(names) != len(parts)
        or len(parts) > MOST_TENSORS
        or len(header) > MOST_HEADER
        or payload > MOST_PAYLOAD
        or any(not 0 < len(name) <= MOST_NAME for name in names)
        or any(len(part.spec.shape) > MOST_AXES for part in parts)
    ):
        raise ValueError("These tensors do not fit one frame: too many, too large, or named twice")


def _compress(parts: Sequence[_Part], payload: Host) -> list[_Part]:
    """Encode each tensor and close the gaps, in place: nothing moves up, as nothing grows."""
    out = []
    at = 0
    for part in parts:
        raw = payload[part.offset :][: part.size]
        encoding, stored = encode(part.spec, raw)
        size = part.size
        if stored is not None:
            size = len(stored)
            payload[at : at + size] = np.frombuffer(stored, np.uint8)
        elif at != part.offset:
            payload[at : at + size] = raw
        out.append(_Part(part.spec, encoding, at, size))
        following = _aligned(at + size)
        payload[at + size : following] = 0
        at = following
    return out


def _close(buffer: Host, start: int, parts: Sequence[_Part], extra: bytes) -> memoryview:
    """Write the headers before the payload at ``start``, and the checksum over everything."""
    header = _pack_header(parts, extra)
    size = parts[-1].offset + parts[-1].size if parts else 0
    front = start - _aligned(HEAD.size + len(header))
    frame = buffer[front : start + size].data
    after = HEAD.size + len(header)
    frame[HEAD.size : after] = header
    frame[after : start - front] = bytes(start - front - after)
    HEAD.pack_into(frame, 0, MAGIC, VERSION, 0, len(header), 0, size, 0)
    struct.pack_into("<Q", frame, CHECKED, _checksum(frame))
    return frame


def _checksum(frame: memoryview) -> int:
    state = xxhash.xxh3_64(frame[:CHECKED])
    state.update(frame[HEAD.size :])
    return state.intdigest()


def _split(data: memoryview) -> tuple[bytes, int]:
    """The msgpack header and where the payload starts, with lengths and checksum verified."""
    if len(data) < HEAD.size:
        raise CorruptFrame(f"A frame of {len(data)} bytes is too short")
    magic, version, flags, header, zero, payload, checksum = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise CorruptFrame("Not a frame: it does not begin with KVKF")
    start = _aligned(HEAD.size + header)
    if header > MOST_HEADER or start + payload != len(data):
        raise CorruptFrame(f"A frame of {len(data)} bytes claims {start + payload}")
    # Before the version is believed: a flipped bit must not pass for a newer format.
    if _checksum(data) != checksum:
        raise CorruptFrame("A frame does not match its checksum")
    if version > VERSION or (version == VERSION and flags):
        raise NewerFormat(f"A frame of format {version} with flags {flags:#x}; this is {VERSION}")
    if version != VERSION or zero:
        raise CorruptFrame(f"A frame of format {version}, which never was")
    if any(data[HEAD.size + header : start]):
        raise CorruptFrame("A frame has something where zeros are due")
    return bytes(data[HEAD.size : HEAD.size + header]), start


def _unpack_header(packed: bytes) -> tuple[bytes, dict[str, Any]]:
    """The table of tensors, still packed, and ``extra``."""
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


def _read_table(packed: bytes, payload: int) -> _Table:
    """The tensors of a frame. Frames of one recipe mostly have the same table."""
    known = _known_table if len(packed) <= SMALL_TABLE else _known_table.__wrapped__
    return known(packed, payload)


@lru_cache(maxsize=16)
def _known_table(packed: bytes, payload: int) -> _Table:
    try:
        rows = _unpacker(packed).unpack()
    except _UNPACKING as error:
        raise CorruptFrame(f"A frame's header cannot be read ({error})") from error
    if type(rows) is not list:
        raise CorruptFrame("A frame's header has another form")
    parts: dict[str, _Part] = {}
    end = 0
    for row in rows:
        part = _read_part(row)
        if part.spec.name in parts:
            raise CorruptFrame(f"A frame holds {part.spec.name} twice")
        if part.offset != _aligned(end):
            raise CorruptFrame(f"{part.spec.name}: tensors overlap or leave a gap")
        end = part.offset + part.size
        if end > payload:
            raise CorruptFrame(f"{part.spec.name}: reaches beyond the payload")
        parts[part.spec.name] = part
    if end != payload:
        raise CorruptFrame(f"A frame's tensors end at {end} of {payload} bytes")
    specs = {name: part.spec for name, part in parts.items()}
    return _Table(MappingProxyType(parts), MappingProxyType(specs))


def _read_part(row: Any) -> _Part:
    match row:
        case [str(name), str(dtype), list(shape), encoding, offset, size]:
            for number in (*shape, encoding, offset, size):
                if type(number) is not int or number < 0:
                    raise CorruptFrame("A frame's header has something else where a number is due")
        case _:
            raise CorruptFrame("A frame's header has another form")
    if not 0 < len(name) <= MOST_NAME or len(shape) > MOST_AXES or dtype not in HOST_DTYPES:
        raise CorruptFrame("A frame holds a tensor of unknown dtype, too many axes or no name")
    spec = TensorSpec(name, dtype, tuple(shape))
    if encoding not in encodings_of(spec):
        raise CorruptFrame(f"{name}: no encoding {encoding} of {dtype}")
    if spec.nbytes != size if encoding == RAW else not 0 < size <= spec.nbytes <= size * MOST_GAIN:
        raise CorruptFrame(f"{name}: {dtype}{spec.shape} does not fit {size} stored bytes")
    return _Part(spec, encoding, offset, size)
