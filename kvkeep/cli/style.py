"""Colour on a terminal, for emphasis only: every word is there without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import click

Paint = Callable[[str], str]


def plain(text: str) -> str:
    """The text as it is."""
    return text


def coloured() -> bool:
    """Whether stdout is a terminal that may show colour (see https://no-color.org)."""
    terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it is closed
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def bold(text: str) -> str:
    """Bold on a terminal."""
    return click.style(text, bold=True) if coloured() else text


def graded(text: str, part: float, whole: float) -> str:
    """Green for a large part, yellow for a middling, red for a small one."""
    if not whole or not coloured():
        return text
    share = part / whole
    return click.style(text, fg="green" if share >= 0.8 else "yellow" if share >= 0.4 else "red")


def bar(part: float, whole: float, width: int = 20) -> str:
    """A share as a bar of ``width`` characters; in ASCII where stdout cannot show blocks."""
    full = round(width * part / whole) if whole else 0
    try:
        "█░".encode(sys.stdout.encoding or "ascii")
        return "█" * full + "░" * (width - full)
    except (LookupError, UnicodeEncodeError):
        return "#" * full + "." * (width - full)
