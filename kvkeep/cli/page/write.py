"""The page itself: one file with its style, its script, plotly.js and the numbers in it."""

from __future__ import annotations

import html
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep._version import __version__
from kvkeep.cli.page import figures, tables
from kvkeep.cli.page.collect import RECENT, Collected
from kvkeep.cli.page.icicle import boxes
from kvkeep.cli.report_text import note_lines, plural
from kvkeep.cli.tables import shortened
from kvkeep.cli.units import count, share
from kvkeep.errors import KvkeepError

if TYPE_CHECKING:
    from kvkeep.cli.page.figures import Figure
    from kvkeep.prefixstore.report import Report
    from kvkeep.prefixstore.tree import Branch

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is loaded from anywhere: the browser itself sees to it."""


class ChartsMissing(KvkeepError):
    """The library that draws the charts is not installed."""

    exit_code = 5
    remedy = "Install it: pip install plotly. The other forms of the report need nothing."


class PageNotWritten(KvkeepError):
    """The file of the page cannot be written."""

    exit_code = 5
    remedy = "Name a file in a folder that exists and that you may write to."


def page(report: Report, seen: Collected, trees: Mapping[str, Sequence[Branch]]) -> str:
    """The whole page. Raises ``ChartsMissing``."""
    labels = _labels(report)
    pieces, width = seen.slices(), seen.width
    parts = boxes(list(report.spaces.values()), trees, labels)
    lost = {reason: n for reason, n in report.total.lost_tokens.items() if n}
    drawn: dict[str, Figure] = {}
    body = [tables.totals(report), _notes(report)]
    if pieces:
        drawn["chart-rate"] = figures.hit_rate(pieces, width)
        drawn["chart-tokens"] = figures.tokens(pieces, width)
        body.append(
            _section(
                "Hit rate over time",
                "chart-rate",
                _over_time(report, width),
                _more(tables.slices(pieces, width)),
            )
        )
        body.append(
            _section(
                "Tokens over time",
                "chart-tokens",
                f"{count(report.total.prompt_tokens)} tokens were asked for and "
                f"{count(report.total.resumed_tokens)} of them resumed; the rest was read.",
            )
        )
    else:
        body.append("<section><h2>Lookups</h2><p>Nothing was looked up yet.</p></section>")
    if lost:
        drawn["chart-lost"] = figures.lost(lost)
        most = max(lost, key=lambda reason: lost[reason])
        said = f"{count(sum(lost.values()))} tokens were not resumed; the largest part: {most}."
        body.append(_section("Where tokens were lost", "chart-lost", said, tables.lost(report)))
    if parts:
        drawn["chart-stored"] = figures.stored(parts)
        said = (
            "Each box is a run of tokens; below it lies what continues it. Width is bytes, and "
            "colour is how many conversations share it. A click enlarges a box."
        )
        body.append(
            _section("What is stored and shared", "chart-stored", said, _more(tables.stored(parts)))
        )
    else:
        body.append("<section><h2>What is stored</h2><p>Nothing is stored.</p></section>")
    if seen.restores:
        drawn["chart-restores"] = figures.restores(seen.restores)
        said = plural(seen.restored, "restore")
        if seen.restored > len(seen.restores):
            said += f", of which {count(len(seen.restores))} are shown"
        body.append(
            _section(
                "Time of a restore",
                "chart-restores",
                f"{said}. Both axes are logarithmic.",
                _more(tables.restores(seen.restores)),
            )
        )
    if report.spaces:
        body.append(f"<section><h2>Spaces</h2>{tables.spaces(report)}</section>")
    if seen.recent:
        body.append(_recent(report, seen, labels))
    return _document(report, "\n".join(filter(None, body)), drawn)


def write(file: Path, text: str) -> int:
    """Write the page whole or not at all; its bytes. Raises ``PageNotWritten``."""
    try:
        handle, made = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
            Path(made).replace(file)
        except BaseException:
            Path(made).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PageNotWritten(f"{file} cannot be written: {error.strerror}") from error
    return file.stat().st_size


def charts_library() -> str:
    """The source of plotly.js, as the package brings it. Raises ``ChartsMissing``."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ChartsMissing("The page needs plotly for its charts") from error
    return str(get_plotlyjs())


