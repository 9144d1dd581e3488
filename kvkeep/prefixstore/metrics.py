"""Counters in Prometheus' text format: names, meanings, and how they are written.

One table of names serves ``kvkeep report --prometheus``, which counts what the store counted
since it was made, and a server's ``/metrics``, which counts what its process did. Scrape one of
the two: their sums would count twice. Labels come out of bounded sets: reasons and tiers are
enumerations, and at most ``MOST_SPACES`` spaces are told apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore.event import MEMORY, STORE
from kvkeep.prefixstore.events import LOST, all_totals, rates
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.ledger import counter
from kvkeep.prefixstore.policy import Reason
from kvkeep.prefixstore.report import Filter, known_spaces
from kvkeep.prefixstore.totals import BUCKETS, Totals, sum_of

MOST_SPACES = 50
LONGEST_LABEL = 64
OTHER = "other"

NAMES: Mapping[str, str] = {
    "kvkeep_lookups_total": "Prompts that were looked up, by the reason for not resuming more.",
    "kvkeep_hits_total": "Of these, prompts of which something was resumed.",
    "kvkeep_prompt_tokens_total": "Tokens of the prompts that were looked up.",
    "kvkeep_matched_tokens_total": "Of these, tokens that were kept in some form.",
    "kvkeep_resumed_tokens_total": "Of these, tokens that were resumed, by where they came from.",
    "kvkeep_lost_tokens_total": "Tokens that were not resumed, by the reason of their lookup.",
    "kvkeep_saved_seconds_total": "Estimate of the time that reading the resumed tokens takes.",
    "kvkeep_lookup_seconds_total": "Time that lookups took, with their restores.",
    "kvkeep_restore_seconds": "Time of the lookups that resumed something, with their restores.",
    "kvkeep_restored_bytes_total": "Bytes that were read to rebuild caches.",
    "kvkeep_snapshots_total": "Snapshots by what became of them.",
    "kvkeep_stored_tokens_total": "Tokens whose rows were stored.",
    "kvkeep_stored_bytes_total": "Bytes of rows and state that were written.",
    "kvkeep_evicted_tokens_total": "Tokens that were evicted.",
    "kvkeep_evicted_bytes_total": "Bytes that evictions gave back.",
    "kvkeep_regret_tokens_total": "Tokens that were asked for after their eviction or expiry.",
    "kvkeep_prefill_tokens_per_second": "Rate at which the model was seen to read.",
    "kvkeep_events_lost_total": "Events that could not be written, and are not counted.",
    "kvkeep_quarantined_records": "Damaged records that are not served.",
    "kvkeep_store_bytes": "Bytes that the store keeps.",
    "kvkeep_store_max_bytes": "The store's byte budget.",
    "kvkeep_checkpoints_total": "Resume points that a server took inside prompts.",
    "kvkeep_failures_total": "Failures that a server caught, by what was being done.",
    "kvkeep_memory_sequences": "Live caches in a server's memory.",
    "kvkeep_memory_bytes": "Bytes that they hold.",
    "kvkeep_memory_max_bytes": "The cap of these bytes.",
    "kvkeep_queue_snapshots": "Snapshots that wait to be written.",
    "kvkeep_queue_bytes": "Bytes that they hold in memory.",
}
"""Every metric and what it means."""

HISTOGRAMS = ("kvkeep_restore_seconds",)

Labels = Mapping[str, str]


class Sample(NamedTuple):
    """A value with its labels; ``suffix`` is that of a histogram's part."""

    labels: Labels
    value: float
    suffix: str = ""


