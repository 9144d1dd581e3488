"""A frame: the one byte format of everything that holds tensors. ``docs/format.md`` has every byte.

::

    fixed header   HEAD, 32 bytes
    header         msgpack: [[[[name, …], dtype, shape, encoding, offset, size], …], extra]
    zeros          up to a multiple of ALIGNMENT
    payload        the stored bytes of each stack, each at a multiple of ALIGNMENT, zeros between

``Draft`` writes one, ``Frame`` reads one. Nothing of a frame is used before all of it is verified.
The header is the matter of ``table.py``, the stored bytes that of ``encoding.py``.

>>> draft = Draft([TensorSpec("keys", "float32", (1, 2, 3, 4))], {"start": 0})
>>> draft.views["keys"][...] = 1.5
>>> frame = Frame.open(draft.seal())
>>> frame.extra, float(frame.read("keys").sum())
({'start': 0}, 36.0)
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import msgpack
import numpy as np
import xxhash

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.buffers import fresh
from kvkeep.persistence.encoding import Decoded, decode, encode
from kvkeep.persistence.table import (
    MOST_HEADER,
    Stack,
    Table,
    aligned,
    check_limits,
    end_of,
    pack_header,
    read_table,
    stacked,
    unpack_header,
)
from kvkeep.persistence.tensors import TensorSpec

if TYPE_CHECKING:
    Host = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"KVKF"
VERSION = 2
"""What is written. Version 1, where each tensor is a stack of its own, is read as well."""

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


class Draft:
    """A frame in the making: memory for the header and the raw payload in one piece.

    Fill ``views`` (name: numpy array in the host dtype and the tensor's shape), then ``seal``.
    Tensors that are alike are compressed together where they follow each other in ``specs``.
    ``extra`` is a small mapping of msgpack's own types, with string keys. Raises ``ValueError``
    where the tensors or ``extra`` are beyond what a frame can hold, and msgpack's ``TypeError``.
    """

    def __init__(self, specs: Sequence[TensorSpec], extra: Mapping[str, Any]) -> None:
        self._extra: bytes = msgpack.packb(dict(extra))
        self._stacks = stacked(specs)
        end = end_of(self._stacks)
        header = pack_header(self._stacks, self._extra)
        check_limits(self._stacks, header, end)
        self._start = aligned(HEAD.size + len(header))
        self.nbytes = self._start + end
        """Bytes of the frame if nothing is compressed, which is what the draft holds."""
        self._buffer: Host | None = fresh(self.nbytes)
        self._buffer[: self._start] = 0
        self.views: dict[str, Host] = {}
        for stack in self._stacks:
            flat = self._buffer[self._start + stack.offset :][: stack.size]
            whole = flat.view(stack.spec.host_dtype).reshape(stack.spec.shape)
            # Slices, because an item of a stack of scalars would be no view.
            self.views |= {
                name: whole[i : i + 1].reshape(stack.shape) for i, name in enumerate(stack.names)
            }
        for stack, follower in pairwise(self._stacks):
            gap = stack.offset + stack.size
            self._buffer[self._start + gap : self._start + follower.offset] = 0

    def seal(self, compression: Literal["auto", "none"] = "auto") -> memoryview:
        """The finished frame. May be called once, in any thread; ``views`` is empty afterwards.

        ``auto`` compresses each stack that gains from it. The frame lies in the draft's own
        memory; where every stack stays raw, no byte of the payload moves.
        """
        buffer = self._buffer
        if buffer is None:
            raise RuntimeError("This draft is sealed already")
        self._buffer = None
        self.views = {}
        stacks = self._stacks
        if compression == "auto":
            stacks = _compress(stacks, buffer[self._start :])
        return _close(buffer, self._start, stacks, self._extra)


class Frame:
    """A verified frame over somebody else's bytes, which must outlive what is read from it.

    Over a value in LMDB's map that is the end of the transaction. ``specs`` are the tensors by
    name and ``stacks`` what is stored together, both in the order in which they are stored.
    """

    def __init__(self, view: memoryview, start: int, table: Table, extra: dict[str, Any]) -> None:
        self._payload = np.frombuffer(view, np.uint8)[start:]
        self._places = table.places
        self._last: tuple[Stack, Decoded] | None = None
        self.nbytes = len(view)
        self.extra = extra
        self.specs = table.specs
        self.stacks = table.stacks

    @classmethod
    def open(cls, buffer: bytes | bytearray | memoryview) -> Frame:
        """The frame in ``buffer``, all of it verified, none of it copied.

        Raises ``CorruptFrame`` with the reason, or ``NewerFormat``.
        """
        view = memoryview(buffer).cast("B").toreadonly()
        header, start, version = _split(view)
        table, extra = unpack_header(header)
        return cls(view, start, read_table(table, len(view) - start, version), extra)

    def decode(self, stack: Stack) -> Decoded:
        """The tensors of ``stack``, to be copied out by their numbers in it.

        Raises ``CorruptFrame`` where compressed bytes are not its own.
        """
        stored = self._payload[stack.offset : stack.offset + stack.size]
        return decode(stack.spec, stack.encoding, stored)

    def read(self, name: str) -> Host:
        """The tensor ``name`` in its host dtype, read-only; a view where it is stored raw.

        Raises ``KeyError``, or ``CorruptFrame`` as ``decode``.
        """
        stack, number = self._places[name]
        tensor = self._decoded(stack).read(number)
        tensor.flags.writeable = False
        return tensor

    def copy_into(self, name: str, out: Host, axis: int, start: int, stop: int) -> None:
        """Copy the rows ``[start, stop)`` of tensor ``name`` along ``axis`` into ``out``.

        ``out`` has the host dtype and exactly the rows' shape, else ``CorruptFrame`` is raised:
        the frame does not hold what the caller was told.
        """
        stack, number = self._places[name]
        shape = stack.shape
        rows = (*shape[:axis], stop - start, *shape[axis + 1 :])
        due = 0 <= start <= stop <= shape[axis] and out.shape == rows
        if not due or out.dtype != stack.spec.host_dtype:
            dtype = stack.spec.dtype
            raise CorruptFrame(f"{name}: {dtype}{shape} where {out.dtype}{out.shape} is due")
        index = (*(slice(None),) * axis, slice(start, stop))
        self._decoded(stack).copy_into(out, number, index)

    def _decoded(self, stack: Stack) -> Decoded:
        """As ``decode``; the last one is kept for the next tensor of the same stack."""
        if self._last is None or self._last[0] is not stack:
            self._last = stack, self.decode(stack)
        return self._last[1]


def _compress(stacks: Sequence[Stack], payload: Host) -> list[Stack]:
    """Encode each stack and close the gaps, in place: nothing moves up, as nothing grows."""
    out = []
    at = 0
    for stack in stacks:
        raw = payload[stack.offset :][: stack.size]
        encoding, stored = encode(stack.spec, raw)
        size = stack.size
        if stored is not None:
            size = len(stored)
            payload[at : at + size] = np.frombuffer(stored, np.uint8)
        elif at != stack.offset:
            payload[at : at + size] = raw
        out.append(replace(stack, encoding=encoding, offset=at, size=size))
        following = aligned(at + size)
        payload[at + size : following] = 0
        at = following
    return out


def _close(buffer: Host, start: int, stacks: Sequence[Stack], extra: bytes) -> memoryview:
    """Write the headers before the payload at ``start``, and the checksum over everything."""
    header = pack_header(stacks, extra)
    size = end_of(stacks)
    front = start - aligned(HEAD.size + len(header))
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


def _split(data: memoryview) -> tuple[bytes, int, int]:
    """The msgpack header, where the payload starts, and the version: lengths and checksum hold."""
    if len(data) < HEAD.size:
        raise CorruptFrame(f"A frame of {len(data)} bytes is too short")
    magic, version, flags, header, zero, payload, checksum = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise CorruptFrame("Not a frame: it does not begin with KVKF")
    start = aligned(HEAD.size + header)
    if header > MOST_HEADER or start + payload != len(data):
        raise CorruptFrame(f"A frame of {len(data)} bytes claims {start + payload}")
    # Before the version is believed: a flipped bit must not pass for a newer format.
    if _checksum(data) != checksum:
        raise CorruptFrame("A frame does not match its checksum")
    if version > VERSION or (version and flags):
        raise NewerFormat(f"A frame of format {version} with flags {flags:#x}; this is {VERSION}")
    if version == 0 or zero:
        raise CorruptFrame(f"A frame of format {version}, which never was")
    if any(data[HEAD.size + header : start]):
        raise CorruptFrame("A frame has something where zeros are due")
    return bytes(data[HEAD.size : HEAD.size + header]), start, version
