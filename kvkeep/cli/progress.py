"""A progress bar on stderr, and its silent twin for when nobody watches.

::

    Reading 41,208 tokens  ━━━━━━━━━━━━━━━━━━━━──────────  67 %  812 tok/s  0:00:17
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from kvkeep.cli.units import clock

COLUMNS = 79
REDRAW_SECONDS = 0.1

Rate = Callable[[float], str]


class Progress:
    """Draws nothing. Call it with how much is done and how much there is."""

    def __call__(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` is done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """End the line, whatever happened."""


class Bar(Progress):
    """Draws one line and redraws it in place, at most ten times a second.

    ``rate`` writes the units per second, ``812 tok/s``. The time shown is what is left,
    and at the end what it took.
    """

    def __init__(
        self,
        label: str,
        rate: Rate,
        stream: TextIO,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._rate, self._stream, self._now = label, rate, stream, now
        self._start = now()
        self._drawn: float | None = None
        self._full, self._rest = _glyphs(stream)

    def __call__(self, done: int, total: int) -> None:
        """Redraw, unless that was done a moment ago and there is more to come."""
        now = self._now()
        fresh = self._drawn is not None and now - self._drawn < REDRAW_SECONDS
        if fresh and done < total:
            return
        self._drawn = now
        self._stream.write("\r" + self._line(done, total, now - self._start))
        self._stream.flush()

    def __exit__(self, *exc: object) -> None:
        """End the line, whatever happened."""
        if self._drawn is not None:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, done: int, total: int, spent: float) -> str:
        part = min(done / total, 1.0) if total else 1.0
        speed = done / spent if spent > 0 else 0.0
        left = spent if part == 1.0 else (total - done) / speed if speed else 0.0
        tail = f"{int(100 * part):>3} %  {self._rate(speed)}  {clock(left)}"
        # A line that wraps cannot be redrawn in place.
        columns = min(shutil.get_terminal_size().columns - 1, COLUMNS)
        width = columns - len(self._label) - len(tail) - 4
        if width < 5:
            return f"{self._label}  {tail}"[:columns].ljust(columns)
        bar = self._full * int(width * part)
        return f"{self._label}  {bar.ljust(width, self._rest)}  {tail}"


def progress(label: str, rate: Rate, stream: TextIO | None = None) -> Progress:
    """A bar where ``stream`` (stderr) is a terminal, its silent twin elsewhere."""
    out = sys.stderr if stream is None else stream
    return Bar(label, rate, out) if out.isatty() else Progress()


def _glyphs(stream: TextIO) -> tuple[str, str]:
    try:
        "━─".encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return "#", "-"
    return "━", "─"
