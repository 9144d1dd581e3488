"""How an error reaches the user: one message on stderr, one exit code, no traceback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

import click

from kvkeep.errors import KvkeepError


@dataclass
class State:
    """What the commands of one run share: whether errors keep their traceback."""

    debug: bool = False


class Failure(click.ClickException):
    """A ``KvkeepError`` on its way out."""

    def __init__(self, error: KvkeepError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code  # type: ignore[misc]  # one class for all codes

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the problem and its remedy to stderr."""
        click.echo(f"error: {self.message}", file=file, err=file is None)


class Interrupted(click.ClickException):
    """Ctrl-C: the store is as whole as after any other end."""

    exit_code = 130

    def __init__(self, kept: str = "") -> None:
        super().__init__(f"interrupted{kept and '; '}{kept}")

    def show(self, file: IO[Any] | None = None) -> None:
        """Say so on a line of its own, below the terminal's ^C."""
        click.echo(f"\n{self.message}", file=file, err=file is None)


class Unexpected(Failure):
    """Any other error: kvkeep's own bug, or something that nobody foresaw."""

    def __init__(self, error: Exception) -> None:
        problem = f"unexpected {type(error).__name__}: {error}"
        remedy = "Run it again with --debug to see where; that text belongs in a bug report."
        super().__init__(KvkeepError(problem, remedy=remedy))
