"""The numbers of the charts as text and tables: for screen readers, printers and copying."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING

from kvkeep.cli.advice import advice, meaning
from kvkeep.cli.page.figures import moment
from kvkeep.cli.units import count, duration, magnitude, share
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.cli.page.collect import Restored, Slice
    from kvkeep.cli.page.icicle import Box
    from kvkeep.prefixstore.event import Event
    from kvkeep.prefixstore.report import Report

Cell = str | tuple[str, float]
"""Text, or text with the number that it is sorted by."""

ATTRIBUTE = ' class="n"'

BANDS = (0, 256, 1024, 4096, 16_384, 65_536)


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    name: str = "",
    hidden_caption: bool = False,
) -> str:
    """A table in a box that scrolls by itself; the first cell of a row names it."""
    attribute = f' id="{name}"' if name else ""
    quiet = ' class="quiet"' if hidden_caption else ""
    listed = list(rows)
    flush = [isinstance(cell, tuple) for cell in listed[0]] if listed else [False] * len(heads)
    head = "".join(
        f'<th scope="col"{ATTRIBUTE * right}>{html.escape(h)}</th>'
        for h, right in zip(heads, flush, strict=True)
    )
    body = "\n".join(f"<tr>{_cells(row)}</tr>" for row in listed)
    said = html.escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {said}">'
        f"<table{attribute}><caption{quiet}>{said}</caption>"
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _cells(row: Sequence[Cell]) -> str:
    out = []
    for place, cell in enumerate(row):
        text, sort = cell if isinstance(cell, tuple) else (cell, None)
        tag = "td" if place else 'th scope="row"'
        extra = f'{ATTRIBUTE} data-n="{sort:.12g}"' if sort is not None else ""
        out.append(f"<{tag}{extra}>{html.escape(text)}</{tag.partition(' ')[0]}>")
    return "".join(out)


def totals(report: Report) -> str:
    """The figures at the top of the page."""
    total = report.total
    facts = [
        (
            "Tokens resumed",
            share(total.resumed_tokens, total.prompt_tokens),
            f"{magnitude(total.resumed_tokens)} of {magnitude(total.prompt_tokens)}",
        ),
        (
            "Lookups that resumed",
            share(total.hits, total.lookups),
            f"{magnitude(total.hits)} of {magnitude(total.lookups)}",
        ),
        (
            "Reading saved",
            f"about {duration(total.saved_seconds)}" if total.rated_tokens else "unknown",
            _timed(report),
        ),
        (
            "Kept",
            format_size(report.used_bytes),
            f"of {format_size(report.max_bytes)}; {format_size(report.needed_bytes)} were resumed",
        ),
        (
            "Written",
            format_size(total.written_bytes),
            f"read back {format_size(total.restored_bytes)}",
        ),
        (
            "Evicted",
            format_size(total.evicted_bytes),
            f"wanted again: {magnitude(total.regret_tokens)} tokens",
        ),
    ]
    items = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd><strong>{html.escape(value)}</strong>"
        f"<span>{html.escape(more)}</span></dd></div>"
        for name, value, more in facts
    )
    return f'<dl class="tiles">{items}</dl>'


def _timed(report: Report) -> str:
    total = report.total
    if not total.rated_tokens:
        return "no prefill was timed here"
    part = share(total.rated_tokens, total.resumed_tokens)
    return f"{part} of these tokens are timed; restores took {duration(total.restore_seconds)}"


def slices(pieces: Sequence[Slice], width: int) -> str:
    """The numbers of both charts over time."""
    rows = [
        (
            (moment(s.start)[:16], float(s.start)),
            (count(s.lookups), s.lookups),
            (share(s.hits, s.lookups), s.hits / s.lookups),
            (count(s.prompt), s.prompt),
            (count(s.resumed), s.resumed),
            (share(s.resumed, s.prompt), s.resumed / s.prompt if s.prompt else 0.0),
        )
        for s in pieces
    ]
    heads = ("From", "Lookups", "Resumed some", "Prompt tokens", "Resumed", "Hit rate")
    return table(f"Lookups, each row {span(width)}", heads, rows)


def span(seconds: float) -> str:
    """A round stretch of time: ``30 minutes``, ``1 day``."""
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit and seconds % unit == 0:
            number = int(seconds // unit)
            return f"{number} {name}{'' if number == 1 else 's'}"
    return duration(seconds)


def lost(report: Report) -> str:
    """Tokens that were not resumed: by reason, with what it means and what would help."""
    whole = sum(report.total.lost_tokens.values())
    rows = [
        (
            reason,
            (count(n), n),
            (share(n, whole), n / whole),
            (count(report.total.reasons[reason]), report.total.reasons[reason]),
            meaning(reason),
            advice(report, reason),
        )
        for reason, n in report.total.lost_tokens.most_common()
        if n
    ]
    heads = ("Reason", "Tokens", "Share", "Lookups", "Because", "What would help")
    return table("Tokens that were not resumed", heads, rows)


def stored(boxes: Sequence[Box]) -> str:
    """The boxes of the icicle chart."""
    rows = [
        (
            box.label,
            (format_size(box.bytes), box.bytes),
            (count(box.conversations), box.conversations),
            (count(box.tokens), box.tokens),
            (count(box.points), box.points),
            box.parent.partition("/")[0][:6] or "–",
        )
        for box in boxes
    ]
    heads = ("Tokens", "With all below", "Shared by", "Own tokens", "Resume points", "Space")
    return table("Stored prefixes", heads, rows)


def restores(points: Sequence[Restored]) -> str:
    """How long restores take, by how many tokens they bring."""
    rows = []
    for low, high in zip(BANDS, (*BANDS[1:], None), strict=True):
        times = sorted(
            p.seconds for p in points if p.tokens >= low and (not high or p.tokens < high)
        )
        if times:
            late = quantiles(times, n=20)[-1] if len(times) > 1 else times[0]
            rows.append(
                (
                    f"{count(low)} and more" if high is None else f"{count(low)}–{count(high)}",
                    (count(len(times)), len(times)),
                    (duration(median(times)), median(times)),
                    (duration(late), late),
                    (duration(times[-1]), times[-1]),
                )
            )
    heads = ("Tokens", "Restores", "Median", "95 % within", "Longest")
    return table("Restores by tokens", heads, rows)


def spaces(report: Report) -> str:
    """The spaces, with what each keeps and saves."""
    rows = []
    for facts in report.spaces.values():
        totals = report.by_space.get(facts.id)
        prompt = totals.prompt_tokens if totals else 0
        resumed = totals.resumed_tokens if totals else 0
        lookups = totals.lookups if totals else 0
        written = totals.written_bytes if totals else 0
        rows.append(
            (
                facts.id[:6],
                facts.label or "–",
                ", ".join(facts.kinds),
                (format_size(facts.kept_bytes), facts.kept_bytes),
                (count(lookups), lookups),
                (share(resumed, prompt), resumed / prompt if prompt else 0.0),
                (format_size(written), written),
                (f"{facts.rate:,.0f}" if facts.rate else "–", facts.rate),
            )
        )
    heads = ("Space", "Model", "Kinds", "Kept", "Lookups", "Hit rate", "Written", "Tokens a second")
    return table("Spaces", heads, rows, hidden_caption=True)


def recent(events: Sequence[Event], labels: dict[str, str]) -> str:
    """The last lookups, newest first."""
    rows = [
        (
            event.request or "–",
            (moment(event.time), event.time),
            labels.get(event.space.hex(), event.space.hex()[:6]),
            (count(event.prompt), event.prompt),
            (count(event.resumed), event.resumed),
            (count(event.lost), event.lost),
            event.reason,
            f"{event.kinds} {event.layers}".strip() or "–",
            event.tier or "–",
            (duration(event.seconds), event.seconds),
        )
        for event in events
    ]
    heads = (
        *("Request", "When", "Model", "Prompt", "Resumed", "Lost"),
        *("Reason", "Limited by", "From", "Took"),
    )
    return table("Recent lookups", heads, rows, name="recent", hidden_caption=True)
