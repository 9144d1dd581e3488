"""What the page shows beyond totals, gathered in one pass and bounded, however many events."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.prefixstore.event import LOOKUP, RESTORE, STORE

if TYPE_CHECKING:
    from kvkeep.prefixstore.event import Event

RECENT = 500
RESTORES = 1500
MOST_BARS = 120
MINUTE = 60
WIDTHS = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10080, 40320)
"""Minutes that a bar of the charts over time may stand for."""


class Restored(NamedTuple):
    """One restore: its tokens, its seconds, where they came from, its space."""

    tokens: int
    seconds: float
    tier: str
    space: str


@dataclass
class Slice:
    """Lookups of a stretch of time that begins at ``start`` (seconds since the epoch)."""

    start: int
    lookups: int = 0
    hits: int = 0
    prompt: int = 0
    resumed: int = 0


@dataclass
class Collected:
    """Call it with every event; then ask for ``slices``, ``recent`` and ``restores``."""

    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=RECENT))
    restores: list[Restored] = field(default_factory=list)
    restored: int = 0
    _minutes: dict[int, Slice] = field(default_factory=dict)
    _dice: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, event: Event) -> None:
        """Take note of one event."""
        if event.what == LOOKUP:
            self.recent.append(event)
            start = int(event.time // MINUTE) * MINUTE
            minute = self._minutes.get(start)
            if minute is None:
                minute = self._minutes[start] = Slice(start)
            minute.lookups += 1
            minute.hits += event.resumed > 0
            minute.prompt += event.prompt
            minute.resumed += event.resumed
        if event.resumed and event.what in (LOOKUP, RESTORE):
            self._restore(event)

    @property
    def width(self) -> int:
        """Seconds that a slice stands for, so that there are not too many of them."""
        if not self._minutes:
            return MINUTE
        span = (max(self._minutes) - min(self._minutes)) // MINUTE + 1
        return MINUTE * next((w for w in WIDTHS if span <= w * MOST_BARS), -(-span // MOST_BARS))

    def slices(self) -> list[Slice]:
        """Lookups by stretches of time, without the empty ones."""
        width = self.width
        found: dict[int, Slice] = {}
        for start in sorted(self._minutes):
            minute = self._minutes[start]
            at = start // width * width
            piece = found.setdefault(at, Slice(at))
            piece.lookups += minute.lookups
            piece.hits += minute.hits
            piece.prompt += minute.prompt
            piece.resumed += minute.resumed
        return list(found.values())

    def _restore(self, event: Event) -> None:
        """Keep a fair sample of all restores (Vitter's reservoir), the same each time."""
        self.restored += 1
        tier = event.tier or STORE
        one = Restored(event.resumed, event.seconds, tier, event.space.hex())
        if len(self.restores) < RESTORES:
            self.restores.append(one)
            return
        place = self._dice.randrange(self.restored)
        if place < RESTORES:
            self.restores[place] = one
