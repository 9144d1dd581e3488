"""Beside others: kvkeep and every peer that is installed, on the same caches, in the same run.

Peers run in Pythons of their own: ``--peers-dir`` names a folder with a virtual environment for
each, called like its name on PyPI (``python -m venv DIR/vllm-mlx``, then its ``pip install``).
Whatever is not there is left out, by name. Each adapter is a file of ``benchmarks/peers``.
A peer that fails, refuses or gives back something else is named with its reason, and the run
goes on.

Measured for each, in rounds in which all take turns:

* a plain cache of 512 MiB: storing it (the call; written; and flushed to the disk, which peers
  leave to the system), restoring it in a fresh process warm and cold, appending 512 tokens to
  it, the tokens that come back where 3,000 of 4,096 are shared, and what becomes of one flipped
  byte; every restore is compared bit for bit; and, on a small cache, whether the next token
  copies all of it since the store still holds the caller's buffers;
* the layouts of ``layouts``: storing 2,048 tokens and 512 more, and restoring all of it warm;
  what was restored reads on with more positions, and every bit that attention then sees is
  compared with that of a cache that was never stored;
* 1, 2 and 8 processes at once, 32 MiB each: until all are on the disk, and until the last has
  everything back. Peers whose stores are not meant for several processes have a folder for each.

Two rounds with all peers take about 9 minutes. Every step first stores and restores a few rows
elsewhere, so that no clock counts imports.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks import beside_crowd, beside_layouts, beside_plain
from benchmarks.beside_ways import Way, installed
from benchmarks.harness import Answer, Bench, Result, Step, say
from benchmarks.rows import LARGE, MIB
from benchmarks.touched import touch_memory

REPORTS: dict[str, Callable[[Result, dict[str, list[Answer]], bool], None]] = {
    "plain": beside_plain.report,
    "layouts": beside_layouts.report,
    "crowd": beside_crowd.report,
}
PARTS: dict[str, Callable[[Bench, Way], Step]] = {
    "plain": beside_plain.step,
    "layouts": beside_layouts.step,
    "crowd": beside_crowd.step,
}


def measure(bench: Bench) -> Result:
    """Every way in turn, in each round, in a folder of its own."""
    ways, left_out = installed(bench)
    count = beside_plain.sizes(bench.quick)[0]
    result = Result(f"Beside others: {LARGE.nbytes(count) // MIB} MiB, {count:,} tokens")
    for way in list(ways):
        answer = way.guarded(_version(way))(0)
        if _works(result, way.name, "version", [answer]):
            result.notes.append(
                f"{way.name} {answer['version']}, beside mlx-lm {answer['mlx-lm']} and "
                f"MLX {answer['mlx']}."
            )
        else:
            ways.remove(way)
    found = bench.interleaved({way.name: _whole(bench, way) for way in ways})
    for part, report in REPORTS.items():
        answers = {name: [answer[part] for answer in every] for name, every in found.items()}
        working = {n: some for n, some in answers.items() if _works(result, n, part, some)}
        report(result, working, bench.quick)
    if left_out:
        result.notes.append(f"Not installed, and left out: {', '.join(left_out)}.")
    return result


def _version(way: Way) -> Step:
    return lambda _: way.run("version")


def _whole(bench: Bench, way: Way) -> Step:
    """Every part of a way; one that fails leaves the others."""

    def take(number: int) -> Answer:
        touch_memory()
        answers = {}
        for part, step in PARTS.items():
            answers[part] = way.guarded(step(bench, way))(number)
            say(f"    {part}: {json.dumps(answers[part])}")
        return answers

    return take


def _works(result: Result, name: str, part: str, answers: list[Answer]) -> bool:
    """Whether a way did not fail; a note says why it did."""
    failed = [answer["failed"] for answer in answers if "failed" in answer]
    if failed:
        result.notes.append(f"{name} failed ({part}) and is left out: {failed[0]}")
    return not failed
