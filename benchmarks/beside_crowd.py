"""1, 2 and 8 processes at once beside others: all store, and then all restore."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.beside_ways import Way
from benchmarks.crowd import COUNT, CROWDS
from benchmarks.harness import Answer, Bench, Result, Step, settle_disk
from benchmarks.peers.timed import flush
from benchmarks.rows import LARGE


def crowds(quick: bool) -> tuple[int, ...]:
    """How many processes there are at once."""
    return CROWDS[:2] if quick else CROWDS


def step(bench: Bench, way: Way) -> Step:
    """All crowds of a way in one round, by the same processes, which are ready before."""

    def take(_: int) -> Answer:
        most = max(crowds(bench.quick))
        size = {"shape": LARGE.json(), "count": COUNT}
        with bench.scratch() as scratch, way.crowd(most) as act:
            act("crowd-ready", [{"number": n, **size} for n in range(most)])
            out: Answer = {}
            for crowd in crowds(bench.quick):
                base = scratch / str(crowd)
                each = [
                    {"folder": str(base / ("all" if way.together else str(n)))}
                    for n in range(crowd)
                ]
                # In turn, as servers start: not every peer can make a store twice at once.
                for number, folder in enumerate(each):
                    act("crowd-open", [folder], first=number)
                settle_disk()
                stored = act("crowd-store", [{} for _ in each])
                _flush(base)
                durable = time.time() - min(a["start"] for a in stored)
                restored = act("crowd-restore", each)
                out[str(crowd)] = {
                    "store": durable,
                    "restore": max(a["done"] for a in restored) - min(a["start"] for a in restored),
                    "exact": sum(a["exact"] for a in restored),
                    "back": sum(bool(a["offset"]) for a in restored),
                }
            return out

    return take


def _flush(folder: Path) -> None:
    """What the peers leave to the system."""
    for file in folder.rglob("*"):
        if file.is_file():
            flush(file)


def report(result: Result, found: dict[str, list[Answer]], quick: bool) -> None:
    """Seconds until the last process is done, and how many had everything back exactly."""
    for crowd in crowds(quick):
        for what in ("store", "restore"):
            for name, every in found.items():
                answers = [answer[str(crowd)] for answer in every]
                if what == "store" or any(a["back"] for a in answers):
                    values = [answer[what] * 1e3 for answer in answers]
                    result.line(f"{crowd} at once, {what}: {name}", values, "ms")
        for name, every in found.items():
            values = [float(answer[str(crowd)]["exact"]) for answer in every]
            result.line(f"{crowd} at once, exact: {name}", values, "")
