"""``kvkeep unpin``: let a pinned conversation go like any other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from kvkeep.cli import options
from kvkeep.cli.lookup import find_pin
from kvkeep.cli.output import emit
from kvkeep.cli.stores import open_existing
from kvkeep.cli.units import count


@click.command("unpin")
@click.argument("pin")
@options.common
def command(pin: str, store: Path, as_json: bool) -> None:
    """Take a pin out. What it held stays until room is needed.

    PIN is an id that `kvkeep ls` shows under the pins.

    \b
    Example:
      kvkeep unpin 1c
    """
    with open_existing(store, read_only=False) as opened:
        found = find_pin(opened, pin)
        opened.unpin(found.id)
    emit(as_json, asdict(found), f"Unpinned {count(found.tokens)} tokens")
