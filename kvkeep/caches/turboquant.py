"""TurboQuant: keys of few bits as they are, values of fewer bits after a rotation.

8 bits for keys and 3 for values take 200 bytes per token and head at D = 128, where bfloat16
takes 512. Every append encodes the new rows only, once; a read decodes them all, the new ones
too, so a token's rows are read alike now and after a resume. ``turboquant_codes`` has the
arithmetic.

mlx-lm's models read decoded rows. Who reads through ``append_decode`` and ``append_window`` may
defer the rotation: values are then summed as they are stored and the sum is unrotated, which
is the same by linearity up to rounding, and costs one transform per query instead of one per row.

There is no batch layout, so ``mlx_lm.server`` takes its path for single requests.

>>> import mlx.core as mx
>>> cache = TurboQuantKVCache()
>>> rows = mx.random.normal((1, 2, 5, 128)).astype(mx.bfloat16)
>>> keys, values = cache.update_and_fetch(rows, rows)
>>> keys.shape, keys.dtype == mx.bfloat16, cache.bytes_per_token()
((1, 2, 5, 128), True, 400)
>>> TurboQuantKVCache(k_bits=3)
Traceback (most recent call last):
kvkeep.errors.BadScheme: TurboQuant keys of 3 bits: valid are 2, 4, 5, 8
  docs/caches.md lists the schemes, and what each kind of layer takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvkeep.caches.bitpack import GROUP
from kvkeep.caches.every_position import EveryPosition
from kvkeep.caches.hadamard import unrotate
from kvkeep.caches.reads import DenseRead, one_position
from kvkeep.caches.turboquant_codes import (
    HEAD_SIZES,
    K_BITS,
    V_BITS,
    decode_keys,
    decode_rotated,
    decode_values,
    encode_keys,
    encode_values,
)
from kvkeep.errors import BadScheme, EmptyCache

Planes = tuple[mx.array, ...]


@dataclass(frozen=True)
class RotatedRead:
    """Decoded keys ``[B, H, T, D]``, and values that are still rotated."""

    keys: mx.array
    values: mx.array
    mask: mx.array | str | None = None

    def attend(self, queries: mx.array, scale: float, *, sinks: mx.array | None = None) -> mx.array:
        """Attention of ``queries`` ``[B, Hq, L, D]``; its sums are unrotated in float32."""
        sums = DenseRead(self.keys, self.values, self.mask).attend(queries, scale, sinks=sinks)
        return unrotate(sums.astype(mx.float32)).astype(sums.dtype)


class TurboQuantKVCache(EveryPosition):
    """Keys of ``k_bits`` (2, 4, 5, 8) and values of ``v_bits`` (2, 3, 4, 5, 8), D of 64 to 512.

    ``keys`` is (indices, scales, zeros), ``values`` is (packed, scales), ``[B, H, capacity, ·]``,
    or both ``None``. Raises ``BadScheme`` for another width, and on the first append for a head
    size that is not 64, 128, 256 or 512, before anything is allocated.
    """

    kind = "kv-turboquant"
    step = 256

    def __init__(
        self, k_bits: int = 8, v_bits: int = 3, *, deferred_rotation: bool = False
    ) -> None:
        check_widths(k_bits, v_bits)
        self.k_bits = k_bits
        self.v_bits = v_bits
        self.deferred_rotation = deferred_rotation
        self.keys: Planes | None = None
        self.values: Planes | None = None
        self.k_dtype: mx.Dtype | None = None
        self.v_dtype: mx.Dtype | None = None
        self.offset = 0
        self.minimum_resumable_offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append ``[B, H, L, D]``; all rows decoded, in the dtype of the first append."""
        self._append(keys, values)
        return self.keys_and_values()

    def append_decode(self, keys: mx.array, values: mx.array) -> DenseRead | RotatedRead:
        """Append one position per row; a read of it and all before it."""
        one_position(keys)
        return self.append_window(keys, values)

    def append_window(self, keys: mx.array, values: mx.array) -> DenseRead | RotatedRead:
        """Append L positions, causal among themselves; a read of them and all before them."""
        mask = self.make_mask(keys.shape[2])
        self._append(keys, values)
        decode = decode_rotated if self.deferred_rotation else decode_values
        read = RotatedRead if self.deferred_rotation else DenseRead
        return read(*self._decoded(decode), mask)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows decoded, ``[B, H, offset, D]``. Raises ``EmptyCache`` where there are none."""
        return self._decoded(decode_values)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that the cache holds, for ``from_state`` and for ``mx.eval``."""
        return (
            self.keys,
            self.values,
            _name(self.k_dtype),
            _name(self.v_dtype),
            self.offset,
            self.k_bits,
            self.v_bits,
            self.deferred_rotation,
            self.minimum_resumable_offset,
        )

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        keys, values, k_dtype, v_dtype, offset, k_bits, v_bits, deferred, floor = state
        check_widths(k_bits, v_bits)
        self.keys = tuple(keys) if keys is not None else None
        self.values = tuple(values) if values is not None else None
        self.k_dtype, self.v_dtype = _dtype(k_dtype), _dtype(v_dtype)
        self.offset, self.k_bits, self.v_bits = offset, k_bits, v_bits
        self.deferred_rotation, self.minimum_resumable_offset = bool(deferred), floor

    def bytes_per_token(self) -> int:
        """Physical bytes of one row's token; 0 before the first append."""
        if self.keys is None or self.values is None:
            return 0
        return sum(p.nbytes // (p.shape[0] * p.shape[2]) for p in (*self.keys, *self.values))

    def trim(self, n: int) -> int:
        """Drop the last ``n`` positions, at most all; how many went."""
        n = min(self.offset, n)
        self.offset -= n
        return n

    def empty(self) -> bool:
        """Whether nothing was ever appended."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the planes with their room to grow."""
        if self.keys is None or self.values is None:
            return 0
        return sum(plane.nbytes for plane in (*self.keys, *self.values))

    def _append(self, keys: mx.array, values: mx.array) -> None:
        check_head_size("keys", keys.shape[-1])
        check_head_size("values", values.shape[-1])
        if self.k_dtype is None:
            self.k_dtype, self.v_dtype = keys.dtype, values.dtype
        new = (*encode_keys(keys, self.k_bits), *encode_values(values, self.v_bits))
        start, stop = self.offset, self.offset + keys.shape[2]
        old = (*self.keys, *self.values) if self.keys and self.values else None
        # mlx-lm replaces arrays in place; so is done here, and MLX writes into the old buffer.
        self.keys = self.values = None
        if old is None or stop > old[0].shape[2]:
            old = tuple(_grown(new, old, start, self.step))
        for plane, rows in zip(old, new, strict=True):
            plane[..., start:stop, :] = rows
        self.keys, self.values, self.offset = old[:3], old[3:], stop

    def _decoded(
        self, decode: Callable[[tuple[mx.array, mx.array], int], mx.array]
    ) -> tuple[mx.array, mx.array]:
        if not self.keys or not self.values or not self.k_dtype or not self.v_dtype:
            raise EmptyCache("TurboQuantKVCache covers no token")
        indices, scales, zeros = (x[..., : self.offset, :] for x in self.keys)
        packed, spreads = (x[..., : self.offset, :] for x in self.values)
        keys = decode_keys((indices, scales, zeros), self.k_bits)
        return keys.astype(self.k_dtype), decode((packed, spreads), self.v_bits).astype(
            self.v_dtype
        )


def check_widths(k_bits: int, v_bits: int) -> None:
    """Raise ``BadScheme`` for a width that TurboQuant does not have."""
    for side, bits, valid in (("keys", k_bits, K_BITS), ("values", v_bits, V_BITS)):
        if isinstance(bits, bool) or bits not in valid:
            raise BadScheme(f"TurboQuant {side} of {bits!r} bits: valid are {_listed(valid)}")


def check_head_size(side: str, width: int) -> None:
    """Raise ``BadScheme`` for ``side`` of a head size that TurboQuant does not have."""
    if width not in HEAD_SIZES:
        raise BadScheme(f"TurboQuant {side} of head size {width}: valid are {_listed(HEAD_SIZES)}")


def bytes_per_head(k_width: int, v_width: int, k_bits: int = 8, v_bits: int = 3) -> int:
    """Bytes of one token's keys and values of one head.

    >>> bytes_per_head(128, 128), bytes_per_head(64, 64), bytes_per_head(128, 128, 8, 8)
    (200, 100, 280)
    """
    keys = k_width * k_bits // 8 + k_width // GROUP * 4
    return keys + v_width * v_bits // 8 + v_width // GROUP * 2


def _grown(new: Planes, old: Planes | None, held: int, step: int) -> Any:
    """Planes with room for ``new`` behind the ``held`` rows of ``old``."""
    for i, rows in enumerate(new):
        lead, length, width = rows.shape[:2], rows.shape[2], rows.shape[3]
        capacity = (held + length + step - 1) // step * step
        room = mx.zeros((*lead, capacity - held, width), dtype=rows.dtype)
        if old is None or not held:
            yield room
        else:
            yield mx.concatenate([old[i][..., :held, :], room], axis=2)


def _name(dtype: mx.Dtype | None) -> str | None:
    return None if dtype is None else str(dtype).rpartition(".")[2]


def _dtype(name: str | None) -> mx.Dtype | None:
    return None if name is None else getattr(mx, name)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
