"""``kvkeep export``: a stored conversation as a prompt-cache file of mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvkeep.cli import options
from kvkeep.cli.lookup import find_conversation, find_space
from kvkeep.cli.output import emit
from kvkeep.cli.reasons import in_words
from kvkeep.cli.units import count
from kvkeep.errors import EXIT_MISS
from kvkeep.prefixstore.sizes import format_size

TOKENS = "kvkeep.tokens"
"""Key of the file's metadata under which the token ids are kept, as JSON."""


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
    from kvkeep.hooks import prompt_file
    from kvkeep.prefixstore.identity import Identity
    from kvkeep.prefixstore.space import Space
    from kvkeep.prefixstore.store import open_store

    if file.suffix != prompt_file.SUFFIX:
        raise click.UsageError(f"The name of FILE must end with {prompt_file.SUFFIX}.")
    if file.exists() and not force:
        raise click.UsageError(f"{file} exists; --force replaces it.")
    with open_store(store, read_only=True) as opened:
        found = find_conversation(opened, conversation)
        info = find_space(opened, found.space)
        tokens = opened.conversation_tokens(found.id)[:at]
        space = Space(opened, Identity(tuple(sorted(info.fields.items())), info.label), ())
        # One token more than is wanted: a resume always leaves the last one to be read.
        hit = space.resume([*tokens, 0])
        if hit.caches is not None:
            metadata = {
                "model": info.label,
                "tokenizer_config": "{}",
                TOKENS: json.dumps(tokens[: hit.offset]),
            }
            prompt_file.save(file, hit.caches, metadata)
    size = file.stat().st_size if hit.caches is not None else 0
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
