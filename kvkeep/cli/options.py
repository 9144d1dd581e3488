"""Options that several commands share, each group as one decorator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvkeep.cli import units
from kvkeep.cli.failures import State

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


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


def common(function: Decorated) -> Decorated:
    """``--store``, ``--json`` and ``--debug``: every command has them.

    Passes ``store: Path`` and ``as_json: bool``.
    """
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
        click.option(
            "--json", "as_json", is_flag=True, help="Print one JSON object, for programs."
        ),
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            callback=_debug,
            help="Show the traceback of an error.",
        ),
    )


def budget(function: Decorated) -> Decorated:
    """``--max-bytes``, for commands that write. Passes ``max_bytes: int | None``."""
    return _with(
        function,
        click.option(
            "--max-bytes",
            callback=parsed(units.parse_size),
            envvar="KVKEEP_MAX_BYTES",
            show_envvar=True,
            metavar="SIZE",
            help="Byte budget of the store, such as 50GB or 60GiB. Kept until it is changed.",
        ),
    )


def model(function: Decorated) -> Decorated:
    """The model, and everything that decides what its caches hold.

    Passes ``model: str``, ``adapter: str | None``, ``kv_bits: int | None``,
    ``kv_group_size: int``, ``quantized_kv_start: int`` and ``salt: str | None``.
    """
    return _with(
        function,
        click.option(
            "--model",
            required=True,
            metavar="MODEL",
            help="Folder of an mlx-lm model, or its id on the hub.",
        ),
        click.option(
            "--adapter",
            metavar="DIR",
            help="Folder of an adapter (LoRA) to load with the model.",
        ),
        click.option(
            "--kv-bits",
            type=click.Choice(["2", "3", "4", "5", "6", "8"]),
            callback=parsed(int),
            help="Quantize the cache to this many bits.",
        ),
        click.option(
            "--kv-group-size",
            type=int,
            default=64,
            show_default=True,
            help="Values that share a scale in a quantized cache.",
        ),
        click.option(
            "--quantized-kv-start",
            type=int,
            default=5000,
            show_default=True,
            help="Position from which --kv-bits takes effect.",
        ),
        click.option(
            "--salt",
            envvar="KVKEEP_SALT",
            show_envvar=True,
            help="Keep this tenant's prompts apart from all others.",
        ),
    )


def prompt(function: Decorated) -> Decorated:
    """Where the tokens come from; exactly one source.

    Passes ``source: kvkeep.cli.prompts.Source``.
    """
    from functools import wraps

    from kvkeep.cli.prompts import Source

    @wraps(function)
    def collected(
        *args: Any,
        prompt: str | None,
        prompt_file: Path | None,
        chat: Path | None,
        tokens_file: Path | None,
        raw: bool,
        **rest: Any,
    ) -> Any:
        given = [x for x in (prompt, prompt_file, chat, tokens_file) if x is not None]
        if len(given) != 1:
            raise click.UsageError(
                "Name one prompt: --prompt, --prompt-file, --chat or --tokens-file."
            )
        source = Source(prompt, prompt_file, chat, tokens_file, raw)
        return function(*args, source=source, **rest)

    file = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
    return _with(  # type: ignore[return-value]
        collected,
        click.option("--prompt", metavar="TEXT", help="The user's message."),
        click.option(
            "--prompt-file", type=file, help="A file with the user's message; - is stdin."
        ),
        click.option("--chat", type=file, help="A JSON list of chat messages (role, content)."),
        click.option("--tokens-file", type=file, help="Token ids: a JSON list, or numbers."),
        click.option(
            "--raw", is_flag=True, help="Take --prompt or --prompt-file without a chat template."
        ),
    )


def _with(function: Decorated, *options: Callable[[Decorated], Decorated]) -> Decorated:
    for option in reversed(options):
        function = option(function)
    return function
