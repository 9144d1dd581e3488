"""``kvkeep report``: what the lookups saved, and what they lost and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import options, units
from kvkeep.cli.output import emit
from kvkeep.cli.tables import shortened, table
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.browse import SpaceInfo
    from kvkeep.prefixstore.report import Report
    from kvkeep.prefixstore.totals import Totals


@click.command("report")
@click.option(
    "--since",
    callback=options.parsed(units.parse_duration),
    metavar="TIME",
    help="Only the last 24h, 7d …; all that is remembered without it.",
)
@options.common
def command(since: float | None, store: Path, as_json: bool) -> None:
    """Show what the store saved, and where it could not.

    Every number is a sum over the same lookups. Tokens that were not resumed are counted
    under the reason of their lookup.

    \b
    Example:
      kvkeep report
      kvkeep report --since 24h --json
    """
    from kvkeep.prefixstore.store import open_store

    with open_store(store, read_only=True) as opened:
        report = opened.report(0.0 if since is None else time.time() - since)
        spaces = opened.spaces()
    emit(as_json, _data(report, spaces), _text(report, spaces))


def _totals(totals: Totals) -> dict[str, Any]:
    return {
        "lookups": totals.lookups,
        "hits": totals.hits,
        "hit_rate": totals.hit_rate,
        "prompt_tokens": totals.prompt_tokens,
        "matched_tokens": totals.matched_tokens,
        "resumed_tokens": totals.resumed_tokens,
        "reasons": dict(totals.reasons),
        "lost_tokens": {reason: n for reason, n in totals.lost_tokens.items() if n},
        "restored_bytes": totals.restored_bytes,
        "restore_seconds": totals.restore_seconds,
        "snapshots": totals.snapshots,
        "snapshots_refused": totals.snapshots_refused,
        "stored_tokens": totals.stored_tokens,
        "known_tokens": totals.known_tokens,
        "written_bytes": totals.written_bytes,
    }


def _data(report: Report, spaces: list[SpaceInfo]) -> dict[str, Any]:
    return {
        "since": report.since,
        "used_bytes": report.used_bytes,
        "max_bytes": report.max_bytes,
        "quarantined": report.quarantined,
        **_totals(report.total),
        "spaces": [
            {
                "space": info.id,
                "label": info.label,
                "kinds": list(info.kinds),
                "kept_bytes": info.bytes,
                **(_totals(report.by_space[info.id]) if info.id in report.by_space else {}),
            }
            for info in spaces
        ],
    }


def _text(report: Report, spaces: list[SpaceInfo]) -> str:
    total = report.total
    kept = f"{format_size(report.used_bytes)} of {format_size(report.max_bytes)}"
    lines = [
        f"Lookups {units.magnitude(total.lookups)}    "
        f"Prompt tokens {units.magnitude(total.prompt_tokens)}    "
        f"Resumed {units.magnitude(total.resumed_tokens)}  "
        f"{units.share(total.resumed_tokens, total.prompt_tokens)}",
        f"Snapshots {units.magnitude(total.snapshots)}    "
        f"Written {format_size(total.written_bytes)}    Kept {kept}",
    ]
    if total.snapshots_refused:
        lines.append(f"Not stored: {units.magnitude(total.snapshots_refused)} snapshots")
    if report.quarantined:
        lines.append(f"Damaged records: {report.quarantined}; see `kvkeep verify`")
    lost = [(reason, n) for reason, n in total.lost_tokens.most_common() if n]
    if lost:
        rows = [(reason, units.magnitude(n), MEANING.get(_stem(reason), "")) for reason, n in lost]
        lines += ["", table(("Not resumed", "tokens", "because"), rows, right=("tokens",))]
    if spaces:
        lines += ["", _spaces(report, spaces)]
    return "\n".join(lines)


def _stem(reason: str) -> str:
    return reason.partition(":")[0]


def _spaces(report: Report, spaces: list[SpaceInfo]) -> str:
    rows = []
    for info in spaces:
        totals = report.by_space.get(info.id)
        rows.append(
            (
                f"{info.id[:6]}…",
                shortened(info.label),
                ",".join(info.kinds),
                format_size(info.bytes),
                units.share(totals.resumed_tokens, totals.prompt_tokens) if totals else "–",
                format_size(totals.written_bytes if totals else 0),
            )
        )
    heads = ("Space", "model", "kinds", "kept", "hit", "written")
    return table(heads, rows, right=("kept", "hit", "written"))


MEANING = {
    "full": "the prompts part there; all that was shared was resumed",
    "last_token": "the model must read at least one token",
    "chunk_aligned": "exact mode resumes at multiples of the prefill step",
    "inside_media": "never inside the placeholders of one image",
    "no_prefix": "nothing stored begins like it",
    "no_state_at_offset": "layers that resume only at a resume point",
    "rows_missing": "rows were evicted, or never stored",
    "below_floor": "the cache changed precision later than that",
    "below_minimum": "too short to be worth a restore",
    "space_changed": "stored for another model, tokenizer, adapter …",
    "corrupt": "damaged records",
    "newer_format": "stored by a newer kvkeep",
    "store_failed": "the store could not be read",
}
