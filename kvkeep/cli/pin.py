"""``kvkeep pin``: keep a conversation from being evicted."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from kvkeep.cli import options, units
from kvkeep.cli.lookup import find_conversation
from kvkeep.cli.output import emit
from kvkeep.cli.stores import open_existing
from kvkeep.cli.units import count
from kvkeep.prefixstore.sizes import format_size


@click.command("pin")
@click.argument("conversation")
@click.option(
    "--for",
    "seconds",
    callback=options.parsed(units.parse_duration),
    metavar="TIME",
    help="For so long, such as 7d, unless there is no other way to make room. For good without it.",
)
@options.common
def command(conversation: str, seconds: float | None, store: Path, as_json: bool) -> None:
    """Keep a conversation from being evicted, and from expiring.

    CONVERSATION is an id that `kvkeep ls` shows. What it shares with others is kept with it.
    Pins without a time may hold three quarters of the budget; `kvkeep evict --pinned` drops
    them nevertheless.

    \b
    Example:
      kvkeep pin 1c
      kvkeep pin 1c --for 7d
    """
    with open_existing(store, read_only=False) as opened:
        found = find_conversation(opened, conversation)
        pin = opened.pin(found.id, seconds)
    until = f" for {units.duration(pin.until - time.time())}" if pin.until is not None else ""
    text = f"Pinned {count(pin.tokens)} tokens{until}, {format_size(pin.bytes)}"
    emit(as_json, asdict(pin), text)
