"""Reads of what an append made visible: dense rows, or packed planes.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import KVCache
>>> read = append(KVCache(), mx.ones((1, 2, 3, 8)), mx.ones((1, 2, 3, 8)))
>>> read.attend(mx.ones((1, 4, 3, 8)), 1.0).shape
(1, 4, 3, 8)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    Planes = tuple[mx.array, mx.array, mx.array]


@dataclass(frozen=True)
class DenseRead:
    """Rows ``[B, H, T, D]`` in the precision of the model, and the mask of the appended ones."""

    keys: mx.array
    values: mx.array
    mask: mx.array | str | None = None

    def attend(self, queries: mx.array, scale: float, *, sinks: mx.array | None = None) -> mx.array:
        """Attention of ``queries`` ``[B, Hq, L, D]`` over the rows."""
        import mlx.core as mx

        return mx.fast.scaled_dot_product_attention(
            queries, self.keys, self.values, scale=scale, mask=self.mask, sinks=sinks
        )


@dataclass(frozen=True)
class PackedRead:
    """Planes (packed, scales, biases), multiplied as they are. Knows no sinks."""

    keys: Planes
    values: Planes
    bits: int
    group_size: int
    mask: mx.array | str | None = None

    def attend(self, queries: mx.array, scale: float, *, sinks: mx.array | None = None) -> mx.array:
        """Attention of ``queries`` ``[B, Hq, L, D]`` over the planes.

        Raises ``ValueError`` for ``sinks``: a dense read takes them.
        """
        import mlx.core as mx
        from mlx_lm.models.base import quantized_scaled_dot_product_attention

        if sinks is not None:
            raise ValueError("A packed read knows no attention sinks; read densely instead")
        # mlx-lm scales the array that it is given in place.
        out: mx.array = quantized_scaled_dot_product_attention(
            mx.array(queries),
            self.keys,
            self.values,
            scale=scale,
            mask=self.mask,  # type: ignore[arg-type]
            group_size=self.group_size,
            bits=self.bits,
        )
        return out


def append(cache: Any, keys: mx.array, values: mx.array) -> DenseRead | PackedRead:
    """Append to a cache of mlx-lm's protocol, and read it with the mask of these positions.

    ``keys`` ``[B, H, L, D]``, causal among themselves.
    """
    if hasattr(cache, "maybe_trim_front"):
        cache.maybe_trim_front()
    mask = mask_of(cache, keys.shape[2])
    k, v = cache.update_and_fetch(keys, values)
    # A full cache hands out its very arrays, into which the next append writes.
    if hasattr(cache, "bits"):
        return PackedRead(_own(k), _own(v), cache.bits, cache.group_size, mask)
    return DenseRead(copy.copy(k), copy.copy(v), mask)


def _own(planes: Any) -> Planes:
    packed, scales, biases = map(copy.copy, planes)
    return packed, scales, biases


def mask_of(
    cache: Any, length: int, return_array: bool = False, window_size: int | None = None
) -> mx.array | str | None:
    """The mask of the next ``length`` positions of ``cache`` over what they will read.

    A chunked cache has none of its own: each position sees those of its chunk up to itself.
    """
    mask: mx.array | str | None
    chunk = getattr(cache, "chunk_size", None)
    if chunk is None:
        mask = cache.make_mask(length, return_array=return_array, window_size=window_size)
        return mask
    import mlx.core as mx

    seen = mx.arange(cache.start_position, cache.offset + length)
    mine = mx.arange(cache.offset, cache.offset + length)[:, None]
    visible: mx.array = (seen <= mine) & (seen // chunk == mine // chunk)
    return visible


def one_position(keys: mx.array) -> None:
    """Raise ``ValueError`` unless ``keys`` ``[B, H, L, D]`` are one position per row."""
    if keys.shape[2] != 1:
        raise ValueError(
            f"append_decode takes one position per row, not {keys.shape[2]}; "
            "append_window takes several"
        )


class Reads:
    """The attention read of a cache that has ``make_mask`` and ``update_and_fetch``."""

    def append_decode(self, keys: mx.array, values: mx.array) -> DenseRead | PackedRead:
        """Append one position per row; a read of it and all before it."""
        one_position(keys)
        return append(self, keys, values)

    def append_window(self, keys: mx.array, values: mx.array) -> DenseRead | PackedRead:
        """Append L positions, causal among themselves; a read of them and all before them."""
        return append(self, keys, values)
