"""What one server process counted: read by HTTP threads while another thread counts.

Numbers only, and labels out of fixed sets: no prompt text, no model names, no token ids.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkeep.prefixstore.metrics import Sample, Timings, render

TIERS = ("memory", "store", "none")
"""Where a lookup was served from."""

OUTCOMES = ("stored", "already_stored", "shed", "refused", "failed")
"""What became of a snapshot. ``shed`` ones were left out because the writer was behind."""


@dataclass
class Lookup:
    """One lookup, numerator and denominator together. Tokens are positions."""

    reason: str
    tier: str
    prompt: int
    matched: int
    resumed: int
    seconds: float
    saved: float


@dataclass
class Metrics:
    """Counters of a process. Safe to use from several threads."""

    prompt_tokens: int = 0
    matched_tokens: int = 0
    saved_seconds: float = 0.0
    lookup_seconds: float = 0.0
    stored_bytes: int = 0
    checkpoints: int = 0
    lookups: Counter[tuple[str, str]] = field(default_factory=Counter)
    resumed_tokens: Counter[str] = field(default_factory=Counter)
    snapshots: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=Counter)
    restores: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def look_up(self, event: Lookup) -> None:
        """Count a lookup."""
        with self._lock:
            self.lookups[event.reason, event.tier] += 1
            self.prompt_tokens += event.prompt
            self.matched_tokens += event.matched
            self.resumed_tokens[event.tier] += event.resumed
            self.saved_seconds += event.saved
            self.lookup_seconds += event.seconds
            self.lost_tokens[event.reason] += event.prompt - event.resumed
            if event.resumed:
                self.restores.add(event.seconds)

    def snapshot(self, outcome: str, nbytes: int = 0) -> None:
        """Count a snapshot that was stored or not."""
        with self._lock:
            self.snapshots[outcome] += 1
            self.stored_bytes += nbytes

    def checkpoint(self) -> None:
        """Count a resume point inside a prompt."""
        with self._lock:
            self.checkpoints += 1

    def fail(self, doing: str) -> int:
        """Count a failure; how often ``doing`` has failed now."""
        with self._lock:
            self.failures[doing] += 1
            return self.failures[doing]

    def data(self) -> dict[str, Any]:
        """All counters, for JSON."""
        with self._lock:
            lookups, resumed = dict(self.lookups), dict(self.resumed_tokens)
            out: dict[str, Any] = {
                "lookups": sum(lookups.values()),
                "prompt_tokens": self.prompt_tokens,
                "matched_tokens": self.matched_tokens,
                "resumed_tokens": sum(resumed.values()),
                "saved_seconds": self.saved_seconds,
                "lookup_seconds": self.lookup_seconds,
                "stored_bytes": self.stored_bytes,
                "checkpoints": self.checkpoints,
                "snapshots": {x: self.snapshots[x] for x in OUTCOMES},
                "failures": dict(self.failures),
            }
        reasons: Counter[str] = Counter()
        for (reason, _), number in lookups.items():
            reasons[reason] += number
        out["reasons"] = dict(reasons)
        out["resumed_by_tier"] = {tier: resumed.get(tier, 0) for tier in TIERS[:2]}
        return out

    def prometheus(self, gauges: Mapping[str, float]) -> str:
        """All counters and ``gauges`` (by name) in Prometheus' text format."""
        with self._lock:
            found: dict[str, list[Sample]] = {
                "kvkeep_lookups_total": [
                    Sample({"reason": reason, "tier": tier}, number)
                    for (reason, tier), number in sorted(self.lookups.items())
                ],
                "kvkeep_prompt_tokens_total": [Sample({}, self.prompt_tokens)],
                "kvkeep_matched_tokens_total": [Sample({}, self.matched_tokens)],
                "kvkeep_resumed_tokens_total": [
                    Sample({"tier": tier}, self.resumed_tokens[tier]) for tier in TIERS[:2]
                ],
                "kvkeep_lost_tokens_total": [
                    Sample({"reason": reason}, number)
                    for reason, number in sorted(self.lost_tokens.items())
                ],
                "kvkeep_restore_seconds": list(self.restores.samples({})),
                "kvkeep_saved_seconds_total": [Sample({}, self.saved_seconds)],
                "kvkeep_lookup_seconds_total": [Sample({}, self.lookup_seconds)],
                "kvkeep_snapshots_total": [
                    Sample({"outcome": outcome}, self.snapshots[outcome]) for outcome in OUTCOMES
                ],
                "kvkeep_stored_bytes_total": [Sample({}, self.stored_bytes)],
                "kvkeep_checkpoints_total": [Sample({}, self.checkpoints)],
                "kvkeep_failures_total": [
                    Sample({"doing": doing}, number)
                    for doing, number in sorted(self.failures.items())
                ],
            }
        found |= {name: [Sample({}, value)] for name, value in gauges.items()}
        return render(found)
