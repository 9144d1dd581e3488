"""One flipped bit in whatever files a store has."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from benchmarks.rows import Shape, plane


def flip(folder: Path, shape: Shape, count: int, number: int) -> bool:
    """Flip a bit in every stored copy of one position's keys or values; whether there is one.

    A store that changes some values holds other rows than those; some positions are tried.
    """
    rng = np.random.default_rng(number)
    files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size]
    for _ in range(10):
        layer, which = int(rng.integers(shape.layers)), int(rng.integers(2))
        position, head = int(rng.integers(count // 2)), int(rng.integers(shape.heads))
        row = plane(shape, layer, which, position, position + 1, 0)[0, head, 0].tobytes()
        if sum(_flip_row(file, row) for file in files):
            return True
    return False


def _flip_row(file: Path, row: bytes) -> int:
    found = 0
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as data:
        at = data.find(row)
        while at >= 0:
            data[at + len(row) // 2] ^= 4
            found += 1
            at = data.find(row, at + 1)
        data.flush()
    return found
