"""``kvkeep ls``: what is stored, by space and conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import options
from kvkeep.cli.lookup import find_space
from kvkeep.cli.output import emit
from kvkeep.cli.stores import open_existing
from kvkeep.cli.tables import shortened, table
from kvkeep.cli.units import age, count
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.browse import Conversation, SpaceInfo
    from kvkeep.prefixstore.pins import Pin


@click.command("ls")
@click.argument("space", required=False)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    default=20,
    show_default=True,
    help="Conversations to list, newest first; --json lists all of them.",
)
@options.common
def command(space: str | None, limit: int, store: Path, as_json: bool) -> None:
    """List the spaces of the store and their conversations.

    A space is one model with its tokenizer, adapter, cache scheme and tenant; nothing stored
    in one is ever served in another. A conversation is a stored sequence that no longer one
    continues; own, points and kept are the tokens, resume points and bytes that no other one
    shares. A pin keeps one from being evicted. SPACE, the beginning of a space's id,
    lists that one only.

    \b
    Example:
      kvkeep ls
      kvkeep ls 4f2a --limit 100
    """
    with open_existing(store) as opened:
        spaces = [find_space(opened, space)] if space is not None else opened.spaces()
        shown = {info.id for info in spaces}
        found = [x for x in opened.conversations() if x.space in shown]
        pins = [pin for pin in opened.pins() if pin.space in shown]
        used, budget = opened.used_bytes, opened.max_bytes
    found.sort(key=lambda x: x.last_use, reverse=True)
    data = {
        "used_bytes": used,
        "max_bytes": budget,
        "spaces": [_space(info) for info in spaces],
        "conversations": [_conversation(x) for x in found],
        "pins": [asdict(pin) for pin in pins],
    }
    text = _text(spaces, found, limit, used, budget)
    emit(as_json, data, "\n\n".join([text, _pins(pins)] if pins else [text]))


def _space(info: SpaceInfo) -> dict[str, Any]:
    return {**asdict(info), "kinds": list(info.kinds)}


def _conversation(conversation: Conversation) -> dict[str, Any]:
    return {**asdict(conversation), "kinds": list(conversation.kinds)}


def _text(
    spaces: Sequence[SpaceInfo], found: Sequence[Conversation], limit: int, used: int, budget: int
) -> str:
    lines = [f"Kept {format_size(used)} of {format_size(budget)}"]
    if not spaces:
        return "\n".join([*lines, "Nothing is stored yet; `kvkeep snapshot` stores a prompt."])
    heads: tuple[str, ...] = ("Space", "model", "kinds", "conversations", "kept", "used")
    rows = [
        (
            f"{info.id[:6]}…",
            shortened(info.label, 24),
            shortened(",".join(info.kinds), 20),
            count(info.conversations),
            format_size(info.bytes),
            _ago(info.last_use),
        )
        for info in spaces
    ]
    lines += ["", table(heads, rows, right=("conversations", "kept", "used"))]
    heads = ("Conversation", "space", "tokens", "own", "points", "kept", "used")
    leaves = [
        (
            x.id,
            f"{x.space[:6]}…",
            count(x.tokens),
            count(x.own_tokens),
            count(x.points),
            format_size(x.bytes),
            _ago(x.last_use),
        )
        for x in found[:limit]
    ]
    if leaves:
        lines += ["", table(heads, leaves, right=heads[2:])]
    if len(found) > limit:
        lines.append(f"… and {count(len(found) - limit)} more")
    return "\n".join(lines)


def _pins(pins: Sequence[Pin]) -> str:
    heads = ("Pin", "space", "tokens", "kept", "for")
    rows = [
        (
            pin.id,
            f"{pin.space[:6]}…",
            count(pin.tokens),
            format_size(pin.bytes),
            age(pin.until - time.time()) if pin.until is not None else "good",
        )
        for pin in pins
    ]
    return table(heads, rows, right=heads[2:])


def _ago(when: float) -> str:
    return f"{age(max(0.0, time.time() - when))} ago" if when else "never"
