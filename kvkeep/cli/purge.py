"""``kvkeep purge``: remove what was stored, so that nothing tells of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import options
from kvkeep.cli.lookup import find_conversation, find_space
from kvkeep.cli.output import emit
from kvkeep.cli.stores import open_existing
from kvkeep.cli.units import counted
from kvkeep.errors import StoreUnusable
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.purge import Purged
    from kvkeep.prefixstore.store import Store


@click.command("purge")
@click.option("--space", metavar="ID", help="This space; the beginning of its id.")
@click.option("--salt", help="All spaces of the tenant with this salt.")
@click.option("--conversation", metavar="ID", help="What only this conversation holds.")
@click.option("--compact", is_flag=True, help="Rewrite the file as well, so that it gets smaller.")
@click.option("--yes", is_flag=True, help="Purge without asking.")
@options.common
def command(
    space: str | None,
    salt: str | None,
    conversation: str | None,
    compact: bool,
    yes: bool,
    store: Path,
    as_json: bool,
) -> None:
    """Remove a space, a tenant or a conversation for good.

    Asks first. Rows, states, tokens, events and totals go, and their bytes in the data file
    are overwritten.
    Backups, swap, flash memory and file systems that copy on write may keep older bytes.
    --compact needs the store to be open nowhere else.

    \b
    Example:
      kvkeep purge --salt alice
      kvkeep purge --conversation 1f --yes --compact
    """
    from kvkeep.persistence.compact import compact as rewrite

    if [space, salt, conversation].count(None) != 2:
        raise click.UsageError("Say what goes: one of --space, --salt and --conversation.")
    with open_existing(store, read_only=False) as opened:
        what, named = _named(opened, space, salt, conversation)
        if not yes:
            click.confirm(f"Remove {what} for good?", abort=True, err=True)
        gone = opened.purge(**named)
    sizes, kept = None, None
    if compact:
        try:
            sizes = rewrite(store, wipe=True)
        except StoreUnusable as error:  # what was named is gone nevertheless, and that is said
            kept = StoreUnusable(
                f"The file was not rewritten: {error.problem}", remedy=error.remedy
            )
    data: dict[str, Any] = {**asdict(gone), "compacted": None}
    if sizes is not None:
        data["compacted"] = {"before": sizes[0], "after": sizes[1]}
    emit(as_json, data, _text(gone, sizes))
    if kept is not None:
        raise kept


def _named(
    opened: Store, space: str | None, salt: str | None, conversation: str | None
) -> tuple[str, dict[str, str]]:
    """What goes, in words, and by its whole id."""
    if space is not None:
        info = find_space(opened, space)
        return f"space {info.id} ({info.label or 'no name'})", {"space": info.id}
    if conversation is not None:
        found = find_conversation(opened, conversation)
        return f"conversation {found.id}", {"conversation": found.id}
    return "all spaces of this salt", {"salt": salt or ""}


def _text(gone: Purged, sizes: tuple[int, int] | None) -> str:
    text = (
        f"Removed {format_size(gone.bytes)}: {counted(gone.tokens, 'token')} in "
        f"{counted(gone.nodes, 'node')} of {counted(gone.spaces, 'space')}, "
        f"{counted(gone.events, 'event')}; "
        f"{format_size(gone.wiped)} of the file overwritten"
    )
    if sizes is not None:
        text += f"\nThe file has {format_size(sizes[1])} instead of {format_size(sizes[0])}."
    return text
