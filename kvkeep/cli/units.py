"""Durations and counts, read from and written for people. Sizes are the library's own.

>>> duration(0.41), duration(34_860), count(41208), magnitude(31_400_000)
('0.41 s', '9 h 41 min', '41,208', '31.4 M')
"""

from __future__ import annotations

import re

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)?", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``30min``, ``24h``, ``7d``, ``2w`` or a number. Raises ``ValueError``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write 90s, 30min, 24h, 7d or 2w")
    number, unit = match.groups()
    return float(number) * _SECONDS[(unit or "s").lower()]


def duration(seconds: float) -> str:
    """Two digits below ten seconds, then the two largest units: ``0.41 s``, ``9 h 41 min``."""
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds >= 0.0995 else f"{seconds * 1000:.2g} ms"
    whole = round(seconds)
    for unit, name, below, lesser in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below} {lesser}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def age(seconds: float) -> str:
    """The largest whole unit: ``7 min``, ``3 d``."""
    for below, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= below:
            return f"{int(seconds // below)} {name}"
    return f"{int(seconds)} s"


def clock(seconds: float) -> str:
    """A running time for a progress bar: ``0:00:51``."""
    minutes, secs = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{secs:02}"


def count(number: int) -> str:
    """Exact, with thousands separators: ``41,208``."""
    return f"{number:,}"


def counted(number: int, what: str) -> str:
    """An exact number of things: ``1 node``, ``9,311 chunks``."""
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def magnitude(number: float) -> str:
    """Large totals in three digits: ``1,204`` below ten thousand, then ``31.4 M``."""
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    for power in "kM":
        number /= 1000
        if abs(number) < 999.95:
            return f"{number:.1f} {power}"
    return f"{number / 1000:,.1f} G"


def share(part: float, whole: float) -> str:
    """A percentage: ``92.0 %``; ``–`` where there is nothing to divide by."""
    return f"{100 * part / whole:.1f} %" if whole else "–"