def _labels(report: Report) -> dict[str, str]:
    """Models by space, with the id where two spaces have the same name."""
    names = {s: shortened(label, 40) or s[:6] for s, label in report.labels.items()}
    often = [name for name in names.values() if list(names.values()).count(name) > 1]
    return {s: f"{name} ({s[:6]})" if name in often else name for s, name in names.items()}


def _over_time(report: Report, width: int) -> str:
    total = report.total
    return (
        f"In all {share(total.resumed_tokens, total.prompt_tokens)} of the tokens and "
        f"{share(total.hits, total.lookups)} of the lookups were resumed. "
        f"Each point stands for {tables.span(width)}."
    )


def _section(title: str, chart: str, said: str, *more: str) -> str:
    said = html.escape(said)
    return (
        f'<section aria-labelledby="{chart}-title"><h2 id="{chart}-title">{html.escape(title)}</h2>'
        f'<figure><figcaption class="about">{said}</figcaption>'
        f'<div class="chart" id="{chart}" role="img" aria-label="{html.escape(title)}. {said}">'
        f"</div></figure>{''.join(more)}</section>"
    )


def _more(table: str) -> str:
    return f"<details><summary>Numbers of this chart</summary>{table}</details>"


def _notes(report: Report) -> str:
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in note_lines(report.gaps))
    return f'<section class="notes"><h2>Notes</h2><ul>{lines}</ul></section>' if lines else ""


def _recent(report: Report, seen: Collected, labels: dict[str, str]) -> str:
    newest = list(seen.recent)[::-1]
    whole = report.total.lookups
    said = f"The last {count(len(newest))} of {count(whole)}." if whole > RECENT else ""
    return f"""<section aria-labelledby="recent-title">
<h2 id="recent-title">Recent lookups</h2>
<p class="about">{said} <code>kvkeep why REQUEST</code> explains one of them.</p>
<form class="filters" role="search" aria-label="Filter the lookups" onsubmit="return false">
<label>Find text <input type="search" id="find" autocomplete="off"></label>
<label>Model <select id="model"><option value="">all</option></select></label>
<label>Reason <select id="reason"><option value="">all</option></select></label>
<label>Lost at least <input type="number" id="lost-least" min="0" step="1" value="0"></label>
<output id="shown" aria-live="polite"></output>
</form>
{tables.recent(newest, labels)}
</section>"""


def _document(report: Report, body: str, drawn: Mapping[str, Figure]) -> str:
    files = resources.files("kvkeep.cli.page")
    style = (files / "page.css").read_text(encoding="utf-8")
    script = (files / "page.js").read_text(encoding="utf-8")
    library = charts_library() if drawn else ""
    data = json.dumps(drawn, ensure_ascii=False).replace("<", "\\u003c")
    made = f"{figures.moment(report.until)} {time.strftime('%Z')}"
    begin = report.since or report.gaps.oldest
    period = f"From {figures.moment(begin)} to {made}" if begin else f"Made {made}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>kvkeep report</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<header>
<div><h1>kvkeep report</h1><p>{html.escape(period)}</p></div>
<label>Theme <select id="theme">
<option value="system">as the system</option>
<option value="light">light</option>
<option value="dark">dark</option>
</select></label>
</header>
<main id="main" tabindex="-1">
{body}
</main>
<footer>Made by kvkeep {__version__}. This page holds all it needs and asks no other host for
anything.
It holds no text of any prompt.</footer>
<script type="application/json" id="figures">{data}</script>
<script>{library}</script>
<script>
{script}</script>
</body>
</html>
"""
