"""What one server process counted: read by HTTP threads while another thread counts.

Numbers only, and labels out of fixed sets: no prompt text, no model names, no token ids.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TIERS = ("memory", "store", "none")
"""Where a lookup was served from."""

OUTCOMES = ("stored", "already_stored", "shed", "refused", "failed")
"""What became of a snapshot. ``shed`` ones were left out because the writer was behind."""

_HELP = {
    "kvkeep_lookups_total": "Prompts that were looked up, by the reason for not resuming more.",
    "kvkeep_prompt_tokens_total": "Tokens of these prompts.",
    "kvkeep_matched_tokens_total": "Of these, tokens that were kept in some form.",
    "kvkeep_resumed_tokens_total": "Of these, tokens that were resumed, by tier.",
    "kvkeep_saved_seconds_total": "Estimate of the prefill time that resuming saved.",
    "kvkeep_lookup_seconds_total": "Time that lookups took, with their restores.",
    "kvkeep_snapshots_total": "Snapshots by what became of them.",
    "kvkeep_stored_bytes_total": "Bytes of rows and state that were written.",
    "kvkeep_checkpoints_total": "Resume points that were taken inside prompts.",
    "kvkeep_failures_total": "Failures that were caught, by what was being done.",
    "kvkeep_memory_sequences": "Live caches in memory.",
    "kvkeep_memory_bytes": "Bytes that they hold.",
    "kvkeep_memory_max_bytes": "The cap of these bytes.",
    "kvkeep_queue_snapshots": "Snapshots that wait to be written.",
    "kvkeep_queue_bytes": "Bytes that they hold in memory.",
    "kvkeep_store_bytes": "Bytes that the store keeps.",
    "kvkeep_store_max_bytes": "The store's byte budget.",
}


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
            found: dict[str, list[tuple[dict[str, str], float]]] = {
                "kvkeep_lookups_total": [
                    ({"reason": reason, "tier": tier}, number)
                    for (reason, tier), number in sorted(self.lookups.items())
                ],
                "kvkeep_prompt_tokens_total": [({}, self.prompt_tokens)],
                "kvkeep_matched_tokens_total": [({}, self.matched_tokens)],
                "kvkeep_resumed_tokens_total": [
                    ({"tier": tier}, self.resumed_tokens[tier]) for tier in TIERS[:2]
                ],
                "kvkeep_saved_seconds_total": [({}, self.saved_seconds)],
                "kvkeep_lookup_seconds_total": [({}, self.lookup_seconds)],
                "kvkeep_snapshots_total": [
                    ({"outcome": outcome}, self.snapshots[outcome]) for outcome in OUTCOMES
                ],
                "kvkeep_stored_bytes_total": [({}, self.stored_bytes)],
                "kvkeep_checkpoints_total": [({}, self.checkpoints)],
                "kvkeep_failures_total": [
                    ({"doing": doing}, number) for doing, number in sorted(self.failures.items())
                ],
            }
        found |= {name: [({}, value)] for name, value in gauges.items()}
        return "".join(_family(name, samples) for name, samples in found.items())


def _family(name: str, samples: Iterable[tuple[dict[str, str], float]]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{name}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6f}"
