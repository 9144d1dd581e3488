"""Aligned text without colour and without a terminal's width.

>>> print(table(("Space", "kept"), [("4f2a", "22.1 GiB"), ("91c0", "8.4 GiB")], right=("kept",)))
Space      kept
4f2a   22.1 GiB
91c0    8.4 GiB
>>> print(columns([("stored", "Qwen"), ("asked for", "Llama")]))
stored     Qwen
asked for  Llama
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

GAP = "  "


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> str:
    """Columns under heads; those named in ``right`` end flush."""
    return columns([heads, *rows], right=[i for i, head in enumerate(heads) if head in right])


def columns(rows: Iterable[Sequence[str]], indent: str = "", right: Collection[int] = ()) -> str:
    """Columns as wide as their widest cell; those numbered in ``right`` end flush."""
    lines = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        indent
        + GAP.join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def shortened(text: str, width: int = 28) -> str:
    """A path or an id in at most ``width`` characters: its last part, cut where it is long.

    >>> shortened("mlx-community/Qwen3.5-9B-4bit")
    'Qwen3.5-9B-4bit'
    """
    name = text.rstrip("/").rpartition("/")[2]
    return name if len(name) <= width else f"{name[: width - 1]}…"
