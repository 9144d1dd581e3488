"""The command line: ``kvkeep COMMAND``.

One thin file per command. Importing this package imports click and nothing heavy; a command
imports MLX, LMDB or a model only when it runs, so that ``kvkeep --help`` answers at once.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from kvkeep._version import __version__
from kvkeep.cli.failures import Failure, Interrupted, State, Unexpected
from kvkeep.errors import KvkeepError

COMMANDS = {
    "snapshot": "snapshot",
    "restore": "restore",
    "why": "why",
    "ls": "ls",
    "tree": "tree",
    "inspect": "inspect",
    "report": "report",
    "top": "top",
    "verify": "verify",
    "pin": "pin",
    "unpin": "unpin",
    "evict": "evict",
    "purge": "purge",
    "simulate": "simulate",
    "import": "import_",
    "export": "export",
    "serve": "serve",
    "doctor": "doctor",
}
"""Commands in the order of the help, and the module of this package that holds each."""


class Commands(click.Group):
    """A group that loads a command's module when it is named, and turns errors into exits."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, loaded now; ``None`` when there is none of that name."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(f"kvkeep.cli.{module}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is named first; of a misspelt one, what may be meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            said = f"{error.message} Did you mean {near[0]!r}?" if near else error.message
            raise click.UsageError(said, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error ends as one message and an exit code, or raised as it is."""
        state = ctx.ensure_object(State)
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            raise Interrupted from None
        except KvkeepError as error:
            if state.debug:
                raise
            raise Failure(error) from error
        except Exception as error:
            if state.debug:
                raise
            raise Unexpected(error) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvkeep")
def main() -> None:
    """Keep the prompt caches of MLX language models, and resume them.

    A snapshot stores what a model computed for a prompt. A later prompt that begins the same
    way resumes from it, in another process or after a restart, and skips that part of the
    reading.

    \b
    Example:
      kvkeep snapshot --model MODEL --prompt-file context.md
      kvkeep restore  --model MODEL --prompt-file question.md --generate 64
      kvkeep report

    Exit codes: 0 done, 1 unexpected, 2 usage, 3 nothing to resume, 4 damage found,
    5 refused, 6 store not usable, 7 written by a newer kvkeep, 130 interrupted.
    """
