"""``kvkeep verify``: read and recount every record."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli import options
from kvkeep.cli.output import emit
from kvkeep.cli.progress import progress
from kvkeep.cli.stores import open_existing
from kvkeep.cli.units import count, counted
from kvkeep.errors import Damaged
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.recount import Audit

SHOWN = 20


@click.command("verify")
@click.option("--repair", is_flag=True, help="Remove what cannot be used, after asking.")
@click.option("--yes", is_flag=True, help="Repair without asking.")
@options.common
@click.pass_context
def command(ctx: click.Context, repair: bool, yes: bool, store: Path, as_json: bool) -> None:
    """Read every record of the store and check it.

    Changes nothing without --repair. Damaged records are never served; a repair removes them
    and recounts. Records of a newer kvkeep stay. Exits with 4 when damage was found.

    \b
    Example:
      kvkeep verify
      kvkeep verify --repair
    """
    with open_existing(store, read_only=not repair) as opened:
        with progress("Verifying", lambda rate: f"{format_size(rate)}/s") as bar:
            audit = opened.verify(bar)
        wanted = repair and bool(audit.problems)
        if wanted and not yes:
            wanted = click.confirm(f"{_summary(audit)}\nRemove what cannot be used?", err=True)
        if wanted:
            opened.repair()
    data = {
        "nodes": audit.nodes,
        "chunks": audit.chunks,
        "resume_points": audit.points,
        "bytes": audit.bytes,
        "damaged": audit.damaged,
        "repaired": wanted,
        "problems": [asdict(problem) for problem in audit.problems],
    }
    emit(as_json, data, _text(audit, wanted))
    if audit.damaged:
        ctx.exit(Damaged.exit_code)


def _summary(audit: Audit) -> str:
    if not audit.problems:
        return "No problem found."
    kinds = Counter(problem.what for problem in audit.problems)
    return "; ".join(f"{what}: {count(n)}" for what, n in kinds.most_common())


def _text(audit: Audit, repaired: bool) -> str:
    lines = [
        f"{counted(audit.nodes, 'node')}, {counted(audit.chunks, 'chunk')}, "
        f"{counted(audit.points, 'resume point')}, {format_size(audit.bytes)}"
    ]
    lines += [f"{p.what}: {p.where}: {p.detail}" for p in audit.problems[:SHOWN]]
    if len(audit.problems) > SHOWN:
        lines.append(f"… and {count(len(audit.problems) - SHOWN)} more; --json lists all")
    lines.append(_summary(audit))
    if repaired:
        lines.append("Removed; what is left can be used.")
    elif audit.problems:
        lines.append("Reads stop before it; `kvkeep verify --repair` removes it.")
        if any(p.what == "damaged" and p.where.startswith("node ") for p in audit.problems):
            lines.append("Until then nothing is stored behind a damaged node.")
    return "\n".join(lines)
