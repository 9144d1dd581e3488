"""TurboQuant once more, in numpy, from its description alone: what the golden files come from.

    python -m tests.caches.turboquant_reference FOLDER

writes the golden files anew; those in ``golden`` are never rewritten. Their rows are drawn so
that no index hangs on the last bits of a division or of a sum: another machine rounds those
otherwise.
"""

from __future__ import annotations

import sys
from math import erfc, pi, sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np

GOLDEN = Path(__file__).with_name("golden")
K_BITS = (2, 4, 5, 8)
V_BITS = (2, 3, 4, 5, 8)
EPS = np.float32(1e-8)
ROWS = {64: 6, 128: 6, 256: 2, 512: 1}
"""Golden rows by head size."""

F32 = np.float32


def bf16(x):
    """``x`` rounded to bfloat16, halves to even, as float32."""
    bits = x.astype(F32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(F32)


def halves(x):
    """The bits of rows that ``bf16`` rounded."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def stream(indices, bits):
    """Indices below 2^bits ``[T, D]`` as a flat little-endian bit stream, in 32-bit words."""
    spread = (indices[..., None] >> np.arange(bits)) & 1
    flat = spread.reshape(len(indices), -1).astype(np.uint8)
    return np.packbits(flat, axis=-1, bitorder="little").view("<u4")


def indices_of(words, bits):
    """The inverse of ``stream``."""
    flat = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    spread = flat.reshape(len(words), -1, bits).astype(np.int64)
    return (spread << np.arange(bits)).sum(axis=-1)


def steps(x, bits):
    """Of rows ``[T, D]``: s and z per group, and x/(s+ε) − z, float32."""
    groups = x.astype(F32).reshape(len(x), -1, 32)
    high, low = groups.max(axis=-1), groups.min(axis=-1)
    if bits == 8:
        s = (high - low) / F32(254)
        z = (high + low) / (F32(2) * (s + EPS))
    else:
        s = (high - low) / F32(2**bits - 1)
        z = low / (s + EPS)
    return s, z, groups / (s + EPS)[..., None] - np.rint(z)[..., None]


def encode_keys(x, bits):
    """Words, scales and zeros of rows ``[T, D]`` whose groups are not constant."""
    s, z, place = steps(x, bits)
    if bits == 8:
        i = np.clip(np.rint(place), -127, 127) + 127
    else:
        i = np.clip(np.rint(place), 0, 2**bits - 1)
    return (
        stream(i.astype(np.int64).reshape(x.shape), bits),
        s.astype(np.float16),
        np.rint(z).astype(np.float16),
    )


def decode_keys(words, s, z, bits):
    """The rows, float32."""
    i = indices_of(words, bits).reshape(len(words), -1, 32).astype(F32)
    if bits == 8:
        i -= 127
    return ((i + z.astype(F32)[..., None]) * s.astype(F32)[..., None]).reshape(len(words), -1)


def hadamard(width):
    """The matrix of ±1, by Sylvester's rule."""
    h = np.ones((1, 1))
    while len(h) < width:
        h = np.block([[h, h], [h, -h]])
    return h


def signs(width):
    """±1 by the highest bit of SplitMix64's numbers for the seed 0."""
    out, state = [], np.uint64(0)
    with np.errstate(over="ignore"):
        for _ in range(width):
            state = state + np.uint64(0x9E3779B97F4A7C15)
            z = state
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
            out.append(-1.0 if z >> np.uint64(63) else 1.0)
    return np.array(out)


def means(edges):
    """The mean of a unit normal between each two neighbours of ``edges``."""
    tail = np.array([erfc(e / sqrt(2)) / 2 for e in edges])
    density = np.exp(-(edges**2) / 2) / sqrt(2 * pi)
    return np.diff(density) / np.diff(tail)


def lloyd_max(bits):
    """Levels of a unit normal: Newton's method on "each level is the mean of its cell"."""

    def gap(levels):
        inner = (levels[1:] + levels[:-1]) / 2
        return means(np.concatenate([[0], inner, [np.inf]])) - levels

    count = 2 ** (bits - 1)
    start = NormalDist(0, sqrt(3))
    levels = np.array([start.inv_cdf(0.5 + (i + 0.5) / count / 2) for i in range(count)])
    while np.abs(gap(levels)).max() > 1e-12:
        nudge = 1e-6 * np.eye(count)
        slope = np.array([(gap(levels + n) - gap(levels - n)) / 2e-6 for n in nudge]).T
        levels = levels - np.linalg.solve(slope, gap(levels))
    return np.concatenate([-levels[::-1], levels])


def rotated(x):
    """y of rows ``[T, D]``, in float64."""
    width = x.shape[-1]
    return (x.astype(np.float64) * signs(width)) @ hadamard(width) / sqrt(width)


def units(x):
    """Of rows ``[T, D]``: the spread per group before it is rounded, s and y/(s+ε)."""
    y = rotated(x).reshape(len(x), -1, 32)
    spread = np.sqrt((y * y).mean(axis=-1))
    s = spread.astype(np.float16)
    return spread, s, y / (s.astype(np.float64) + 1e-8)[..., None]


def encode_values(x, bits, levels):
    """Words and scales of rows ``[T, D]``."""
    _, s, unit = units(x)
    edges = (levels[1:] + levels[:-1]) / 2
    i = (edges < unit[..., None]).sum(axis=-1)
    return stream(i.reshape(x.shape), bits), s


def decode_rotated(words, s, bits, levels):
    """level · s, float32."""
    level = levels.astype(F32)[indices_of(words, bits)].reshape(len(words), -1, 32)
    return (level * s.astype(F32)[..., None]).reshape(len(words), -1)


def decode_values(words, s, bits, levels):
    """The rows, float64."""
    y = decode_rotated(words, s, bits, levels).astype(np.float64)
    width = y.shape[-1]
    return y @ hadamard(width) / sqrt(width) * signs(width)


def _off_half(x, margin):
    return (np.abs(np.abs(x - np.floor(x)) - 0.5) > margin).all(axis=-1)


def _off_float16(x):
    """Where ``x`` is not near the middle between two float16 numbers."""
    nearest = x.astype(np.float16)
    gap = np.spacing(np.abs(nearest)).astype(np.float64)
    return (np.abs(np.abs(x.astype(np.float64) - nearest) / gap - 0.5) > 1e-2).all(axis=-1)


def sound_keys(x, bits):
    """Which rows keep a distance from every halfway point."""
    s, z, place = steps(x, bits)
    return _off_half(place, 1e-3).all(axis=-1) & _off_half(z, 1e-3) & _off_float16(s)


def sound_values(x, levels):
    """Which rows keep a distance from every boundary."""
    spread, _, unit = units(x)
    edges = (levels[1:] + levels[:-1]) / 2
    near = np.abs(unit[..., None] - edges).min(axis=-1) < 3e-5
    return ~near.any(axis=(-1, -2)) & _off_float16(spread)


def draw(numbers, width, sound):
    """Sound rows of a plausible head: channels of unlike sizes, some with an offset."""
    kept = []
    while len(kept) < ROWS[width]:
        size = np.exp(numbers.standard_normal(width))
        offset = 3 * numbers.standard_normal(width) * (numbers.random(width) < 0.1)
        rows = bf16(numbers.standard_normal((64, width)) * size + offset)
        kept += list(rows[sound(rows)])
    return np.array(kept[: ROWS[width]])


def write(folder):
    """Write ``turboquant-D.npz`` for every head size."""
    levels = {bits: lloyd_max(bits) for bits in V_BITS}
    for width in ROWS:
        numbers = np.random.default_rng(width)
        out = {}
        for bits in K_BITS:
            x = draw(numbers, width, lambda rows, bits=bits: sound_keys(rows, bits))
            planes = encode_keys(x, bits)
            out |= {f"k{bits}.x": halves(x)}
            out |= dict(zip([f"k{bits}.{n}" for n in ("words", "s", "z")], planes, strict=True))
            out |= {f"k{bits}.decoded": decode_keys(*planes, bits)}
        for bits in V_BITS:
            at = levels[bits]
            x = draw(numbers, width, lambda rows, at=at: sound_values(rows, at))
            planes = encode_values(x, bits, at)
            out |= {f"v{bits}.x": halves(x)}
            out |= dict(zip([f"v{bits}.{n}" for n in ("words", "s")], planes, strict=True))
            out |= {f"v{bits}.rotated": decode_rotated(*planes, bits, at)}
            out |= {f"v{bits}.decoded": decode_values(*planes, bits, at).astype(F32)}
        np.savez_compressed(Path(folder) / f"turboquant-{width}.npz", **out)


if __name__ == "__main__":
    write(sys.argv[1])
