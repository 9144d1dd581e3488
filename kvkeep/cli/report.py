"""``kvkeep report``: what the lookups saved, and what they lost and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli import options, report_data, report_text, units
from kvkeep.cli.lookup import find_report_space
from kvkeep.cli.output import emit
from kvkeep.cli.stores import open_existing
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.store import Store

GROUPS = ("space", "model", "kind", "reason", "hour")


@click.command("report")
@click.option(
    "--since",
    callback=options.parsed(units.parse_duration),
    metavar="TIME",
    help="Only the last 24h, 7d …; all that is remembered without it.",
)
@options.which_spaces
@click.option(
    "--by",
    type=click.Choice(GROUPS),
    multiple=True,
    help="Show the totals split so, in place of reasons and requests. May be repeated.",
)
@click.option(
    "--worst",
    type=click.IntRange(min=0),
    metavar="N",
    default=5,
    show_default=True,
    help="Name the N lookups that lost most.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print totals by group, for a spreadsheet.")
@click.option(
    "--prometheus",
    is_flag=True,
    help="Print counters since the store was made, for Prometheus (docs/reports.md).",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write one page with charts to FILE, replacing it; needs plotly.",
)
@options.common
def command(
    since: float | None,
    space: str | None,
    salt: str | None,
    by: tuple[str, ...],
    worst: int,
    as_csv: bool,
    prometheus: bool,
    html_file: Path | None,
    store: Path,
    as_json: bool,
) -> None:
    """Show what the store saved, and where it could not.

    Every number is a sum over the same lookups. Tokens that were not resumed are counted
    under the reason of their lookup, each with what would help. `kvkeep why` explains one
    lookup.

    \b
    Example:
      kvkeep report
      kvkeep report --since 24h --by hour
      kvkeep report --space 4f2a --json
      kvkeep report --since 7d --html report.html
    """
    if as_csv + as_json + prometheus + (html_file is not None) > 1:
        raise click.UsageError("Choose one of --json, --csv, --prometheus and --html.")
    if prometheus and since is not None:
        raise click.UsageError("--prometheus counts from the beginning; leave --since out.")
    with open_existing(store) as opened:
        start = 0.0 if since is None else time.time() - since
        named = chosen_space(opened, space, salt)
        if prometheus:
            click.echo(opened.metrics(salt=salt, space=named), nl=False)
            return
        if html_file is not None:
            click.echo(_page(opened, html_file, start, salt, named))
            return
        report = opened.report(start, salt=salt, space=named, worst=worst)
    if as_csv:
        click.echo(report_data.as_csv(report), nl=False)
    else:
        emit(as_json, report_data.as_json(report), report_text.text(report, by))


def chosen_space(opened: Store, start: str | None, salt: str | None) -> str | None:
    """The whole id of the space that begins with ``start``, among those of ``salt``."""
    if start is None:
        return None
    return find_report_space(opened.report(worst=0, salt=salt), start)


def _page(opened: Store, file: Path, start: float, salt: str | None, space: str | None) -> str:
    """Write the page to ``file``, and say so."""
    from kvkeep.cli.page import write
    from kvkeep.cli.page.collect import Collected

    seen = Collected()
    report = opened.report(start, salt=salt, space=space, each=seen)
    trees = {x.id: opened.tree(x.id) for x in report.spaces.values() if x.kept_bytes}
    size = write.write(file, write.page(report, seen, trees))
    return f"Wrote {file}  {format_size(size)}"
