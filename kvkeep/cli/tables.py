"""Aligned text without colour and without a terminal's width.

>>> print(table(("Space", "kept"), [("4f2a", "22.1 GiB"), ("91c0", "8.4 GiB")], right=("kept",)))
Space      kept
4f2a   22.1 GiB
91c0    8.4 GiB
>>> print(pairs([("stored", "Qwen"), ("asked for", "Llama")]))
stored     Qwen
asked for  Llama
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

GAP = "  "


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> str:
    """Columns as wide as their widest cell; those named in ``right`` end flush."""
    lines = [tuple(heads), *(tuple(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        GAP.join(
            cell.rjust(width) if head in right else cell.ljust(width)
            for cell, width, head in zip(line, widths, heads, strict=True)
        ).rstrip()
        for line in lines
    )


def pairs(items: Iterable[tuple[str, str]], indent: str = "") -> str:
    """Names and values, the values in one column."""
    rows = list(items)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{indent}{name.ljust(width)}{GAP}{value}".rstrip() for name, value in rows)
