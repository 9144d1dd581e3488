"""Sizes as people write them: ``50GB``, ``60GiB``, ``1.5 TB``, or a plain number of bytes."""

from __future__ import annotations

import re

from kvkeep.errors import KvkeepError

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = " kmgtp"


class BadSize(KvkeepError, ValueError):
    """A size that cannot be read."""

    exit_code = 2
    remedy = "Write a number with a unit, such as 50GB or 60GiB."


def parse_size(size: int | str) -> int:
    """Bytes of ``size``: powers of 1,000 for ``GB``, of 1,024 for ``GiB``.

    Raises ``BadSize``, also for nothing and less.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None:
            raise BadSize(f"{size!r} is not a size")
        number, power, binary = match.groups()
        base = 1024 if binary else 1000
        size = int(float(number) * base ** max(0, _POWERS.index(power.lower() or " ")))
    if size <= 0:
        raise BadSize(f"A size of {size} bytes is not possible")
    return size


def format_size(size: float) -> str:
    """``size`` bytes in the largest binary unit that keeps it above one: ``1.9 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
