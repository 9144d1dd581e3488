"""Other layouts beside others: store, append and restore, and who cannot hold one."""

from __future__ import annotations

from benchmarks.beside_ways import Way
from benchmarks.harness import Answer, Bench, Result, Step, StepFailed
from benchmarks.layouts import CHUNK, LAYOUTS
from benchmarks.rows import MIB

COLUMNS = (
    ("store, caller", "first", "caller", 1e3, "ms"),
    ("store, on disk", "first", "durable", 1e3, "ms"),
    (f"+{CHUNK}, caller", "next", "caller", 1e3, "ms"),
    (f"+{CHUNK}, on disk", "next", "durable", 1e3, "ms"),
    (f"+{CHUNK}, bytes", "next", "bytes", 1 / MIB, "MiB"),
    ("restore", "restore", "seconds", 1e3, "ms"),
)
REFUSED, NOTHING, OTHER, EXACT = "refused", "nothing came back", "not exact", "exact"


def count(quick: bool) -> int:
    """Tokens that are stored first; more than a window, so that a ring has gone round."""
    return 1536 if quick else 2048


def step(bench: Bench, way: Way) -> Step:
    """All layouts of a way in one round: a process that stores, and one that restores."""

    def take(_: int) -> Answer:
        with bench.scratch() as folder:
            first = count(bench.quick)
            size = {"folder": str(folder), "layouts": list(LAYOUTS), "count": first}
            stored = way.run("store-layout", **size)
            restored = way.run("restore-layout", **size)
        out = {layout: {**stored[layout], "restore": restored[layout]} for layout in LAYOUTS}
        for layout, answer in out.items():
            word, why = verdict(answer, first + CHUNK)
            if way.own and word != EXACT:
                raise StepFailed(f"{way.name}, {layout}: {word} {why}")
        return out

    return take


def verdict(answer: Answer, whole: int) -> tuple[str, str]:
    """What became of a layout, and the reason."""
    restore = answer["restore"]
    why = answer.get("refused") or restore.get("refused")
    if why:
        return REFUSED, why
    if not restore["offset"]:
        return NOTHING, ""
    if restore["differs"]:
        return OTHER, restore["differs"]
    if restore["offset"] != whole:
        return EXACT, f"{restore['offset']:,} of {whole:,} tokens"
    return EXACT, ""


def report(result: Result, found: dict[str, list[Answer]], quick: bool) -> None:
    """The lines of every layout; a way that cannot hold it is named with what it does instead."""
    whole = count(quick) + CHUNK
    for layout in LAYOUTS:
        for label, part, key, scale, unit in COLUMNS:
            for name, every in found.items():
                answers = [a[layout] for a in every]
                if all(verdict(a, whole)[0] in (EXACT, OTHER) for a in answers):
                    values = [a[part][key] * scale for a in answers]
                    result.line(f"{layout} {label}: {name}", values, unit)
        for name, every in found.items():
            verdicts = [verdict(answer[layout], whole) for answer in every]
            exact = sum(word == EXACT for word, _ in verdicts)
            result.line(f"{layout}, exact of {len(every)}: {name}", [float(exact)], "")
            word, why = next((v for v in verdicts if v[0] != EXACT), verdicts[-1])
            if word != EXACT or why:
                result.notes.append(f"{layout}, {name}: {word}{why and f' ({_short(why)})'}.")


def _short(why: str) -> str:
    line = why.strip().splitlines()[0]
    return line if len(line) <= 160 else line[:157] + "..."