@dataclass
class Timings:
    """Counts of times by the bounds of ``BUCKETS``, and their sum in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one time."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds

    def samples(self, labels: Labels) -> Iterator[Sample]:
        """The parts of a histogram."""
        counts = list(accumulate(self.counts))
        for bound, number in zip((*BUCKETS, math.inf), counts, strict=True):
            yield Sample({**labels, "le": _number(bound)}, number, "_bucket")
        yield Sample(labels, self.seconds, "_sum")
        yield Sample(labels, counts[-1], "_count")


def render(families: Mapping[str, Iterable[Sample]]) -> str:
    """The text of the metrics; each must be one of ``NAMES``."""
    return "".join(_family(name, list(samples)) for name, samples in families.items())


def of_store(txn: Transaction, max_bytes: int, only: Filter) -> dict[str, list[Sample]]:
    """What a store counted since it was made, by space, model, reason and tier."""
    known = known_spaces(txn)
    allowed = {
        space: totals
        for space, totals in all_totals(txn).items()
        if only.allows(known.get(space), space.hex())
    }
    speeds = rates(txn)
    out: dict[str, list[Sample]] = {}
    for labels, totals in _groups(allowed, known):
        for name, more, value in _of_totals(totals):
            out.setdefault(name, []).append(Sample({**labels, **more}, value))
        timings = Timings(totals.restore_counts, totals.restore_seconds)
        out.setdefault("kvkeep_restore_seconds", []).extend(timings.samples(labels))
    named = [space for space in _first(allowed) if speeds.get(space)]
    out["kvkeep_prefill_tokens_per_second"] = [
        Sample(_labels(space, known.get(space)), speeds[space]) for space in named
    ]
    out["kvkeep_store_max_bytes"] = [Sample({}, max_bytes)]
    if only.everything:
        out["kvkeep_store_bytes"] = [Sample({}, counter(txn, "used"))]
        out["kvkeep_quarantined_records"] = [Sample({}, txn.count("quarantine"))]
        out["kvkeep_events_lost_total"] = [Sample({}, counter(txn, LOST))]
    return {name: out[name] for name in NAMES if out.get(name)}


def _of_totals(totals: Totals) -> Iterator[tuple[str, Labels, float]]:
    """Counters of one group, with every label value that there may be."""
    yield from _by_reason("kvkeep_lookups_total", totals.reasons)
    yield from _by_reason("kvkeep_lost_tokens_total", totals.lost_tokens)
    for tier in (MEMORY, STORE):
        yield "kvkeep_resumed_tokens_total", {"tier": tier}, totals.tiers[tier]
    outcomes = {
        "stored": totals.snapshots - totals.snapshots_known - totals.snapshots_refused,
        "already_stored": totals.snapshots_known,
        "refused": totals.snapshots_refused,
    }
    for outcome, number in outcomes.items():
        yield "kvkeep_snapshots_total", {"outcome": outcome}, number
    numbers: dict[str, float] = {
        "kvkeep_hits_total": totals.hits,
        "kvkeep_prompt_tokens_total": totals.prompt_tokens,
        "kvkeep_matched_tokens_total": totals.matched_tokens,
        "kvkeep_saved_seconds_total": totals.saved_seconds,
        "kvkeep_lookup_seconds_total": totals.lookup_seconds,
        "kvkeep_restored_bytes_total": totals.restored_bytes,
        "kvkeep_stored_tokens_total": totals.stored_tokens,
        "kvkeep_stored_bytes_total": totals.written_bytes,
        "kvkeep_evicted_tokens_total": totals.evicted_tokens,
        "kvkeep_evicted_bytes_total": totals.evicted_bytes,
        "kvkeep_regret_tokens_total": totals.regret_tokens,
    }
    for name, value in numbers.items():
        yield name, {}, value


def _by_reason(name: str, counts: Mapping[str, int]) -> Iterator[tuple[str, Labels, float]]:
    found = dict.fromkeys(map(str, Reason), 0)
    for reason, number in counts.items():
        stem = reason.partition(":")[0]
        stem = stem if stem in found else OTHER
        found[stem] = found.get(stem, 0) + number
    for reason, number in found.items():
        yield name, {"reason": reason}, number


def _groups(
    totals: Mapping[bytes, Totals], known: Mapping[bytes, Identity]
) -> Iterator[tuple[Labels, Totals]]:
    """Spaces one by one, and those beyond the first ``MOST_SPACES`` as one."""
    named = _first(totals)
    for space in named:
        yield _labels(space, known.get(space)), totals[space]
    rest = [part for space, part in totals.items() if space not in named]
    if rest:
        yield {"space": OTHER, "model": OTHER}, sum_of(rest)


def _first(totals: Mapping[bytes, Totals]) -> Sequence[bytes]:
    """The spaces that were counted first: the same ones for ever, so that no counter falls."""
    return sorted(totals, key=lambda space: (totals[space].first, space))[:MOST_SPACES]


def _labels(space: bytes, identity: Identity | None) -> Labels:
    label = identity.label.rstrip("/").rpartition("/")[2] if identity is not None else ""
    return {"space": space.hex()[:12], "model": label[:LONGEST_LABEL]}


def _family(name: str, samples: Sequence[Sample]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    kind = "histogram" if name in HISTOGRAMS else kind
    lines = [f"# HELP {name} {NAMES[name]}", f"# TYPE {name} {kind}"]
    for labels, value, suffix in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        where = f"{{{inside}}}" if inside else ""
        lines.append(f"{name}{suffix}{where} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(value)
