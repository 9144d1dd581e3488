"""Quantized rows that are read densely: six planes in memory, full rows in every read.

mlx-lm's ``QuantizedKVCache`` hands its planes to the model, whose attention multiplies them
as they are. Attention with sinks, latent attention and sliding windows do not know how. The
caches here hold the same planes and hand out rows ``[B, H, T, D]`` in the model's precision,
so that every model runs with them unchanged; they have no attribute ``bits``, by which
mlx-lm's attention would take the rows for planes.

Slots are moved by mlx-lm's own classes, one plane at a time: growth, the ring and the cut of
a chunk's front are exactly theirs.

>>> import mlx.core as mx
>>> cache = DenseQuantizedKVCache(bits=4, group_size=32)
>>> keys, values = cache.update_and_fetch(mx.ones((1, 2, 5, 64)), mx.ones((1, 2, 5, 32)))
>>> keys.shape, values.shape, cache.keys[0].shape, cache.bytes_per_token()
((1, 2, 5, 64), (1, 2, 5, 32), (1, 2, 256, 8), 144)
"""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kvkeep.caches.reads import Reads
from kvkeep.caches.scheme import check_affine, check_head

Planes = tuple[mx.array, mx.array, mx.array]
"""Packed words, scales and biases, each ``[B, H, T, …]``."""


def quantize(rows: mx.array, group_size: int, bits: int) -> Planes:
    """The planes of ``rows`` ``[B, H, T, D]``; D is a multiple of ``group_size``."""
    packed, scales, biases = mx.quantize(rows, group_size=group_size, bits=bits)
    return packed, scales, biases


def dequantize(planes: Any, group_size: int, bits: int) -> mx.array:
    """The rows ``[B, H, T, D]`` that packed words, scales and biases stand for."""
    packed, scales, biases = planes
    return mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)


class QuantizedRows(Reads):
    """What the storages have in common: planes, and a plain cache of mlx-lm to move slots."""

    kind: ClassVar[str]
    moved: ClassVar[tuple[str, ...]] = ("offset",)
    """The fields of the plain cache that say where the slots are."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Its parameters."""

    keys: Planes | None
    values: Planes | None
    offset: int

    def __init__(self, bits: int = 4, group_size: int = 64) -> None:
        check_affine(bits, group_size)
        self.keys, self.values, self.offset = None, None, 0
        self.packed_bits, self.group_size = bits, group_size
        self.boundary = 0

    def _plain(self) -> Any:
        """A blank cache of mlx-lm with the same slots."""
        raise NotImplementedError

    @property
    def minimum_resumable_offset(self) -> int:
        """The precision boundary, or the first offset whose window is whole."""
        return self.boundary

    @minimum_resumable_offset.setter
    def minimum_resumable_offset(self, boundary: int) -> None:
        self.boundary = boundary

    def take_over(self, plain: Any) -> None:
        """Hold the rows of ``plain``, quantized as they lie; the boundary is its offset.

        ``plain`` is what ``_plain`` makes, with any rows.
        """
        for name in self.moved:
            setattr(self, name, getattr(plain, name))
        self.boundary = plain.offset
        if plain.keys is not None:
            self.keys = quantize(plain.keys, self.group_size, self.packed_bits)
            self.values = quantize(plain.values, self.group_size, self.packed_bits)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append ``[B, H, L, D]``, which is quantized first; all rows as attention reads them.

        Raises ``BadScheme`` where heads are no whole groups; nothing is appended then.
        """
        check_head("Keys", keys.shape[3], self.group_size)
        check_head("Values", values.shape[3], self.group_size)
        new = [quantize(rows, self.group_size, self.packed_bits) for rows in (keys, values)]
        parts = self._parts()
        rows = [part.update_and_fetch(*pair) for part, *pair in zip(parts, *new, strict=True)]
        self._settle(parts)
        return self._dense(rows)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows, as the last append returned them."""
        return self._dense([part.keys_and_values() for part in self._parts()])

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the next ``length`` positions over what they will read."""
        mask: mx.array | str | None = self._parts()[0].make_mask(
            length, return_array=return_array, window_size=window_size
        )
        return mask

    def is_trimmable(self) -> bool:
        """Whether the newest positions can be dropped now."""
        return bool(self._parts()[0].is_trimmable())

    def trim(self, n: int) -> int:
        """Drop the last ``n`` positions, at most all; how many went."""
        part = self._parts()[0]
        gone: int = part.trim(n)
        for name in self.moved:
            setattr(self, name, getattr(part, name))
        return gone

    def max_append(self) -> int | None:
        """``None``: nothing changes any more."""
        return None

    def bytes_per_token(self) -> int:
        """Bytes that one more token adds to one row's planes; 0 before the first append."""
        return sum(plane[:1, :, :1].nbytes for plane in self._planes())

    @property
    def nbytes(self) -> int:
        """Bytes of the planes, with their room to grow."""
        return sum(plane.nbytes for plane in self._planes())

    def empty(self) -> bool:
        """Whether nothing was appended yet."""
        return self.keys is None

    def size(self) -> int:
        """Positions held."""
        return int(self._parts()[0].size())

    @property
    def state(self) -> tuple[Any, ...]:
        """Planes, then everything else that ``from_state`` needs."""
        return (self.keys, self.values, *(getattr(self, name) for name in self._fields()))

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.keys, self.values = value[:2]
        for name, field in zip(self._fields(), value[2:], strict=True):
            setattr(self, name, field)

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> Any:
        """A cache with that state."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def _fields(self) -> tuple[str, ...]:
        return ("packed_bits", "group_size", "boundary", *self.moved, *self.fixed)

    def _planes(self) -> tuple[mx.array, ...]:
        return () if self.keys is None or self.values is None else (*self.keys, *self.values)

    def _parts(self) -> list[Any]:
        """One plain cache for each of packed words, scales and biases."""
        parts = []
        for i in range(3):
            part = self._plain()
            for name in self.moved:
                setattr(part, name, getattr(self, name))
            if self.keys is not None and self.values is not None:
                part.keys, part.values = self.keys[i], self.values[i]
            parts.append(part)
        return parts

    def _settle(self, parts: list[Any]) -> None:
        self.keys = (parts[0].keys, parts[1].keys, parts[2].keys)
        self.values = (parts[0].values, parts[1].values, parts[2].values)
        for name in self.moved:
            setattr(self, name, getattr(parts[0], name))

    def _dense(self, rows: list[Any]) -> tuple[mx.array, mx.array]:
        keys, values = (
            dequantize(planes, self.group_size, self.packed_bits)
            for planes in zip(*rows, strict=True)
        )
        return keys, values


class DenseQuantizedKVCache(QuantizedRows):
    """Every position, quantized; ``kv-quant`` with a dense read."""

    kind = "kv-quant"

    def _plain(self) -> Any:
        return KVCache()  # type: ignore[no-untyped-call]
