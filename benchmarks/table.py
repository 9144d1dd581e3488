"""The table at the end of a run, 80 columns wide, and the same as JSON's own types."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Line, Result

LABEL = 45


def render(results: list[Result]) -> str:
    """All results, one block each: median and range of every line, then what is to be reached."""
    out: list[str] = []
    for result in results:
        out.append(f"{result.title:<{LABEL + 2}}{'median':>14}{'lowest – highest':>19}")
        out += [f"  {_row(line)}" for line in result.lines]
        for goal in result.goals:
            out.append(f"  {_row(goal.line)}")
            sign = "at least" if goal.more else "at most"
            answer = "reached" if goal.reached else "NOT REACHED"
            reach = f"to reach: {sign} {_number(goal.reach)}{_unit(goal.line.unit)}"
            out.append(f"  {'':<4}{reach:<{LABEL - 4}} {answer:>13}")
        for note in result.notes:
            out += _wrapped(note)
        out.append("")
    return "\n".join(out)


def as_json(result: Result) -> dict[str, Any]:
    """A result with every round's values."""
    return {
        "title": result.title,
        "lines": [_values(line) for line in result.lines],
        "goals": [
            {
                **_values(goal.line),
                "reach": goal.reach,
                "at": "least" if goal.more else "most",
                "reached": goal.reached,
            }
            for goal in result.goals
        ],
        "notes": result.notes,
    }


def _values(line: Line) -> dict[str, Any]:
    return {"label": line.label, "unit": line.unit, "median": line.median, "values": line.values}


def _row(line: Line) -> str:
    value = f"{_number(line.median)}{_unit(line.unit)}"
    spread = ""
    if len(line.values) > 1:
        spread = f"{_number(min(line.values))} – {_number(max(line.values))}"
    return f"{line.label[:LABEL]:<{LABEL}}{value:>14}{spread:>19}"


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


def _number(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 78, initial_indent="  ", subsequent_indent="  ")
