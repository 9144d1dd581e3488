"""``kvkeep evict``: give disk space back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from kvkeep.cli import options, units
from kvkeep.cli.lookup import find_space
from kvkeep.cli.output import emit
from kvkeep.cli.stores import open_existing
from kvkeep.cli.units import counted
from kvkeep.prefixstore.sizes import format_size, parse_size


@click.command("evict")
@click.option("--to", metavar="SIZE", help="Until no more than this is kept, such as 20GB; or 0.")
@click.option(
    "--older-than",
    callback=options.parsed(units.parse_duration),
    metavar="TIME",
    help="What was not used for this long, such as 7d.",
)
@click.option("--space", metavar="ID", help="Only of this space; the beginning of its id.")
@click.option("--pinned", is_flag=True, help="Also what is pinned.")
@click.option(
    "--policy",
    type=click.Choice(options.POLICIES),
    help="Order in which things go, from now on, also when the store is full.",
)
@options.common
def command(
    to: str | None,
    older_than: float | None,
    space: str | None,
    pinned: bool,
    policy: str | None,
    store: Path,
    as_json: bool,
) -> None:
    """Drop what was used least recently.

    Conversations go from their ends, so that what several share stays longest. The conditions
    add up; --space alone drops the whole space. The file keeps its size and is filled again.

    \b
    Example:
      kvkeep evict --to 20GB
      kvkeep evict --older-than 7d --space 4f2a
      kvkeep evict --policy probation
    """
    if to is None and older_than is None and space is None and policy is None:
        raise click.UsageError("Say what goes: --to, --older-than or --space.")
    with open_existing(store, read_only=False, eviction=policy) as opened:
        only = find_space(opened, space).id if space is not None else None
        gone = opened.evict(to=to, older_than=older_than, space=only, pinned=pinned)
        used, in_force = opened.used_bytes, opened.eviction
    text = (
        f"Dropped {format_size(gone.bytes)}: {counted(gone.tokens, 'token')} in "
        f"{counted(gone.nodes, 'node')}; {format_size(used)} kept"
    )
    if policy is not None:
        text += f"\nFrom now on {in_force} says what goes first"
    if to is not None and not (pinned or space or older_than) and used > _bytes(to):
        text += "\nWhat is left is pinned; --pinned drops it as well"
    emit(as_json, {**asdict(gone), "used_bytes": used, "policy": in_force}, text)


def _bytes(size: str) -> int:
    """A size, or 0 for nothing."""
    return 0 if size == "0" else parse_size(size)
