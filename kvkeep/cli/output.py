"""What a command prints: one JSON object for programs, or text for people, on stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from kvkeep.errors import KvkeepError


class OutputLost(KvkeepError):
    """Where stdout leads takes no more."""

    remedy = "Send it elsewhere; what the command does to the store is done."


def emit(as_json: bool, data: Mapping[str, Any], text: str) -> None:
    """Print ``data`` or ``text``. The keys of ``data`` are a public interface.

    Raises ``OutputLost``.
    """
    said = json.dumps(data, indent=2, ensure_ascii=False) if as_json else text
    try:
        click.echo(said)
    except BrokenPipeError:  # a reader that has enough, such as head
        raise
    except OSError as error:
        raise OutputLost(f"The output cannot be written: {error.strerror}") from error


def note(text: str) -> None:
    """Say something to a person, on stderr."""
    click.echo(text, err=True)
