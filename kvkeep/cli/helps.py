"""One line on what would have helped a lookup to resume more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkeep.cli.advice import ADVICE, CHANGED
from kvkeep.cli.units import count

if TYPE_CHECKING:
    from kvkeep.prefixstore.trace import Near


def would_help(
    reason: str,
    matched: int,
    resumed: int,
    near: Sequence[Near],
    budget: str,
    *,
    floor: int = 0,
    shown: bool = True,
) -> str:
    """What would help; empty where nothing would, or nobody can tell.

    ``reason`` may have its detail. ``floor`` is the lowest offset that can be resumed at all,
    0 where that is not known. ``shown`` says whether the parting is shown above the line.
    """
    stem, _, detail = reason.partition(":")
    if stem == "full":
        varies = "nothing: all that is shared was resumed; what differs above is best put last"
        return varies if shown else ""
    if stem == "last_token":
        return ""
    if stem == "no_state_at_offset":
        gap = matched - resumed
        beyond = [p.offset for p in near if p.beyond]
        line = f"a resume point nearer to {count(matched)} than {count(resumed)}: "
        line += f"a --prefill-step of less than {count(max(gap, 1))} leaves one"
        return line + (f" (the next lies beyond it, at {count(beyond[0])})" if beyond else "")
    if stem == "below_floor" and floor > matched:
        return f"a prompt that shares {count(floor)} tokens at least; or {ADVICE[stem]}"
    if stem == "space_changed":
        return CHANGED.get(detail, ADVICE[stem])
    return ADVICE.get(stem, "").format(half="half", budget=budget)
