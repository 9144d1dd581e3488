"""Counters over events: every number is a sum over the same records, and sums of sums agree."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import msgpack

from kvkeep.prefixstore.event import EVICT, LOOKUP, RESTORE, SNAPSHOT, STORE, Event

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds, in seconds, of the counts in ``restore_counts``; one more has no bound."""

REGRETS = ("evicted", "expired")
"""Reasons that say: this was stored once."""

STORED, ALREADY = "stored", "already_stored"
"""Reasons of snapshots that left a resume point, or found it."""

MOST_KEYS = 64
"""Different reasons or kinds that are told apart; what is beyond counts as ``other``."""


@dataclass
class Totals:
    """Counters of a store, of one space, or of any other group of events.

    Tokens are positions, bytes are stored bytes. ``saved_seconds`` is an estimate, for those
    ``rated_tokens`` of the resumed ones whose prefill rate was known; ``lost_seconds`` is
    what reading the others took, for lookups with a known rate. ``reasons`` and ``refusals``
    count lookups and snapshots; ``lost_tokens`` by reason, ``limited_by`` (the lost ones by
    limiting kinds) and ``tiers`` (the resumed ones) count tokens. Of ``snapshots``, some were
    ``known`` and left nothing to write, some ``refused``. ``first`` is the number of the first
    event, where these are all events of a space.
    """

    lookups: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    resumed_tokens: int = 0
    rated_tokens: int = 0
    saved_seconds: float = 0.0
    lost_seconds: float = 0.0
    lookup_seconds: float = 0.0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    snapshots: int = 0
    snapshots_known: int = 0
    snapshots_refused: int = 0
    stored_tokens: int = 0
    known_tokens: int = 0
    written_bytes: int = 0
    evictions: int = 0
    evicted_nodes: int = 0
    evicted_tokens: int = 0
    evicted_bytes: int = 0
    regrets: int = 0
    regret_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    limited_by: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    first: int = 0
    restore_counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    @property
    def hit_rate(self) -> float:
        """Resumed tokens over prompt tokens."""
        return self.resumed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def request_hit_rate(self) -> float:
        """Lookups that resumed something over lookups."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def restores(self) -> int:
        """Caches that were rebuilt, or handed over from memory."""
        return sum(self.restore_counts)

    def add(self, event: Event) -> None:
        """Count one event; one of a kind that is not known counts nowhere."""
        if event.what == LOOKUP:
            self._look_up(event)
        elif event.what == SNAPSHOT:
            self.snapshots += 1
            if event.reason == ALREADY:
                self.snapshots_known += 1
            elif event.reason != STORED:
                self.snapshots_refused += 1
                _count(self.refusals, _NUMBER.sub("…", event.reason))
            self.stored_tokens += event.new
            self.known_tokens += event.known
            self.written_bytes += event.nbytes
        elif event.what == RESTORE:
            self._restore(event)
        elif event.what == EVICT:
            self.evictions += 1
            self.evicted_nodes += event.nodes
            self.evicted_tokens += event.known
            self.evicted_bytes += event.nbytes

    def merge(self, other: Totals) -> None:
        """Count what ``other`` counted."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTERS:
            for key, value in getattr(other, name).items():
                _count(getattr(self, name), key, value)
        both = zip(self.restore_counts, other.restore_counts, strict=True)
        self.restore_counts = [a + b for a, b in both]

    def pack(self) -> bytes:
        """The counters as a msgpack map; what is zero is left out."""
        return bytes(msgpack.packb({k: v for k, v in _plain(self).items() if v}))

    @staticmethod
    def unpack(data: Any) -> Totals | None:
        """The counters of ``pack``, also of another version; ``None`` for damage."""
        try:
            found = msgpack.unpackb(data, strict_map_key=False)
            totals = Totals(**{k: v for k, v in found.items() if k in _PLAIN})
            for name in _COUNTERS:
                setattr(totals, name, Counter(getattr(totals, name)))
            for name in _NUMBERS:
                if not getattr(totals, name) >= 0:
                    return None
            if len(totals.restore_counts) != len(BUCKETS) + 1:
                return None
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
            return None
        return totals

    def _look_up(self, event: Event) -> None:
        self.lookups += 1
        self.prompt_tokens += event.prompt
        self.matched_tokens += event.matched
        self.resumed_tokens += event.resumed
        self.lookup_seconds += event.seconds
        _count(self.reasons, event.reason)
        _count(self.lost_tokens, event.reason, event.lost)
        _count(self.limited_by, event.kinds, event.lost)
        if event.rate:
            self.rated_tokens += event.resumed
            self.saved_seconds += event.resumed / event.rate
            self.lost_seconds += event.lost / event.rate
        if event.stem in REGRETS:
            self.regrets += 1
            self.regret_tokens += event.lost
        if event.resumed:
            self.hits += 1
            _count(self.tiers, event.tier or STORE, event.resumed)
            self._restore(event)

    def _restore(self, event: Event) -> None:
        self.restored_bytes += event.nbytes
        self.restore_seconds += event.seconds
        self.restore_counts[bisect_left(BUCKETS, event.seconds)] += 1


def _count(counter: Counter[str], key: str, number: int = 1) -> None:
    if key not in counter and len(counter) >= MOST_KEYS:
        key = "other"
    counter[key] += number


_NUMBER = re.compile(r"\d[\d,.]*( ([KMGT]i)?B\b)?")
_PLAIN = tuple(f.name for f in fields(Totals))
_COUNTERS = ("reasons", "lost_tokens", "refusals", "limited_by", "tiers")
_NUMBERS = tuple(n for n in _PLAIN if n not in (*_COUNTERS, "restore_counts", "first"))


def _plain(totals: Totals) -> dict[str, Any]:
    return {
        name: dict(value) if isinstance(value := getattr(totals, name), Counter) else value
        for name in _PLAIN
    }


def sum_of(parts: Iterable[Totals]) -> Totals:
    """All of them together."""
    total = Totals()
    for part in parts:
        total.merge(part)
    return total
