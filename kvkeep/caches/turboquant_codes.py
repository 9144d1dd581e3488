"""TurboQuant's numbers: rows to indices and scales, and back. Arithmetic in float32.

Groups of 32 along D share a scale. *s* and *z* are kept in float16, ``EPS`` is 1e-8, halves round
to even.

Keys
    Affine, not rotated. 8 bits: M = 127, s = (max−min)/2M, z = round((max+min)/(2(s+ε))),
    i = clip(round(x/(s+ε)−z), −M, M), stored as i+M. Fewer bits: M = 2^b−1, s = (max−min)/M,
    z = round(min/(s+ε)), i = clip(round(x/(s+ε)−z), 0, M). Decoded (i+z)·s.

    Two kinds of groups need more, because *z* would overflow float16 or *s* vanish in it, and
    the group decode to NaN:

    * A constant group c is stored as i = 0, z = 2^e, s = c/2^e: exact for 0 and for every
      bfloat16 or float16 value with 2^−28 ≤ abs(c) ≤ 2^30; a float32 value keeps 11 bits.
    * A group whose *s* is no normal float16, or whose *z* is none, takes the next coarser step
      at which both are: *s* at least max(abs(x))/2000. Its error is at most s/2.

    What lies beyond 2^30 is taken for 2^30, and *s* is at most 65,504.

Values
    y = ``rotate(x)``; s = √(mean y²) in float16; i = the number of Lloyd–Max boundaries below
    y/(s+ε). Decoded ``unrotate(level_i·s)``.

A NaN decodes to NaN, in its whole group of keys or row of values.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from kvkeep.caches.bitpack import GROUP, pack, unpack
from kvkeep.caches.hadamard import rotate, unrotate
from kvkeep.caches.lloyd_max import boundaries, levels

K_BITS = (2, 4, 5, 8)
V_BITS = (2, 3, 4, 5, 8)
HEAD_SIZES = (64, 128, 256, 512)
EPS = 1e-8

_LARGEST = 65504.0
_FARTHEST = 2.0**30
_SMALLEST_NORMAL = 2.0**-14

Keys = tuple[mx.array, mx.array, mx.array]
"""``indices`` uint32 ``[..., D·bits/32]``, ``scales`` and ``zeros`` float16 ``[..., D/32]``."""

Values = tuple[mx.array, mx.array]
"""``packed`` uint32 ``[..., D·bits/32]``, ``scales`` float16 ``[..., D/32]``."""


def encode_keys(x: mx.array, bits: int) -> Keys:
    """The planes of ``x`` ``[..., D]``."""
    rows = _split(mx.clip(x.astype(mx.float32), -_FARTHEST, _FARTHEST))
    high, low = rows.max(axis=-1), rows.min(axis=-1)
    first, last, anchor = _span(high, low, bits)
    step = (high - low) / (last - first)
    divisor = step + EPS
    zero = mx.round(anchor / divisor)
    fits = (step >= _SMALLEST_NORMAL) & (step <= _LARGEST) & (mx.abs(zero) <= _LARGEST)

    coarse = _coarser(step, mx.maximum(mx.abs(high), mx.abs(low)))
    divisor = mx.where(fits, divisor, coarse)
    zero = mx.where(fits, zero, mx.round(anchor / coarse))
    index = mx.clip(mx.round(rows / divisor[..., None] - zero[..., None]), first, last)

    constant = high == low
    power = _power_of_two(high)
    index = mx.where(constant[..., None], 0.0, index)
    zero = mx.where(constant, power, zero).astype(mx.float16)
    scale = mx.where(constant, high / power, mx.where(fits, step, coarse)).astype(mx.float16)
    return pack(_flat(index - first).astype(mx.uint32), bits), scale, zero


def decode_keys(planes: Keys, bits: int) -> mx.array:
    """The rows, ``float32 [..., D]``."""
    indices, scales, zeros = planes
    first = -127.0 if bits == 8 else 0.0
    index = _split(unpack(indices, bits)) + first
    s, z = scales.astype(mx.float32), zeros.astype(mx.float32)
    return _flat((index + z[..., None]) * s[..., None])


def encode_values(x: mx.array, bits: int) -> Values:
    """The planes of ``x`` ``[..., D]``."""
    y = _split(rotate(x.astype(mx.float32)))
    spread = mx.sqrt(mx.mean(y * y, axis=-1))
    scale = mx.where(spread > _LARGEST, _LARGEST, spread).astype(mx.float16)
    unit = y / (scale.astype(mx.float32) + EPS)[..., None]
    edges = _boundaries(bits)
    index = mx.zeros(unit.shape, dtype=mx.uint32)
    for bit in reversed(range(bits)):
        below = edges[index + ((1 << bit) - 1)] < unit
        index = index + mx.left_shift(below.astype(mx.uint32), bit)
    return pack(_flat(index), bits), scale


def decode_rotated(planes: Values, bits: int) -> mx.array:
    """The rows before they are unrotated, ``float32 [..., D]``: what a deferred rotation sums."""
    packed, scales = planes
    level = _levels(bits)[unpack(packed, bits).astype(mx.uint32)]
    return _flat(_split(level) * scales.astype(mx.float32)[..., None])


def decode_values(planes: Values, bits: int) -> mx.array:
    """The rows, ``float32 [..., D]``."""
    return unrotate(decode_rotated(planes, bits))


def _split(x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:-1], -1, GROUP)


def _flat(x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:-2], -1)


def _span(high: mx.array, low: mx.array, bits: int) -> tuple[float, float, mx.array]:
    """The lowest and highest index, and what the index 0 stands for."""
    if bits == 8:
        return -127.0, 127.0, (high + low) / 2
    return 0.0, float((1 << bits) - 1), low


def _coarser(step: mx.array, largest: mx.array) -> mx.array:
    """A step of float16 that is no finer than ``step``, and whose zero float16 holds exactly."""
    wanted = mx.maximum(step, largest / 2000) * (1 + 2.0**-10) + 2.0**-25
    wanted = mx.where(wanted > _LARGEST, _LARGEST, wanted)
    return wanted.astype(mx.float16).astype(mx.float32)


def _power_of_two(x: mx.array) -> mx.array:
    """A power of two by which float16 holds ``x``, near its size."""
    exponent = mx.clip(mx.floor(mx.log2(mx.abs(x))), -14, 15)
    # Rounding to float16 makes an exact power of what a fast `power` may miss by a bit.
    return mx.power(mx.array(2.0), exponent).astype(mx.float16).astype(mx.float32)


@lru_cache
def _levels(bits: int) -> mx.array:
    return mx.array(levels(bits), dtype=mx.float32)


@lru_cache
def _boundaries(bits: int) -> mx.array:
    return mx.array(boundaries(bits), dtype=mx.float32)
