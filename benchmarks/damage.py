"""Damage: one byte of the stored rows is flipped; is it noticed?

In each of several copies of a store, and of an ``mlx_lm`` file, another byte of a layer's keys
or values is flipped on the disk. Measured: how many restores handed out a wrong bit.

To reach: none.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from benchmarks.harness import Answer, Bench, Result
from benchmarks.restore import prepare
from benchmarks.rows import Shape, check, plane, tokens
from benchmarks.steps import load_imports, load_mlx_lm, open_space

SMALL = Shape(4, 2, 64)
COUNT = 512


def flip(file: Path, number: int) -> None:
    """Flip a bit of one position's keys or values, found by its own bytes."""
    rng = np.random.default_rng(number)
    layer, which, head = int(rng.integers(4)), int(rng.integers(2)), int(rng.integers(2))
    position = int(rng.integers(COUNT))
    row = plane(SMALL, layer, which, position, position + 1, 0)[0, head, 0].tobytes()
    data = bytearray(file.read_bytes())
    at = data.find(row)
    assert data.count(row) == 1, "the row is not in the file exactly once"
    data[at + int(rng.integers(len(row)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)


def resume(folder: str) -> Answer:
    """Resume from a damaged store; whether a wrong bit came out, and the reason given."""
    load_imports()
    store, space = open_space(folder, SMALL)
    hit = space.resume(np.append(tokens(COUNT, 0), 1))
    wrong = False
    if hit.caches is not None:
        try:
            check(hit.caches, SMALL, 0, hit.offset, 0)
        except AssertionError:
            wrong = True
    store.close()
    return {"wrong": wrong, "offset": hit.offset, "reason": hit.decision.why}


def load(file: str) -> Answer:
    """Load a damaged ``mlx_lm`` file; whether a wrong bit came out."""
    load_imports()
    try:
        check(load_mlx_lm(file), SMALL, 0, COUNT, 0)
    except AssertionError:
        return {"wrong": True}
    return {"wrong": False}


def measure(bench: Bench) -> Result:
    """One flip in each trial, the same for both."""
    trials = 3 if bench.quick else 8
    result = Result(f"One flipped byte, {trials} trials")
    ours, theirs = [], []
    with bench.scratch() as folder:
        store, file = prepare(bench, folder, SMALL, COUNT)
        for number in range(trials):
            copy, other = folder / "copy", folder / "copy.safetensors"
            shutil.copytree(store, copy)
            shutil.copy(file, other)
            flip(copy / "data.mdb", number)
            flip(other, number)
            ours.append(bench.step(resume, folder=copy))
            theirs.append(bench.step(load, file=other))
            shutil.rmtree(copy)
            other.unlink()
    result.line("mlx_lm: restores with a wrong bit", [float(sum(a["wrong"] for a in theirs))], "")
    named = float(sum(a["reason"] == "corrupt" for a in ours))
    result.goal("kvkeep: restores with a wrong bit", [float(sum(a["wrong"] for a in ours))], 0, "")
    result.goal("kvkeep: named as damage", [named], trials, "", more=True)
    return result
