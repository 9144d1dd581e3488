"""A report for people: 80 columns, facts first, one line of advice where there is one."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkeep.cli import style, units
from kvkeep.cli.advice import advice
from kvkeep.cli.report_data import groups
from kvkeep.cli.tables import shortened, table
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.event import Event
    from kvkeep.prefixstore.events import Gaps
    from kvkeep.prefixstore.report import Report
    from kvkeep.prefixstore.totals import Totals

WIDTH = 80
MOST = 12
"""Reasons, and spaces, that are listed; --json has all."""

EXPECTED = ("last_token",)
"""Reasons that are no loss: the model must read a token."""


def text(report: Report, by: Sequence[str] = ()) -> str:
    """The report, with one table for each of ``by`` where any is named."""
    parts = [_totals(report)]
    if by:
        parts += [_group(report, name) for name in by]
    else:
        parts += [_lost(report), _worst(report), _spaces(report)]
    parts.append(notes(report.gaps))
    return "\n\n".join(part for part in parts if part)


def _totals(report: Report) -> str:
    total, size = report.total, format_size
    hit = units.share(total.resumed_tokens, total.prompt_tokens)
    some = units.share(total.hits, total.lookups)
    lines = [
        f"Lookups {units.magnitude(total.lookups)}    "
        f"Prompt tokens {units.magnitude(total.prompt_tokens)}    "
        f"Resumed {units.magnitude(total.resumed_tokens)}  "
        + style.graded(hit, total.resumed_tokens, total.prompt_tokens),
        f"Hits {units.magnitude(total.hits)}  {some}    {_saved(total)}",
        f"Snapshots {units.magnitude(total.snapshots)}    Written {size(total.written_bytes)}    "
        f"Read back {size(total.restored_bytes)}",
        f"Kept {size(report.used_bytes)} of {size(report.max_bytes)}, "
        f"of which {size(report.needed_bytes)} were resumed",
    ]
    if report.gaps.oldest:
        lines.append(f"From {when(report.gaps.oldest, report.until)} on")
    if total.evictions or total.regrets:
        regret = f"    Wanted again: {units.magnitude(total.regret_tokens)} tokens in "
        regret += f"{plural(total.regrets, 'lookup')}"
        lines.append(f"Evicted {size(total.evicted_bytes)}" + (regret if total.regrets else ""))
    if total.snapshots_refused:
        lines.append(f"Not stored: {plural(total.snapshots_refused, 'snapshot')}")
        lines += [
            shortened_line(f"  {units.magnitude(n)}  {why}")
            for why, n in total.refusals.most_common(3)
        ]
    if report.quarantined:
        lines.append(f"Damaged records: {report.quarantined}; see `kvkeep verify`")
    return "\n".join(lines)


def _saved(total: Totals) -> str:
    if not total.rated_tokens:
        return "Time saved is not known: no prefill was timed here"
    said = f"About {units.duration(total.saved_seconds)} of reading saved"
    if total.rated_tokens < total.resumed_tokens:
        part = units.share(total.rated_tokens, total.resumed_tokens)
        said += f" ({part} timed)"
    return said


def _lost(report: Report) -> str:
    total = report.total
    lost = [
        (r, n)
        for r, n in total.lost_tokens.most_common()
        if n and r.partition(":")[0] not in EXPECTED
    ]
    if not lost:
        return ""
    everything = sum(total.lost_tokens.values())
    lines = [style.bold(f"{'Lost tokens':<26}{units.magnitude(everything):>9}  of the prompts")]
    for reason, n in lost[:MOST]:
        head = f"  {cut(reason, 24):<24}{units.magnitude(n):>9}{units.share(n, everything):>8}  "
        wrapped = textwrap.wrap(advice(report, reason), WIDTH - len(head)) or [""]
        lines.append((head + wrapped[0]).rstrip())
        lines += [" " * len(head) + more for more in wrapped[1:]]
    return "\n".join(lines + _more(len(lost)))


def _worst(report: Report) -> str:
    if not report.worst:
        return ""
    rows = [
        (
            cut_id(event.request or "–", 13),
            when(event.time, report.until),
            units.count(event.prompt),
            units.count(event.resumed),
            cut(event.reason, 18),
            cut(_limit(event), 13),
        )
        for event in report.worst
    ]
    heads = ("Lost most", "when", "prompt", "resumed", "reason", "limited by")
    said = table(heads, rows, right=("prompt", "resumed"))
    return _headed(said) + "\n`kvkeep why REQUEST` explains one of them."


def _limit(event: Event) -> str:
    return f"{event.kinds} {event.layers}".strip() or "–"


def _spaces(report: Report) -> str:
    if not report.spaces:
        return ""
    rows = []
    for facts in list(report.spaces.values())[:MOST]:
        totals = report.by_space.get(facts.id)
        rows.append(
            (
                f"{facts.id[:6]}…",
                shortened(facts.label, 26) or "–",
                cut(",".join(facts.kinds), 14),
                format_size(facts.kept_bytes),
                units.share(totals.resumed_tokens, totals.prompt_tokens) if totals else "–",
                format_size(totals.written_bytes if totals else 0),
            )
        )
    heads = ("Space", "model", "kinds", "kept", "hit", "written")
    said = table(heads, rows, right=("kept", "hit", "written"))
    return "\n".join([_headed(said), *_more(len(report.spaces))])


def _group(report: Report, by: str) -> str:
    rows = []
    for key, label, totals in groups(report)[by]:
        rows.append(
            (
                _name(by, key, label, report.until),
                units.magnitude(totals.lookups),
                units.share(totals.hits, totals.lookups),
                units.magnitude(totals.prompt_tokens),
                units.share(totals.resumed_tokens, totals.prompt_tokens),
                style.bar(totals.resumed_tokens, totals.prompt_tokens, 10),
                format_size(totals.written_bytes),
            )
        )
    heads = (by.capitalize(), "lookups", "hits", "tokens", "resumed", "", "written")
    return _headed(table(heads, rows, right=[*heads[1:5], "written"]))


def _name(by: str, key: str, label: str, now: float) -> str:
    if by == "hour":
        return when(float(key), now)
    if by == "space":
        return f"{key[:6]}… {shortened(label, 14)}".rstrip()
    return shortened(key, 26) if by == "model" else cut(key, 26)


def notes(gaps: Gaps) -> str:
    """What the numbers cannot vouch for; empty where that is nothing."""
    return "\n".join(f"note: {line}" for line in note_lines(gaps))


def note_lines(gaps: Gaps) -> list[str]:
    """The same, one by one."""
    said = []
    if gaps.unreadable:
        said.append(f"not counted: {plural(gaps.unreadable, 'record')} that cannot be read")
    if gaps.lost:
        said.append(f"not counted: {plural(gaps.lost, 'event')} that could not be written")
    if gaps.jumps:
        said.append(f"the clock went back {plural(gaps.jumps, 'time')}; hours may be wrong")
    if gaps.ahead:
        said.append(f"{plural(gaps.ahead, 'event')} of the future; check the clock")
    if gaps.trimmed:
        said.append(f"not counted: {plural(gaps.trimmed, 'older event')}, no longer remembered")
    return said


def plural(number: int, what: str) -> str:
    """A number of things: ``1 event``, ``2 events``."""
    return f"{units.magnitude(number)} {what}{'' if number == 1 else 's'}"


def when(moment: float, now: float) -> str:
    """A time of day, with the date where that is another: ``14:02``, ``Nov 28 14:02``."""
    there, here = time.localtime(moment), time.localtime(now)
    if there[:3] == here[:3]:
        return time.strftime("%H:%M", there)
    return time.strftime("%b %d %H:%M" if there[0] == here[0] else "%Y-%m-%d %H:%M", there)


def cut(text: str, width: int) -> str:
    """The beginning of ``text``, in at most ``width`` characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def cut_id(request: str, width: int) -> str:
    """The end of a request id, in at most ``width`` characters: ids often begin alike."""
    return request if len(request) <= width else f"…{request[len(request) - width + 1 :]}"


def shortened_line(text: str) -> str:
    """One line of at most the report's width."""
    return cut(text.replace("\n", " "), WIDTH)


def _headed(said: str) -> str:
    head, _, rest = said.partition("\n")
    return f"{style.bold(head)}\n{rest}"


def _more(number: int) -> list[str]:
    return [f"… and {number - MOST} more; --json has all"] if number > MOST else []
