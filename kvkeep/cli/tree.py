"""``kvkeep tree``: the stored prefixes as a tree, with sizes, sharing and resume points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import options, style
from kvkeep.cli.lookup import find_space
from kvkeep.cli.models import Choice
from kvkeep.cli.output import emit
from kvkeep.cli.parting import Decode, reader, shown_text
from kvkeep.cli.stores import open_existing
from kvkeep.cli.tables import shortened
from kvkeep.cli.units import count, counted
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.browse import SpaceInfo
    from kvkeep.prefixstore.tree import Branch

WIDTH = 80
DEEPEST = 12
"""Levels that are indented; what is deeper stays below the last."""

POINTS = 3
"""Resume points that are listed of one edge: the last ones."""


@click.command("tree")
@click.argument("space", required=False)
@options.optional_model
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    default=40,
    show_default=True,
    help="Lines to show of each space; --json has all.",
)
@options.common
def command(
    space: str | None,
    choice: Choice | None,
    salt: str | None,
    limit: int,
    store: Path,
    as_json: bool,
) -> None:
    """Show the stored prefixes as a tree.

    Every line is a run of tokens that prompts share: its positions, the bytes of its rows and
    states, how many conversations go through it, and the offsets at which it can be resumed.
    The heaviest branches come first. SPACE, the beginning of a space's id, shows that one;
    --model shows that of a model, with the beginning of each text. With --salt alone, only
    that tenant's spaces are shown.

    \b
    Example:
      kvkeep tree
      kvkeep tree 4f2a --limit 200
      kvkeep tree --model MODEL
    """
    from kvkeep.prefixstore.identity import salt_digest

    if choice is not None and space is not None:
        raise click.UsageError("Choose one of SPACE and --model.")
    with open_existing(store) as opened:
        decode: Decode | None = None
        if choice is not None:
            loaded = choice.load(weights=False)
            decode = reader(loaded.tokenizer)
            mine = choice.space(opened, loaded).id.hex()
            spaces = [info for info in opened.spaces() if info.id == mine]
        else:
            spaces = [find_space(opened, space)] if space is not None else opened.spaces()
            if salt is not None:
                tenant = salt_digest(salt)
                spaces = [info for info in spaces if info.fields.get("salt", "") == tenant]
        first = TEXT_TOKENS if decode is not None else 0
        found = [(info, opened.tree(info.id, first)) for info in spaces]
    data = {"spaces": [_data(info, branches, decode) for info, branches in found]}
    parts = [_text(info, branches, decode, limit) for info, branches in found]
    emit(
        as_json, data, "\n\n".join(parts) or "Nothing is stored; `kvkeep snapshot` stores a prompt."
    )


TEXT_TOKENS = 10


def _data(info: SpaceInfo, branches: Sequence[Branch], decode: Decode | None) -> dict[str, Any]:
    return {
        "space": info.id,
        "label": info.label,
        "kinds": list(info.kinds),
        "conversations": info.conversations,
        "kept_bytes": info.bytes,
        "nodes": [
            {
                "id": f"{branch.id:x}",
                "parent": f"{branch.parent:x}" if branch.parent else None,
                "start": branch.start,
                "stop": branch.stop,
                "bytes": branch.bytes,
                "bytes_below": branch.below,
                "conversations": branch.conversations,
                "resume_points": [{"offset": o, "origin": origin} for o, origin in branch.points],
                "last_use": branch.last_use,
                "text": decode(branch.first) if decode is not None else None,
            }
            for branch in branches
        ],
    }


def _text(info: SpaceInfo, branches: Sequence[Branch], decode: Decode | None, limit: int) -> str:
    head = (
        f"{info.id[:6]}… {shortened(info.label)}  {','.join(info.kinds)}  "
        f"{counted(info.conversations, 'conversation')}  {format_size(info.bytes)}"
    )
    lines = [style.bold(_fit(head))]
    drawn = _drawing(branches)
    for branch, lead in list(zip(branches, drawn, strict=True))[:limit]:
        lines.append(_fit(lead + _line(branch, decode)))
    if len(branches) > limit:
        lines.append(f"… and {count(len(branches) - limit)} more; --limit shows them")
    return "\n".join(lines)


def _line(branch: Branch, decode: Decode | None) -> str:
    said = f"{count(branch.start)}–{count(branch.stop)}  {format_size(branch.bytes)}"
    if branch.conversations > 1:
        said += f"  shared by {count(branch.conversations)}"
    if branch.points:
        more = "…, " if len(branch.points) > POINTS else ""
        said += "  points " + more + ", ".join(count(o) for o, _ in branch.points[-POINTS:])
    return said + (f"  {shown_text(decode(branch.first))}" if decode is not None else "")


def _drawing(branches: Sequence[Branch]) -> list[str]:
    """The lines that lead to each branch: an only child stands right below its parent."""
    below: dict[int, list[int]] = {}
    for branch in branches:
        below.setdefault(branch.parent, []).append(branch.id)
    stems: dict[int, str] = {}
    leads = []
    for branch in branches:
        siblings = below[branch.parent]
        stem = stems.get(branch.parent, "")
        if len(siblings) == 1 or len(stem) >= 3 * DEEPEST:
            leads.append(stem + ("└─ " if branch.depth == 0 else "   "))
            stems[branch.id] = stem + ("   " if branch.depth == 0 else "")
            continue
        last = siblings[-1] == branch.id
        leads.append(stem + ("└─ " if last else "├─ "))
        stems[branch.id] = stem + ("   " if last else "│  ")
    return leads


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
