"""The rotation that TurboQuant's values go through: random signs, then a Hadamard transform.

``rotate`` is orthonormal, and ``unrotate`` its inverse: the transform is its own inverse, and so
are the signs. Both are linear, so a weighted sum of rotated rows may be unrotated instead of
the rows.

The signs are those of SplitMix64 counted from 0, its highest bit set for −1: a fixed sequence
that needs no library, of which a head of D takes the first D. Stored indices depend on it, so
it never changes.

>>> [int(x) for x in sign_bits(8)]
[1, 0, 0, 1, 0, 0, 0, 1]
>>> import mlx.core as mx
>>> x = mx.arange(64, dtype=mx.float32)
>>> float(mx.abs(unrotate(rotate(x)) - x).max()) < 1e-4
True
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

_MASK = (1 << 64) - 1


def sign_bits(count: int) -> list[int]:
    """1 where the sign is −1, for the first ``count`` numbers of a head."""
    return [_mixed(i) >> 63 for i in range(count)]


def rotate(x: mx.array) -> mx.array:
    """``Hadamard(x · sign) / √D`` along the last axis of ``x``, float32, D a power of two."""
    width = x.shape[-1]
    return mx.hadamard_transform(x * _signs(width), scale=width**-0.5)


def unrotate(y: mx.array) -> mx.array:
    """What ``rotate`` made ``y`` from."""
    width = y.shape[-1]
    return mx.hadamard_transform(y, scale=width**-0.5) * _signs(width)


@lru_cache
def _signs(width: int) -> mx.array:
    # Made from a list, so that it holds data and belongs to no thread's stream.
    return mx.array([-1.0 if bit else 1.0 for bit in sign_bits(width)], dtype=mx.float32)


def _mixed(index: int) -> int:
    """SplitMix64's output number ``index``, for the seed 0."""
    z = ((index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
