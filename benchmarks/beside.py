"""Beside others: kvkeep and every peer that is installed, on the same cache, in the same run.

Peers run in Pythons of their own: ``--peers-dir`` names a folder with a virtual environment for
each, called like its name on PyPI (``python -m venv DIR/vllm-mlx``, then its ``pip install``).
Whatever is not there is left out, by name. Each adapter is a file of ``benchmarks/peers``.

Measured for each: storing 512 MiB (the call; written; and flushed to the disk, which peers
leave to the system), restoring it in a fresh process warm and cold, appending 512 tokens to
it, the tokens that come back where 3,000 of 4,096 are shared, and what becomes of one flipped
byte. Every restore is compared bit for bit.
"""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pagecache
from benchmarks.harness import HOME, Answer, Bench, Result, Step, StepFailed, last_answer, say
from benchmarks.rows import LARGE, MIB, Shape, plane
from benchmarks.touched import touch_memory

OWN = ("kvkeep", "mlx-lm")
PEERS = ("mlx-vlm", "flyto-mlx", "vllm-mlx", "rapid-mlx", "mlx-textgen")
COLUMNS = (
    ("store: caller", "store", "caller", 1.0, "s"),
    ("store: written", "store", "settled", 1.0, "s"),
    ("store: on the disk", "store", "durable", 1.0, "s"),
    ("restore: warm", "warm", "seconds", 1.0, "s"),
    ("restore: cold", "cold", "seconds", 1.0, "s"),
    ("append: caller", "append", "caller", 1.0, "s"),
    ("append: on the disk", "append", "durable", 1.0, "s"),
    ("append: bytes", "append", "bytes", 1 / MIB, "MiB"),
    ("diverging: tokens", "diverging", "offset", 1.0, ""),
    ("diverging: seconds", "diverging", "seconds", 1.0, "s"),
)


def measure(bench: Bench) -> Result:
    """Every way in turn, in each round, in a folder of its own."""
    count, shared, new = (512, 300, 64) if bench.quick else (4096, 3000, 512)
    pythons = {name: Path(sys.executable) for name in OWN}
    left_out = []
    for name in PEERS:
        python = Path(bench.peers_dir or "") / name / "bin" / "python"
        if bench.peers_dir and python.exists():
            pythons[name] = python
        else:
            left_out.append(name)
    versions = {name: _run(python, name, "version", {}) for name, python in pythons.items()}
    result = Result(f"Beside others: {LARGE.nbytes(count) // MIB} MiB, {count:,} tokens")
    steps = {
        name: _guarded(name, _whole(bench, name, python, count, shared, new))
        for name, python in pythons.items()
    }
    found = bench.interleaved(steps)
    for name in [name for name in pythons if any("failed" in a for a in found[name])]:
        why = next(answer["failed"] for answer in found[name] if "failed" in answer)
        result.notes.append(f"{name} failed and is left out: {why}")
        del pythons[name]
    result.notes += [
        f"{name} gave nothing back, so that its restores are left out."
        for name in pythons
        if not any(answer["warm"]["offset"] for answer in found[name])
    ]
    for label, step, key, scale, unit in COLUMNS:
        for name in pythons:
            some = [
                a[step] for a in found[name] if a[step] and (a["warm"]["offset"] or step == "store")
            ]
            values = [answer[key] * scale for answer in some]
            if values:
                result.line(f"{label}: {name}", values, unit)
    for name in pythons:
        every = found[name]
        exact = sum(a[step]["exact"] for a in every for step in ("warm", "cold", "diverging"))
        if not any(answer["warm"]["offset"] for answer in every):
            continue
        result.line(f"restores that were not exact: {name}", [float(3 * len(every) - exact)], "")
        damaged = [a["damaged"] for a in every if "damaged" in a and a["warm"]["exact"]]
        if damaged:
            served = sum(answer["wrong"] for answer in damaged)
            result.line(f"a flipped byte was served: {name}", [float(served)], "")
    result.notes.append(
        "; ".join(f"{n} {v['version']} (mlx-lm {v['mlx-lm']})" for n, v in versions.items())
    )
    if left_out:
        result.notes.append(f"Not installed, and left out: {', '.join(left_out)}.")
    return result


def _guarded(name: str, take: Step) -> Step:
    """A peer that fails does not end the run; kvkeep and mlx-lm do."""

    def guarded(number: int) -> Answer:
        try:
            answer = take(number)
            say(f"    {json.dumps(answer)}")
            return answer
        except StepFailed as error:
            if name in OWN:
                raise
            return {"failed": str(error).strip().splitlines()[-1]}

    return guarded


def _whole(bench: Bench, name: str, python: Path, count: int, shared: int, new: int) -> Step:
    """All steps of one way in one round."""
    shape = {"shape": LARGE.json(), "count": count}

    def take(number: int) -> Answer:
        touch_memory()
        with bench.scratch() as folder:
            common = {"folder": str(folder / "of it"), **shape}

            def restored(**more: Any) -> Answer:
                answer = _run(python, name, "restore", {**common, **more})
                due = more.get("shared", count)
                answer["exact"] = answer["compared"] == LARGE.nbytes(min(answer["offset"], due))
                return answer

            out: Answer = {"store": _run(python, name, "store", common)}
            _each(folder, pagecache.drop if pagecache.CAN_DROP else pagecache.warm)
            out["cold"] = restored()
            _each(folder, pagecache.warm)
            out["warm"] = restored()
            out["diverging"] = restored(shared=shared)
            try:
                more = {**common, "new": new, "number": number}
                out["append"] = _run(python, name, "append", more)
            except StepFailed as error:
                say(f"    {name} could not append: {str(error)[-200:]}")
                out["append"] = {}
            if flip(folder, LARGE, count, number):
                out["damaged"] = restored()
            return out

    return take


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


def _each(folder: Path, act: Any) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size:
            act(file)


def _run(python: Path, name: str, step: str, arguments: dict[str, Any]) -> Answer:
    """One step of an adapter in its own Python. Raises ``StepFailed``."""
    words = [f"peer_{name.replace('-', '_')}", step, json.dumps(arguments)]
    child = [str(python), "-m", "benchmarks.peers.program", *words]
    return last_answer(child, f"{name}, {step}", {"PYTHONPATH": str(HOME)})
