"""``kvkeep inspect``: one conversation in detail."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import options
from kvkeep.cli.lookup import find_conversation
from kvkeep.cli.output import emit
from kvkeep.cli.stores import open_existing
from kvkeep.cli.tables import table
from kvkeep.cli.units import count, counted
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.browse import Conversation, PathInfo


@click.command("inspect")
@click.argument("conversation")
@click.option("--tokens", "with_tokens", is_flag=True, help="Show the token ids as well.")
@options.common
def command(conversation: str, with_tokens: bool, store: Path, as_json: bool) -> None:
    """Show what is stored of one conversation.

    For every kind of layer: which positions have rows, and at which offsets it can be
    resumed. CONVERSATION is an id that `kvkeep ls` shows.

    \b
    Example:
      kvkeep inspect 1c
      kvkeep inspect 1c --tokens --json
    """
    with open_existing(store) as opened:
        found = find_conversation(opened, conversation)
        tokens = opened.conversation_tokens(found.id)
        path = opened.inspect(found.space, tokens)
    data = {"conversation": found.id, "space": found.space, **_data(path)}
    text = _text(found, path)
    if with_tokens:
        data["token_ids"] = tokens
        text += "\n\n" + " ".join(map(str, tokens))
    emit(as_json, data, text)


def _data(path: PathInfo) -> dict[str, Any]:
    return {
        "tokens": path.tokens,
        "nodes": path.nodes,
        "rows": [
            {**asdict(rows), "kinds": list(rows.kinds), "covered": [list(r) for r in rows.covered]}
            for rows in path.rows
        ],
        "resume_points": [
            {**asdict(p), "kinds": list(p.kinds), "boundaries": list(p.boundaries)}
            for p in path.points
        ],
    }


def _text(found: Conversation, path: PathInfo) -> str:
    lines = [
        f"Conversation {found.id} of space {found.space[:6]}…: {counted(path.tokens, 'token')} in "
        f"{counted(path.nodes, 'node')}"
    ]
    if path.rows:
        rows = [
            (
                ",".join(x.kinds),
                count(x.layers),
                ", ".join(f"{count(a)}-{count(b)}" for a, b in x.covered),
                count(x.chunks),
                format_size(x.bytes_per_token),
            )
            for x in path.rows
        ]
        heads = ("Rows", "layers", "positions", "chunks", "a token")
        lines += ["", table(heads, rows, right=("layers", "chunks", "a token"))]
    points = [
        (
            count(p.offset),
            p.origin,
            count(p.floor),
            ", ".join(map(count, p.boundaries)) or "–",
            format_size(p.state_bytes),
        )
        for p in path.points
    ]
    if points:
        heads = ("Resume point", "origin", "floor", "precision boundary", "state")
        lines += ["", table(heads, points, right=("Resume point", "floor", "state"))]
    return "\n".join(lines)
