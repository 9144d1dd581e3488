"""``kvkeep import``: store a prompt cache that mlx-lm wrote to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvkeep.cli import options
from kvkeep.cli.files import TOKENS
from kvkeep.cli.models import Choice
from kvkeep.cli.output import emit
from kvkeep.cli.prompts import Source
from kvkeep.cli.snapshot import NotStored
from kvkeep.cli.units import count
from kvkeep.errors import FileRefused, OffsetMismatch
from kvkeep.prefixstore.sizes import format_size


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@options.model
@options.optional_prompt
@options.budget
@options.common
def command(
    file: Path,
    choice: Choice,
    source: Source | None,
    max_bytes: int | None,
    store: Path,
    as_json: bool,
) -> None:
    """Store a prompt cache that mlx-lm wrote to FILE.

    Such a file does not say which tokens it holds: name the prompt that it was made from, as
    for `mlx_lm.cache_prompt`. A file that `kvkeep export` wrote needs none. The beginning is
    read again to see that model and prompt are those of the file.

    \b
    Example:
      mlx_lm.cache_prompt --model MODEL --prompt-cache-file c.safetensors \\
        --prompt - <context.md
      kvkeep import c.safetensors --model MODEL --prompt-file context.md
    """
    from kvkeep.hooks import prompt_file
    from kvkeep.hooks.begins_like import begins_like
    from kvkeep.prefixstore.recipe import read_caches
    from kvkeep.prefixstore.store import open_store

    with open_store(store, max_bytes) as opened:
        caches, metadata = prompt_file.load(file)
        loaded = choice.load()
        tokens = _tokens(metadata, source, loaded.tokenizer, file)
        offset = read_caches(caches, len(tokens)).offset
        if offset != len(tokens):
            raise OffsetMismatch(
                f"{file} covers {count(offset)} tokens; the prompt has {count(len(tokens))}",
                remedy="Name the very prompt that the file was made from.",
            )
        if not begins_like(loaded.model, tokens, caches):
            raise FileRefused(
                f"{file} was not made by {choice.model} from this prompt",
                remedy="Name the model and the prompt that it was made from.",
            )
        space = choice.space(opened, loaded)
        receipt = space.snapshot(tokens, caches, origin="import", prefilled=0)
        if not receipt.stored:
            raise NotStored(f"{file} was read but not stored: {receipt.reason}")
    data: dict[str, Any] = {
        "space": space.id.hex(),
        "offset": offset,
        "new_tokens": receipt.tokens_new,
        "known_tokens": receipt.tokens_known,
        "bytes_written": receipt.bytes_written,
        "reason": receipt.reason,
    }
    text = (
        f"Stored {count(offset)} tokens ({count(receipt.tokens_new)} new, "
        f"{count(receipt.tokens_known)} already there)  "
        f"{format_size(receipt.bytes_written)} written"
    )
    emit(as_json, data, text)


def _tokens(
    metadata: dict[str, str], source: Source | None, tokenizer: Any, file: Path
) -> list[int]:
    if source is not None:
        return source.tokens(tokenizer, continued=True)
    try:
        ids = json.loads(metadata[TOKENS])
    except KeyError as error:
        raise FileRefused(
            f"{file} does not say which tokens it holds",
            remedy="Name the prompt that it was made from: --prompt-file, --chat …",
        ) from error
    except ValueError as error:
        raise FileRefused(f"The tokens in {file} cannot be read: {error}") from error
    if not isinstance(ids, list) or not all(type(x) is int for x in ids):
        raise FileRefused(f"The tokens in {file} are no list of integers")
    return ids
