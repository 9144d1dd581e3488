"""Arithmetic of half-open position ranges, always kept sorted, disjoint and non-empty."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from kvkeep.codecs.base import merged

Range = tuple[int, int]
Ranges = tuple[Range, ...]

__all__ = [
    "Range",
    "Ranges",
    "clip",
    "covers",
    "intersect",
    "merged",
    "pieces",
    "spelled",
    "subtract",
    "total",
]


def clip(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The part of ``ranges`` within ``[start, stop)``."""
    return tuple((max(a, start), min(b, stop)) for a, b in ranges if a < stop and b > start)


def intersect(left: Ranges, right: Ranges) -> Ranges:
    """The positions in both."""
    return merged(piece for a, b in left for piece in clip(right, a, b))


def subtract(left: Ranges, right: Ranges) -> Ranges:
    """The positions of ``left`` that are not in ``right``."""
    out: list[Range] = []
    for start, stop in left:
        for a, b in clip(right, start, stop):
            if start < a:
                out.append((start, a))
            start = b
        if start < stop:
            out.append((start, stop))
    return tuple(out)


def covers(coverage: Ranges, wanted: Iterable[Range]) -> bool:
    """Whether every wanted position is covered."""
    return all(any(a <= start and stop <= b for a, b in coverage) for start, stop in wanted)


def total(ranges: Iterable[Range]) -> int:
    """How many positions."""
    return sum(stop - start for start, stop in ranges)


def pieces(ranges: Ranges, step: int, cuts: Iterable[int] = ()) -> list[Range]:
    """``ranges`` cut at every multiple of ``step`` and at ``cuts``."""
    marks = sorted(set(cuts))
    out: list[Range] = []
    for start, stop in ranges:
        inner = [m for m in marks if start < m < stop]
        inner += range(start // step * step + step, stop, step)
        edges = [start, *sorted(set(inner)), stop]
        out += pairwise(edges)
    return out


@lru_cache(maxsize=256)
def spelled(layers: tuple[str, ...]) -> str:
    """The numbers of layers, given by their paths, in few characters.

    >>> spelled(("0", "1", "2", "4.0", "4.1", "6", "7"))
    '0-2,4,6-7'
    """
    runs: list[list[int]] = []
    for number in sorted({int(path.partition(".")[0]) for path in layers}):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
