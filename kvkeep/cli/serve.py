"""``kvkeep serve``: ``mlx_lm.server`` with a prompt cache that outlives it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from kvkeep.cli import options
from kvkeep.cli.failures import Failure
from kvkeep.prefixstore.sizes import format_size, parse_size

SPECULATIVE = ("--draft-model", "--num-draft-tokens")
MEMORY = ("--prompt-cache-size", "--prompt-cache-bytes")


@click.command(
    "serve",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [OPTIONS OF mlx_lm.server]",
)
@click.option(
    "--disk-reserve",
    default="1GiB",
    show_default=True,
    callback=options.parsed(parse_size),
    metavar="SIZE",
    help="Free disk space that is left alone; below it nothing more is stored.",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=0),
    default=2048,
    show_default=True,
    metavar="N",
    help="Tokens between resume points inside a long prompt; 0 takes none.",
)
@click.option(
    "--generation-checkpoints",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Store an unfinished answer every N tokens, so that after a crash the same request goes "
    "on with it; 0 does not. For requests with temperature 0 or a seed.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="Store and resume only whole prefill steps, one request at a time and nothing in "
    "memory, so that an answer after a resume has the bits of a cold one.",
)
@click.option(
    "--flush-seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="S",
    help="How long a stop waits at most for what is not yet on disk.",
)
@click.option(
    "--salt",
    envvar="KVKEEP_SALT",
    show_envvar=True,
    help="Keep this server's prompts apart from those stored under any other salt.",
)
@options.budget
@options.durability
@options.placed
@options.traced
@click.argument("server_options", nargs=-1, type=click.UNPROCESSED, metavar="")
def command(
    server_options: tuple[str, ...],
    store: Path,
    max_bytes: int | None,
    durability: str | None,
    disk_reserve: int,
    checkpoint_every: int,
    generation_checkpoints: int,
    exact: bool,
    flush_seconds: float,
    salt: str | None,
) -> None:
    """Run mlx_lm.server with a prompt cache that survives restarts.

    Every option of mlx_lm.server is taken and passed on; `mlx_lm.server --help` lists them.
    GET /metrics and GET /kvkeep/report say what resuming saved.

    \b
    Example:
      kvkeep serve --model MODEL --port 8080
      kvkeep serve --model MODEL --kv-bits 8 --max-bytes 100GB
    """
    _check(server_options, exact, generation_checkpoints)
    from kvkeep.hooks.mlx_server import PortInUse, Settings, check_version, serve, stoppable
    from kvkeep.hooks.unloadable import ModelUnusable
    from kvkeep.prefixstore.store import open_store

    check_version()
    settings = Settings(checkpoint_every, generation_checkpoints, exact, salt, flush_seconds)
    opened = open_store(store, max_bytes, disk_reserve=disk_reserve, durability=durability)
    used, budget = format_size(opened.used_bytes), format_size(opened.max_bytes)
    click.echo(f"kvkeep: the store is {opened.path}, {used} of {budget} in use", err=True)
    with stoppable():
        try:
            whole = serve(opened, settings, server_options)
        except (PortInUse, ModelUnusable) as error:  # the server's threads run by now
            failure = Failure(error)
            failure.show()
            _leave(failure.exit_code)
        if whole:
            opened.close()
            _leave(0)
        # The writer's thread is still at it; its unfinished snapshots are undone at the next start.
        click.echo(f"kvkeep: not all was written within {flush_seconds:g} s", err=True)
        _leave(1)


def _leave(status: int) -> NoReturn:
    """End the process without waiting for threads.

    The server's HTTP threads may be in the middle of a response; the interpreter's own end
    would tear them out of MLX's destructors, which aborts the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _check(given: tuple[str, ...], exact: bool, generation_checkpoints: int) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    names = {word.partition("=")[0] for word in given}
    if exact and names & set(SPECULATIVE):
        raise click.UsageError(
            "--exact and --draft-model contradict each other: what a draft model proposes is "
            "not read in whole prefill steps."
        )
    if exact and generation_checkpoints:
        raise click.UsageError(
            "--exact and --generation-checkpoints contradict each other: what an answer has added "
            "was not read in whole prefill steps."
        )
    if generation_checkpoints and names & set(SPECULATIVE):
        raise click.UsageError(
            "--generation-checkpoints and --draft-model contradict each other: how often a sampler "
            "drew depends on what the draft model proposed."
        )
    if exact and names & set(MEMORY):
        raise click.UsageError(
            f"--exact and {sorted(names & set(MEMORY))[0]} contradict each other: in exact mode "
            "nothing is kept in memory."
        )
    bits = _value(given, "--kv-bits")
    if bits is not None and bits not in ("2", "3", "4", "5", "6", "8"):
        raise click.UsageError(f"--kv-bits is 2, 3, 4, 5, 6 or 8, not {bits}.")
    if bits is None and names & {"--kv-group-size", "--quantized-kv-start"}:
        option = sorted(names & {"--kv-group-size", "--quantized-kv-start"})[0]
        raise click.UsageError(f"{option} says how to quantize, and nothing does: add --kv-bits.")


def _value(given: tuple[str, ...], name: str) -> Any:
    for i, word in enumerate(given):
        if word == name:
            return given[i + 1] if i + 1 < len(given) else ""
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
