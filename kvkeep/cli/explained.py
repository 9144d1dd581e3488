"""What `kvkeep why` says, of a prompt that is asked now or of a request that is over."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvkeep.cli.parting import Parting
from kvkeep.cli.reasons import as_json as decision_json
from kvkeep.cli.reasons import in_words
from kvkeep.cli.report_data import event_json
from kvkeep.cli.tables import columns
from kvkeep.cli.units import count, duration
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.event import Event
    from kvkeep.prefixstore.policy import Decision
    from kvkeep.prefixstore.trace import Near, RecipeTrace, Step

WIDTH = 80
EDGES = 4
"""Edges of the walk that are shown: the last ones."""


@dataclass(frozen=True)
class Explained:
    """A lookup with all that is known of it. ``event`` is that of a request that is over."""

    space: str
    decision: Decision
    parting: Parting | None
    helps: str
    near: Sequence[Near] = ()
    steps: Sequence[Step] = ()
    blocked: str | None = None
    recipes: Sequence[RecipeTrace] = ()
    event: Event | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "space": self.space,
            **decision_json(self.decision),
            "parting": self.parting.as_json() if self.parting is not None else None,
            "helps": self.helps,
            "near": [
                {
                    "offset": p.offset,
                    "origin": p.origin,
                    "created": p.created,
                    "usable": p.usable,
                    "beyond": p.beyond,
                }
                for p in self.near
            ],
            "walk": [
                {
                    "start": step.start,
                    "stop": step.stop,
                    "shared_tokens": step.shared,
                    "branches": step.branches,
                }
                for step in self.steps
            ],
            "blocked": self.blocked,
            "recipes": [
                {
                    "kinds": list(recipe.kinds),
                    "floor": recipe.floor,
                    "rows": recipe.rows,
                    "offset": recipe.offset,
                    "at_point": recipe.at_point,
                    "chosen": recipe.chosen,
                }
                for recipe in self.recipes
            ],
            "request": event_json(self.event) if self.event is not None else None,
            "notes": self.notes,
        }

    def text(self) -> str:
        """For people."""
        decision = self.decision
        total = count(decision.prompt_tokens)
        rows = _about(self.event) if self.event is not None else []
        rows.append(("matched", f"{count(decision.matched)} of {total} tokens"))
        if self.parting is not None:
            rows += self.parting.lines()
        rows.append(("resumed", f"{count(decision.offset)} of {total} tokens"))
        rows += _named("  because", in_words(decision))
        rows += _named("walk", _walk(self.steps, self.blocked))
        rows += _named("recipes", [_recipe(r) for r in self.recipes if len(self.recipes) > 1])
        rows += _named("near", [_near(self.near)] if self.near else [])
        rows += _named("would help", [self.helps] if self.helps else [])
        rows += _named("note", self.notes)
        return columns(_wrapped(rows))


def _about(event: Event) -> list[tuple[str, str]]:
    import time

    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
    took = f"{moment}, took {duration(event.seconds)}"
    if event.nbytes:
        took += f", {format_size(event.nbytes)} read"
    rows = [("request", event.request), ("when", took)]
    if event.saved:
        rows.append(("saved", f"about {duration(event.saved)} of reading"))
    return rows


def _walk(steps: Sequence[Step], blocked: str | None) -> list[str]:
    said = [_edges(steps, blocked is not None)] if steps else []
    return said + ([_BLOCKED[blocked]] if blocked else [])


_BLOCKED = {
    "corrupt": "the next record is damaged: nothing behind it can be read, and nothing is stored "
    "behind it, until `kvkeep verify --repair` has removed it",
    "newer_format": "the next record is of a newer kvkeep: nothing behind it can be read by this "
    "one, and this one stores nothing behind it",
}


def _edges(steps: Sequence[Step], blocked: bool) -> str:
    shown = [
        f"{count(s.start)}–{count(s.start + s.shared)}"
        + (f" of an edge to {count(s.stop)}" if s.start + s.shared < s.stop else "")
        for s in steps[-EDGES:]
    ]
    more = len(steps) - EDGES
    before = f"{count(more)} edge{'s' * (more > 1)}, then " if more > 0 else ""
    last = steps[-1]
    if blocked or last.start + last.shared < last.stop:
        end = ""
    elif last.branches:
        end = f"; {count(last.branches)} stored branches go on there, none of them like this prompt"
    else:
        end = "; nothing is stored behind it"
    return before + ", ".join(shown) + end


def _recipe(recipe: RecipeTrace) -> str:
    """One recipe: what would limit it by itself."""
    kinds = ",".join(recipe.kinds)
    where = "at a resume point" if recipe.at_point else "between resume points"
    said = f"{kinds}: rows to {count(recipe.rows)}, floor {count(recipe.floor)}, "
    if not recipe.offset:
        return said + "cannot be resumed here"
    return said + f"resumes at {count(recipe.offset)} {where}" + " ← chosen" * recipe.chosen


def _near(near: Sequence[Near]) -> str:
    shown = [
        f"{count(p.offset)} ({p.origin}{'' if p.usable else ', damaged'})"
        + (" beyond the parting" if p.beyond else "")
        for p in near
    ]
    return "resume points at " + ", ".join(shown)


def _named(name: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


def _wrapped(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The rows with long cells on several lines; quoted text stays whole."""
    width = WIDTH - max(len(name) for name, _ in rows) - 2
    out = []
    for name, cell in rows:
        quote = cell.startswith("«")
        parts = [cell] if quote else textwrap.wrap(cell, width, break_long_words=False) or [""]
        out += [(name if i == 0 else "", part) for i, part in enumerate(parts)]
    return out
