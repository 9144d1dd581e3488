"""What a command prints: one JSON object for programs, or text for people, on stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click


def emit(as_json: bool, data: Mapping[str, Any], text: str) -> None:
    """Print ``data`` or ``text``. The keys of ``data`` are a public interface."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False) if as_json else text)


def note(text: str) -> None:
    """Say something to a person, on stderr."""
    click.echo(text, err=True)
