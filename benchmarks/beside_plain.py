"""One large plain cache beside others: store, restore, append, diverge, and one flipped byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import pagecache
from benchmarks.beside_damage import flip
from benchmarks.beside_ways import Way
from benchmarks.harness import Answer, Bench, Result, Step, StepFailed, say
from benchmarks.rows import LARGE, MIB

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
HELD = 300
"""Tokens of the caches that have room, of which is seen whether a store holds their buffers."""


def sizes(quick: bool) -> tuple[int, int, int]:
    """Tokens that are stored, that a diverging prompt shares, and that are appended."""
    return (512, 300, 64) if quick else (4096, 3000, 512)


def step(bench: Bench, way: Way) -> Step:
    """All steps of a way in one round."""
    count, shared, new = sizes(bench.quick)

    def take(number: int) -> Answer:
        with bench.scratch() as folder:
            common = {"folder": str(folder / "of it"), "shape": LARGE.json(), "count": count}

            def restored(**more: Any) -> Answer:
                answer = way.run("restore", **common, **more)
                due = more.get("shared", count)
                answer["exact"] = answer["compared"] == LARGE.nbytes(min(answer["offset"], due))
                return answer

            out: Answer = {"store": way.run("store", **common)}
            if not number:
                more = {**common, "folder": str(folder / "held"), "count": HELD}
                out["held"] = way.run("held", **more)
                shutil.rmtree(folder / "held")
            _each(folder, pagecache.drop if pagecache.CAN_DROP else pagecache.warm)
            out["cold"] = restored()
            _each(folder, pagecache.warm)
            out["warm"] = restored()
            out["diverging"] = restored(shared=shared)
            if not out["warm"]["offset"]:
                return {**out, "append": {}}
            try:
                out["append"] = way.run("append", **common, new=new, number=number)
            except StepFailed as error:
                say(f"    {way.name} could not append: {str(error)[-200:]}")
                out["append"] = {}
            if flip(folder, LARGE, count, number):
                out["damaged"] = restored()
            return out

    return take


def report(result: Result, found: dict[str, list[Answer]], _: bool) -> None:
    """The lines of the plain cache, for the ways that did not fail."""
    for label, step, key, scale, unit in COLUMNS:
        for name, every in found.items():
            some = [a[step] for a in every if a[step] and (a["warm"]["offset"] or step == "store")]
            if some:
                result.line(f"{label}: {name}", [answer[key] * scale for answer in some], unit)
    for name, every in found.items():
        if not any(answer["warm"]["offset"] for answer in every):
            result.notes.append(f"{name} gave nothing back, so that its restores are left out.")
            continue
        exact = sum(a[step]["exact"] for a in every for step in ("warm", "cold", "diverging"))
        result.line(f"restores that were not exact: {name}", [float(3 * len(every) - exact)], "")
        damaged = [a["damaged"] for a in every if "damaged" in a and a["warm"]["exact"]]
        if damaged:
            served = sum(answer["wrong"] for answer in damaged)
            result.line(f"a flipped byte was served: {name}", [float(served)], "")
    _report_room(result, found)


def _report_room(result: Result, found: dict[str, list[Answer]]) -> None:
    for label, key, unit in (
        ("room: caller", "caller", "s"),
        ("room: next token copies", "copied", ""),
    ):
        for name, every in found.items():
            result.line(f"{label}: {name}", [every[0]["held"][key]], unit)
    result.notes.append(
        f"With room: {HELD} tokens, {LARGE.nbytes(HELD) // MIB} MiB, in buffers for 512, as caches "
        "nearly always have; the share of layers that the next token copies since the store still "
        "holds them. The buffers of the large cache are exactly full."
    )


def _each(folder: Path, act: Callable[[Path], Any]) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size:
            act(file)
