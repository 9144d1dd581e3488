"""``kvkeep export``: a stored conversation as a prompt-cache file of mlx-lm."""

from __future__ import annotations

from pathlib import Path

import click

from kvkeep.cli import files, options
from kvkeep.cli.lookup import find_conversation, find_space
from kvkeep.cli.output import emit
from kvkeep.cli.reasons import in_words
from kvkeep.cli.stores import open_existing
from kvkeep.cli.units import count
from kvkeep.errors import EXIT_MISS
from kvkeep.prefixstore.sizes import format_size


@click.command("export")
@click.argument("conversation")
@click.argument("file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@click.option("--at", type=click.IntRange(min=1), metavar="N", help="Only the first N tokens.")
@click.option("--force", is_flag=True, help="Replace FILE where it exists.")
@options.common
@click.pass_context
def command(
    ctx: click.Context,
    conversation: str,
    file: Path,
    at: int | None,
    force: bool,
    store: Path,
    as_json: bool,
) -> None:
    """Write a stored conversation to FILE, for mlx-lm.

    `mlx_lm.generate --prompt-cache-file` and `mlx_lm.load_prompt_cache` read it, and
    `kvkeep import` puts it into another store. CONVERSATION is an id that `kvkeep ls` shows.
    Exits with 3 where no resume point lies in reach.

    \b
    Example:
      kvkeep export 1c context.safetensors
      kvkeep export 1c context.safetensors --at 4096
    """
    files.check_target(file, force=force)
    with open_existing(store) as opened:
        found = find_conversation(opened, conversation)
        info = find_space(opened, found.space)
        tokens = opened.conversation_tokens(found.id)[:at]
        space = opened.stored_space(info.id)
        # One token more than is wanted: a resume always leaves the last one to be read.
        hit = space.resume([*tokens, 0])
        size = 0
        if hit.caches is not None:
            size = files.write(file, hit.caches, tokens[: hit.offset], info.label)
    data = {
        "conversation": found.id,
        "space": info.id,
        "tokens": len(tokens),
        "offset": hit.offset,
        "bytes_written": size,
    }
    text = f"Wrote {count(hit.offset)} of {count(len(tokens))} tokens to {file}  " + format_size(
        size
    )
    if hit.caches is None:
        text = "\n".join(["Nothing to resume there", *in_words(hit.decision)])
    emit(as_json, data, text)
    if hit.caches is None:
        ctx.exit(EXIT_MISS)
