"""What `kvkeep top` shows: the last minutes in sums, and the last lookups, as lines of text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvkeep.cli import style
from kvkeep.cli.report_data import event_json, numbers
from kvkeep.cli.report_text import cut, cut_id
from kvkeep.cli.tables import columns, shortened
from kvkeep.cli.units import count, duration, magnitude, share
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.event import Event
    from kvkeep.prefixstore.totals import Totals

WINDOWS = {60: "last minute", 300: "last 5 min", 3600: "last hour"}
STEP = 5
"""Seconds that one sum covers: windows begin at a multiple of it."""

RECENT = 200
LEAST_WIDTH, LEAST_HEIGHT = 40, 10


@dataclass
class Live:
    """The events of the last hour, in sums, and the last lookups."""

    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=RECENT))
    _steps: dict[int, Totals] = field(default_factory=dict)

    def add(self, events: Sequence[Event], now: float) -> None:
        """Count new events, and forget what is older than the longest window."""
        from kvkeep.prefixstore.event import LOOKUP
        from kvkeep.prefixstore.totals import Totals

        oldest = _step(now) - max(WINDOWS) // STEP
        for event in events:
            step = min(_step(event.time), _step(now))
            if step < oldest:
                continue
            totals = self._steps.get(step)
            if totals is None:
                totals = self._steps[step] = Totals()
            totals.add(event)
            if event.what == LOOKUP:
                self.recent.append(event)
        for step in [step for step in self._steps if step < oldest]:
            del self._steps[step]

    def window(self, seconds: int, now: float) -> Totals:
        """Everything of the last ``seconds``, and of the step that has just begun."""
        from kvkeep.prefixstore.totals import Totals

        total = Totals()
        for step, part in self._steps.items():
            if step >= _step(now) - seconds // STEP:
                total.merge(part)
        return total


@dataclass(frozen=True)
class Store:
    """What the screen says of the store itself."""

    name: str
    used_bytes: int
    max_bytes: int
    labels: Mapping[str, str]


def as_json(live: Live, store: Store, now: float) -> dict[str, Any]:
    """The same for programs."""
    return {
        "time": now,
        "used_bytes": store.used_bytes,
        "max_bytes": store.max_bytes,
        "windows": [
            {"seconds": seconds, "totals": numbers(live.window(seconds, now))}
            for seconds in WINDOWS
        ],
        "recent": [event_json(event) for event in list(live.recent)[::-1]],
    }


def frame(live: Live, store: Store, now: float, width: int, height: int) -> list[str]:
    """At most ``height`` lines of at most ``width`` characters, without counting colour."""
    width, height = max(width, LEAST_WIDTH), max(height, LEAST_HEIGHT)
    windows = {name: live.window(seconds, now) for seconds, name in WINDOWS.items()}
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    tail = f"{clock}  q quits"
    head = f"kvkeep top  {store.name}"
    lines = [style.bold(f"{cut(head, width - len(tail) - 2):<{width - len(tail)}}{tail}")]
    lines += [cut(line, width) for line in _kept(store, width)]
    lines.append("")
    lines += _sums(windows, width)
    lines.append("")
    lines += [cut(line, width) for line in _lost(windows["last 5 min"])]
    room = height - len(lines) - 2
    if room > 1:
        lines += ["", *_lookups(live, store, width, room)]
    return lines[:height]


def _kept(store: Store, width: int) -> list[str]:
    part = share(store.used_bytes, store.max_bytes)
    size = f"{format_size(store.used_bytes)} of {format_size(store.max_bytes)}"
    bar = style.bar(store.used_bytes, store.max_bytes, min(24, width // 3))
    return [f"Kept  {size}  {bar}  {part}"]


def _sums(windows: Mapping[str, Totals], width: int) -> list[str]:
    heads = ("", *windows)
    rows: list[tuple[str, ...]] = [heads]
    rows += [(name, *(of(t) for t in windows.values())) for name, of in _ROWS.items()]
    said = columns(rows, right=range(1, len(heads))).splitlines()
    said = [cut(line, width) for line in said]
    said[0] = style.bold(said[0])
    for place, line in enumerate(said):
        if line.startswith("hit rate"):
            total = windows["last 5 min"]
            said[place] = style.graded(line, total.resumed_tokens, total.prompt_tokens)
    return said


def _mean(totals: Totals) -> str:
    return duration(totals.restore_seconds / totals.restores) if totals.restores else "–"


_ROWS: Mapping[str, Callable[[Totals], str]] = {
    "lookups": lambda t: magnitude(t.lookups),
    "that resumed": lambda t: share(t.hits, t.lookups),
    "prompt tokens": lambda t: magnitude(t.prompt_tokens),
    "resumed": lambda t: magnitude(t.resumed_tokens),
    "hit rate": lambda t: share(t.resumed_tokens, t.prompt_tokens),
    "reading saved": lambda t: duration(t.saved_seconds) if t.rated_tokens else "–",
    "a restore takes": _mean,
    "written": lambda t: format_size(t.written_bytes),
    "evicted": lambda t: format_size(t.evicted_bytes),
}


def _lost(totals: Totals) -> list[str]:
    lost = [(r, n) for r, n in totals.lost_tokens.most_common(4) if n and r != "last_token"]
    if not lost:
        return ["Lost in 5 min: nothing"]
    return ["Lost in 5 min: " + ", ".join(f"{r} {magnitude(n)}" for r, n in lost)]


def _lookups(live: Live, store: Store, width: int, room: int) -> list[str]:
    """The newest lookups, one line each, under a head."""
    rows = [("when", "request", "model", "prompt", "resumed", "reason", "took")]
    for event in list(live.recent)[::-1][: room - 1]:
        space = event.space.hex()
        rows.append(
            (
                time.strftime("%H:%M:%S", time.localtime(event.time)),
                cut_id(event.request or "–", 12),
                shortened(store.labels.get(space, "") or space[:6], 14),
                count(event.prompt),
                count(event.resumed),
                cut(event.reason, 14),
                duration(event.seconds),
            )
        )
    head, *rest = columns(rows, right=(3, 4, 6)).splitlines()
    rest = [cut(line, width) for line in rest] or ["nothing was looked up yet"]
    return [style.bold(cut(head, width)), *rest]


def _step(moment: float) -> int:
    return int(moment // STEP)
