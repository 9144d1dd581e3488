"""Which spaces hold what the asked one lacks, for the message of a miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.cli.tables import columns, shortened

if TYPE_CHECKING:
    from kvkeep.prefixstore.browse import SpaceInfo
    from kvkeep.prefixstore.policy import Decision
    from kvkeep.prefixstore.space import Space

HINT = "Run `kvkeep ls` for what is stored, or `kvkeep snapshot` to store this prompt."


def other_spaces(spaces: list[SpaceInfo], space: Space, decision: Decision) -> str:
    """The spaces that differ from ``space`` in just what the decision names, and what to do.

    Spaces under another salt are never shown.
    """
    if decision.reason != "space_changed":
        return HINT
    changed = tuple(decision.detail.split(","))
    asked = space.identity
    rows: list[tuple[str, ...]] = [("asked", *_cells(asked.label, dict(asked.fields), changed))]
    for info in spaces:
        same_tenant = info.fields.get("salt", "") == asked.salt
        theirs = dict(asked.fields) | info.fields
        differs = {f for f in theirs if info.fields.get(f) != dict(asked.fields).get(f)}
        if same_tenant and differs == set(changed):
            rows.insert(0, ("stored", *_cells(info.label, info.fields, changed)))
    return "\n".join([columns(rows, indent="  "), HINT])


def _cells(label: str, fields: dict[str, str], changed: tuple[str, ...]) -> tuple[str, ...]:
    return (shortened(label), *(f"{name} {_short(fields.get(name) or 'none')}" for name in changed))


def _short(value: str) -> str:
    return value if len(value) < 20 else f"{value[:6]}…"
