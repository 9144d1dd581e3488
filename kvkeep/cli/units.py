"""Sizes, durations and counts, read from and written for people.

>>> parse_size("50GB"), parse_size("60 GiB"), parse_size("4096")
(50000000000, 64424509440, 4096)
>>> size(2_040_109_466), duration(34_860), count(41208), magnitude(31_400_000)
('1.9 GiB', '9 h 41 min', '41,208', '31.4 M')
"""

from __future__ import annotations

import re

_POWERS = "KMGTP"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(I?)B?|B)?", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of ``50GB`` (decimal), ``60GiB`` (binary) or ``4096``. Raises ``ValueError``."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 50GB, 60GiB or a number of bytes")
    number, power, binary = match.groups()
    base = 1024 if binary else 1000
    factor = base ** (_POWERS.index(power.upper()) + 1) if power else 1
    whole, _, fraction = number.partition(".")
    scale = 10 ** len(fraction)
    nbytes: int = int(whole + fraction) * factor // scale
    return nbytes


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``30min``, ``24h``, ``7d``, ``2w`` or a number. Raises ``ValueError``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write 90s, 30min, 24h, 7d or 2w")
    number, unit = match.groups()
    return float(number) * _SECONDS[(unit or "s").lower()]


def size(nbytes: int) -> str:
    """Bytes in IEC units, three digits: ``512 B``, ``1.9 GiB``, ``412 MiB``."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value, power = _scaled(nbytes, 1024, 999.5)
    return f"{value:.1f} {power}iB" if abs(value) < 99.95 else f"{value:.0f} {power}iB"


def duration(seconds: float) -> str:
    """Two digits below ten seconds, then the two largest units: ``0.41 s``, ``9 h 41 min``."""
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds >= 0.0995 else f"{seconds * 1000:.2g} ms"
    whole = round(seconds)
    for unit, name, below, lesser in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below} {lesser}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def clock(seconds: float) -> str:
    """A running time for a progress bar: ``0:00:51``."""
    minutes, secs = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{secs:02}"


def count(number: int) -> str:
    """Exact, with thousands separators: ``41,208``."""
    return f"{number:,}"


def magnitude(number: float) -> str:
    """Large totals in three digits: ``1,204`` below ten thousand, then ``31.4 M``."""
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    value, power = _scaled(number, 1000, 999.95)
    return f"{value:,.1f} {power.replace('K', 'k')}"


def share(part: float, whole: float) -> str:
    """A percentage: ``92.0 %``; ``–`` where there is nothing to divide by."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _scaled(number: float, base: int, below: float) -> tuple[float, str]:
    """``number`` over the smallest power of ``base`` that brings it ``below``."""
    for step, power in enumerate(_POWERS, 1):
        value = number / base**step
        if abs(value) < below:
            return value, power
    return number / base ** len(_POWERS), _POWERS[-1]
