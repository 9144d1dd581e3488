"""The command line's reference, written from the commands themselves.

``python -m kvkeep.cli.reference docs/cli.md`` writes it again after a change.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvkeep.cli import COMMANDS, main

HEAD = """\
# The command line

This page is written by `python -m kvkeep.cli.reference docs/cli.md` from the commands
themselves. What `--json` prints is described in [json.md](json.md).
"""


def reference() -> str:
    """The page: each command's help as it is shown in a terminal of 80 columns."""
    root = _context(main, "kvkeep")
    parts = [HEAD, _block(main, root)]
    for name in COMMANDS:
        command = main.get_command(root, name)
        assert command is not None
        parts += [f"## kvkeep {name}\n", _block(command, _context(command, name, root))]
    return "\n".join(parts)


def _context(
    command: click.Command, name: str, parent: click.Context | None = None
) -> click.Context:
    context = click.Context(command, parent, info_name=name, **main.context_settings)
    context.terminal_width = 80
    return context


def _block(command: click.Command, context: click.Context) -> str:
    return f"```\n{command.get_help(context)}\n```\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
