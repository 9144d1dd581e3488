"""A report for programs: JSON and CSV, from the same totals as the text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvkeep.cli.advice import advice

if TYPE_CHECKING:
    from kvkeep.prefixstore.event import Event
    from kvkeep.prefixstore.report import Report, SpaceFacts
    from kvkeep.prefixstore.totals import Totals

NUMBERS = (
    "lookups",
    "hits",
    "request_hit_rate",
    "prompt_tokens",
    "matched_tokens",
    "resumed_tokens",
    "hit_rate",
    "rated_tokens",
    "saved_seconds",
    "lost_seconds",
    "lookup_seconds",
    "restores",
    "restored_bytes",
    "restore_seconds",
    "snapshots",
    "snapshots_known",
    "snapshots_refused",
    "stored_tokens",
    "known_tokens",
    "written_bytes",
    "evictions",
    "evicted_nodes",
    "evicted_tokens",
    "evicted_bytes",
    "regrets",
    "regret_tokens",
)
"""The numbers of every group, in the order of the columns of the CSV."""


def as_json(report: Report) -> dict[str, Any]:
    """The whole report."""
    return {
        "since": report.since,
        "until": report.until,
        "used_bytes": report.used_bytes,
        "max_bytes": report.max_bytes,
        "needed_bytes": report.needed_bytes,
        "quarantined": report.quarantined,
        **numbers(report.total),
        **_counters(report.total),
        "spaces": [_space(report, facts) for facts in report.spaces.values()],
        "models": [{"model": name, "totals": numbers(t)} for name, t in report.by_model.items()],
        "kinds": [
            {"kinds": name.split(","), "totals": numbers(t)} for name, t in report.by_kind.items()
        ],
        "by_reason": [
            {"reason": reason, "advice": advice(report, reason), "totals": numbers(t)}
            for reason, t in report.by_reason.items()
        ],
        "hours": [{"start": start, "totals": numbers(t)} for start, t in report.by_hour.items()],
        "worst": [event_json(event) for event in report.worst],
        "gaps": asdict(report.gaps),
    }


def as_csv(report: Report) -> str:
    """Totals by group, one line each, for a spreadsheet."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("group", "key", "label", *NUMBERS))
    writer.writerow(("total", "", "", *numbers(report.total).values()))
    for group, rows in groups(report).items():
        for key, label, totals in rows:
            writer.writerow((group, key, label, *numbers(totals).values()))
    return out.getvalue()


def groups(report: Report) -> dict[str, Iterable[tuple[str, str, Totals]]]:
    """Every way to split the total: key, label and totals of each part."""
    labels = report.labels
    return {
        "space": [(key, labels.get(key, ""), t) for key, t in report.by_space.items()],
        "model": [(key, "", t) for key, t in report.by_model.items()],
        "kind": [(key, "", t) for key, t in report.by_kind.items()],
        "reason": [(key, "", t) for key, t in report.by_reason.items()],
        "hour": [(str(key), "", t) for key, t in report.by_hour.items()],
    }


def numbers(totals: Totals) -> dict[str, Any]:
    """The numbers of a group by name."""
    return {name: getattr(totals, name) for name in NUMBERS}


def event_json(event: Event) -> dict[str, Any]:
    """One lookup."""
    return {
        "request": event.request,
        "time": event.time,
        "space": event.space.hex(),
        "prompt_tokens": event.prompt,
        "matched_tokens": event.matched,
        "resumed_tokens": event.resumed,
        "lost_tokens": event.lost,
        "reason": event.reason,
        "limiting_kinds": event.kinds,
        "limiting_layers": event.layers,
        "limit": event.limit,
        "rule": event.rule,
        "origin": event.origin,
        "tier": event.tier,
        "bytes": event.nbytes,
        "seconds": event.seconds,
        "restore_seconds": event.rebuild,
        "saved_seconds": event.saved,
    }


def _counters(totals: Totals) -> dict[str, Any]:
    return {
        "reasons": dict(totals.reasons),
        "lost_tokens": {reason: n for reason, n in totals.lost_tokens.items() if n},
        "limited_by": {kinds or "none": n for kinds, n in totals.limited_by.items() if n},
        "refusals": dict(totals.refusals),
        "tiers": dict(totals.tiers),
    }


def _space(report: Report, facts: SpaceFacts) -> dict[str, Any]:
    from kvkeep.prefixstore.totals import Totals

    totals = report.by_space.get(facts.id, Totals())
    return {
        "space": facts.id,
        "label": facts.label,
        "kinds": list(facts.kinds),
        "kept_bytes": facts.kept_bytes,
        "needed_bytes": facts.needed_bytes,
        "prefill_rate": facts.rate,
        **numbers(totals),
        **_counters(totals),
    }
