"""Options that several commands share, each group as one decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from kvkeep.cli.failures import State
from kvkeep.cli.models import Choice
from kvkeep.cli.prompts import Source
from kvkeep.prefixstore.sizes import parse_size

POLICIES = ("lru", "probation", "size")
"""Eviction policies by name."""

DURABILITIES = ("safe", "process")
"""What stored bytes outlive, by name."""


def parsed(parse: Callable[[str], Any]) -> Callable[..., Any]:
    """A click callback that reads a value with ``parse`` and shows its ``ValueError``."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def default_store() -> Path:
    """The user's cache folder, as this system names it."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("kvkeep", appauthor=False))


def _debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().ensure_object(State).debug = True


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--store``, ``--json`` and ``--debug``: every command has them.

    Passes ``store: Path`` and ``as_json: bool``.
    """
    return placed(bare(function))


def placed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--store`` alone. Passes ``store: Path``."""
    return _with(
        function,
        click.option(
            "--store",
            type=click.Path(path_type=Path, file_okay=False),
            envvar="KVKEEP_STORE",
            default=default_store,
            show_default="the user's cache folder",
            show_envvar=True,
            metavar="DIR",
            help="Folder of the store.",
        ),
    )


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--json`` and ``--debug`` alone, for commands without a store. Passes ``as_json: bool``."""
    return _with(
        traced(function),
        click.option(
            "--json", "as_json", is_flag=True, help="Print one JSON object, for programs."
        ),
    )


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--debug`` alone."""
    return _with(
        function,
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            callback=_debug,
            help="Show the traceback of an error.",
        ),
    )


def budget(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--max-bytes``, for commands that write. Passes ``max_bytes: int | None``."""
    return _with(
        function,
        click.option(
            "--max-bytes",
            callback=parsed(parse_size),
            envvar="KVKEEP_MAX_BYTES",
            show_envvar=True,
            metavar="SIZE",
            help="Byte budget of the store, such as 50GB or 60GiB; it keeps the last one given.",
        ),
    )


def durability(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--durability``, for commands that write. Passes ``durability: str | None``."""
    return _with(
        function,
        click.option(
            "--durability",
            type=click.Choice(DURABILITIES),
            envvar="KVKEEP_DURABILITY",
            show_envvar=True,
            show_default="safe, or what others have who use the store",
            help="What is stored outlives a power loss (safe), or only this process: then "
            "nothing waits for the disk, and after a power loss the store is begun anew.",
        ),
    )


def which_spaces(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--space`` and ``--salt``, for commands that report. Passes both, ``None`` for all."""
    return _with(
        function,
        click.option(
            "--space", metavar="ID", help="Only the space whose id begins so; `kvkeep ls` has them."
        ),
        click.option(
            "--salt",
            envvar="KVKEEP_SALT",
            show_envvar=True,
            help="Only this tenant's spaces, and nothing of any other.",
        ),
    )


def model(function: Callable[..., Any]) -> Callable[..., Any]:
    """The model, and everything else that decides what its caches hold.

    Passes ``choice: kvkeep.cli.models.Choice``.
    """
    return _model(function, required=True)


def optional_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but there may be none. Passes ``choice: Choice | None`` and ``salt``."""
    return _model(function, required=False)


def _model(function: Callable[..., Any], *, required: bool) -> Callable[..., Any]:
    @wraps(function)
    def collected(*args: Any, **values: Any) -> Any:
        chosen = {field.name: values.pop(field.name) for field in fields(Choice)}
        if not required:
            values["salt"] = chosen["salt"]
        choice = Choice(**chosen) if chosen["model"] is not None else None
        return function(*args, choice=choice, **values)

    return _with(
        collected,
        click.option(
            "--model",
            required=required,
            metavar="MODEL",
            help="Folder of an mlx-lm model, or its id on the hub.",
        ),
        click.option(
            "--adapter", metavar="DIR", help="Folder of an adapter (LoRA) to load with the model."
        ),
        click.option(
            "--kv-bits",
            type=click.Choice(["2", "3", "4", "5", "6", "8"]),
            callback=parsed(int),
            help="Quantize the cache to this many bits.",
        ),
        click.option(
            "--kv-group-size",
            type=click.Choice(["32", "64", "128"]),
            callback=parsed(int),
            default="64",
            show_default=True,
            help="Values that share a scale in a quantized cache.",
        ),
        click.option(
            "--quantized-kv-start",
            type=click.IntRange(min=0),
            default=5000,
            metavar="N",
            show_default=True,
            help="Position from which --kv-bits takes effect.",
        ),
        click.option(
            "--prefill-step",
            type=click.IntRange(min=1),
            default=2048,
            show_default=True,
            metavar="N",
            help="Tokens of the prompt that the model reads at a time.",
        ),
        click.option(
            "--exact",
            is_flag=True,
            help="Store and resume only whole prefill steps, so that an answer after a resume "
            "has the bits of a cold one.",
        ),
        click.option(
            "--salt",
            envvar="KVKEEP_SALT",
            show_envvar=True,
            help="Keep this tenant's prompts apart from all others.",
        ),
    )


def prompt(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where the tokens come from; exactly one source.

    Passes ``source: kvkeep.cli.prompts.Source``.
    """
    return _prompt(function, "Name one prompt: --prompt, --prompt-file, --chat or --tokens-file.")


def optional_prompt(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but there may be none. Passes ``source: Source | None``."""
    return _prompt(function, None)


def _prompt(function: Callable[..., Any], without: str | None) -> Callable[..., Any]:
    @wraps(function)
    def collected(*args: Any, **values: Any) -> Any:
        named = {field.name: values.pop(field.name) for field in fields(Source)}
        sources = [value for key, value in named.items() if key != "raw" and value is not None]
        if len(sources) > 1 or (without and not sources):
            raise click.UsageError(without or "Name one prompt, not several.")
        return function(*args, source=Source(**named) if sources else None, **values)

    file = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
    return _with(
        collected,
        click.option("--prompt", metavar="TEXT", help="The user's message."),
        click.option("--prompt-file", type=file, help="A file with the message; - is stdin."),
        click.option("--chat", type=file, help="A JSON list of chat messages (role, content)."),
        click.option("--tokens-file", type=file, help="Token ids: a JSON list, or numbers."),
        click.option(
            "--raw", is_flag=True, help="Take --prompt or --prompt-file without a chat template."
        ),
    )


def _with(
    function: Callable[..., Any], *options: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    for option in reversed(options):
        function = option(function)
    return function
