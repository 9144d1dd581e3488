"""Spaces and conversations by the beginning of their ids, as a person types them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvkeep.errors import KvkeepError

if TYPE_CHECKING:
    from kvkeep.prefixstore.browse import Conversation, SpaceInfo
    from kvkeep.prefixstore.pins import Pin
    from kvkeep.prefixstore.report import Report
    from kvkeep.prefixstore.store import Store

Item = TypeVar("Item")


class NotFound(KvkeepError):
    """No one thing in the store has this id."""

    exit_code = 2
    remedy = "Run `kvkeep ls` for the ids."


def find_space(store: Store, start: str) -> SpaceInfo:
    """The one space whose id begins with ``start``. Raises ``NotFound``."""
    return _only(store.spaces(), "space", start, lambda item: item.id)


def find_report_space(report: Report, start: str) -> str:
    """The one space of a report whose id begins with ``start``. Raises ``NotFound``."""
    return _only(list(report.spaces), "space", start, str)


def find_conversation(store: Store, start: str) -> Conversation:
    """The one conversation whose id is ``start``, or begins with it. Raises ``NotFound``."""
    return _only(store.conversations(), "conversation", start, lambda item: item.id)


def find_pin(store: Store, start: str) -> Pin:
    """The one pin whose id is ``start``, or begins with it. Raises ``NotFound``."""
    return _only(store.pins(), "pin", start, lambda item: item.id)


def _only(items: Sequence[Item], what: str, start: str, name: Callable[[Item], str]) -> Item:
    wanted = start.lower().rstrip("…")
    found = [item for item in items if name(item) == wanted]
    found = found or [item for item in items if wanted and name(item).startswith(wanted)]
    if len(found) == 1:
        return found[0]
    problem = f"No {what} has the id {start}"
    if found:
        problem = f"{len(found)} {what}s have ids that begin with {start}"
    raise NotFound(problem)
