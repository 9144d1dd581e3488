"""Totals over lookup and snapshot events: every number is a sum over the same records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvkeep.prefixstore.events import Event


@dataclass
class Totals:
    """Counters of one space, or of the whole store. Tokens are positions."""

    lookups: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    resumed_tokens: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    snapshots: int = 0
    snapshots_refused: int = 0
    stored_tokens: int = 0
    known_tokens: int = 0
    written_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float:
        """Resumed tokens over prompt tokens."""
        return self.resumed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, event: Event) -> None:
        """Count one event."""
        if event.what == "lookup":
            self.lookups += 1
            self.hits += event.resumed > 0
            self.prompt_tokens += event.prompt
            self.matched_tokens += event.matched
            self.resumed_tokens += event.resumed
            self.restored_bytes += event.nbytes
            self.restore_seconds += event.seconds if event.resumed else 0.0
            self.reasons[event.reason] += 1
            self.lost_tokens[event.reason] += event.prompt - event.resumed
        elif event.what == "snapshot":
            self.snapshots += 1
            self.snapshots_refused += event.reason not in ("stored", "already_stored")
            self.stored_tokens += event.new
            self.known_tokens += event.known
            self.written_bytes += event.nbytes


@dataclass
class Report:
    """What lookups saved since a time, in all and by space.

    ``used_bytes`` of ``max_bytes`` are kept now; ``quarantined`` records were found damaged.
    """

    since: float
    total: Totals
    by_space: dict[str, Totals]
    labels: dict[str, str]
    used_bytes: int
    max_bytes: int
    quarantined: int


def count(events: Iterable[Event]) -> tuple[Totals, dict[str, Totals]]:
    """Totals of all events, and by space."""
    total = Totals()
    spaces: dict[str, Totals] = {}
    for event in events:
        total.add(event)
        spaces.setdefault(event.space.hex(), Totals()).add(event)
    return total, spaces
