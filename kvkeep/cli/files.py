"""Writing caches to a prompt-cache file of mlx-lm, for the commands that do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

TOKENS = "kvkeep.tokens"
"""Key of the file's metadata under which the token ids are kept, as JSON."""


def check_target(file: Path, *, force: bool) -> None:
    """Refuse a name that mlx-lm would not read, or a file that is there, as a usage error."""
    from kvkeep.hooks import prompt_file

    if file.suffix != prompt_file.SUFFIX:
        raise click.UsageError(f"The name of FILE must end with {prompt_file.SUFFIX}.")
    if file.exists() and not force:
        raise click.UsageError(f"{file} exists; --force replaces it.")


def write(file: Path, caches: Sequence[Any], tokens: Sequence[int], model: str) -> int:
    """Write ``caches``, which cover ``tokens``, to ``file``; its bytes."""
    from kvkeep.hooks import prompt_file

    metadata = {"model": model, "tokenizer_config": "{}", TOKENS: json.dumps(list(tokens))}
    return prompt_file.save(file, caches, metadata).stat().st_size
