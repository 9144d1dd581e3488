"""Every output says the same, and the same as the raw events summed in SQL."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvkeep.cli import main
from kvkeep.cli.report_data import NUMBERS
from tests.reports.raw import Raw

Filled = tuple[Path, dict[str, str]]


def run(store: Path, *words: str, command: str = "report") -> Result:
    result = CliRunner().invoke(main, [command, *words, "--store", str(store), "--debug"])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def ask(store: Path, *words: str) -> Any:
    return json.loads(run(store, *words, "--json").stdout)


def agrees(found: dict[str, Any], due: dict[str, Any]) -> None:
    assert {name: found[name] for name in NUMBERS} == {
        name: pytest.approx(due[name], rel=1e-9, abs=1e-9) for name in NUMBERS
    }


def test_totals_are_the_sums_of_the_raw_events(filled: Filled) -> None:
    store, _ = filled
    raw = Raw(store)
    due = raw.sums()
    assert due["lookups"] > 1000
    assert all(due[name] for name in NUMBERS)
    report = ask(store)
    agrees(report, due)
    assert report["reasons"] == raw.by("reason", "1", "what = 'lookup'")
    assert report["lost_tokens"] == raw.by("reason", "prompt - resumed", "what = 'lookup'")
    limited = raw.by("iif(kinds = '', 'none', kinds)", "prompt - resumed", "what = 'lookup'")
    assert report["limited_by"] == limited
    assert report["tiers"] == raw.by("tier", "resumed", "what = 'lookup' and resumed > 0")
    refused = raw.by("1", "1", "what = 'snapshot' and reason like '%does not fit'")
    assert report["refusals"] == {"A snapshot of … does not fit": refused[1]}


def test_every_group_is_the_sum_of_its_raw_events(filled: Filled) -> None:
    store, _ = filled
    raw, report = Raw(store), ask(store)
    for space in report["spaces"]:
        agrees(space, raw.sums("space = :id", id=space["space"]))
    for group in report["by_reason"]:
        due = raw.sums("what = 'lookup' and reason = :r", r=group["reason"])
        agrees(group["totals"], due)
    for group in report["hours"]:
        start = group["start"]
        agrees(group["totals"], raw.sums("time >= :a and time < :b", a=start, b=start + 3600))
    for name, key in (("models", "model"), ("kinds", "kinds")):
        for group in report[name]:
            mine = [
                s for s in report["spaces"] if (s["label"] or "(no name)") == group.get("model")
            ]
            mine = (
                mine
                if key == "model"
                else [s for s in report["spaces"] if s["kinds"] == group["kinds"]]
            )
            ids = ",".join(f"'{s['space']}'" for s in mine)
            assert mine
            agrees(group["totals"], raw.sums(f"space in ({ids})"))
    for name in ("spaces", "models", "kinds", "hours"):
        parts = [group.get("totals", group) for group in report[name]]
        for number in NUMBERS:
            if not number.endswith("rate"):
                assert sum(p[number] for p in parts) == pytest.approx(report[number]), name


def test_a_report_since_a_time_counts_from_then_on(filled: Filled) -> None:
    store, _ = filled
    report = ask(store, "--since", "7h")
    due = Raw(store).sums(since=report["since"])
    agrees(report, due)
    assert 0 < due["lookups"] < Raw(store).sums()["lookups"]
    assert report["since"] == pytest.approx(time.time() - 7 * 3600, abs=600)


def test_the_csv_has_the_numbers_of_the_json(filled: Filled) -> None:
    store, _ = filled
    report = ask(store)
    rows = list(csv.DictReader(io.StringIO(run(store, "--csv").stdout)))
    total, *parts = rows
    assert total["group"] == "total"
    for name in NUMBERS:
        assert float(total[name]) == pytest.approx(report[name])
    due = {("space", s["space"]): s for s in report["spaces"] if s["lookups"] or s["snapshots"]}
    due |= {("model", m["model"]): m["totals"] for m in report["models"]}
    due |= {("kind", ",".join(k["kinds"])): k["totals"] for k in report["kinds"]}
    due |= {("reason", r["reason"]): r["totals"] for r in report["by_reason"]}
    due |= {("hour", str(h["start"])): h["totals"] for h in report["hours"]}
    assert {(row["group"], row["key"]) for row in parts} == set(due)
    for row in parts:
        for name in NUMBERS:
            assert float(row[name]) == pytest.approx(due[row["group"], row["key"]][name])


def number(text: str) -> Any:
    """What a shown number stands for, as exact as it is shown."""
    value, _, unit = text.replace(",", "").partition(" ")
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]
    return pytest.approx(float(value) * scale, rel=0, abs=0.0501 * scale if unit else 0)


def test_the_text_has_the_numbers_of_the_json(filled: Filled) -> None:
    store, _ = filled
    report, shown = ask(store), run(store).stdout
    counted = r"([\d,.]+(?: [kMG])?)"
    found = re.search(
        rf"Lookups {counted} +Prompt tokens {counted} +Resumed {counted}  ([\d.]+) %", shown
    )
    assert found is not None
    due = [report[n] for n in ("lookups", "prompt_tokens", "resumed_tokens")]
    assert [number(x) for x in found.groups()[:3]] == due
    assert float(found[4]) == pytest.approx(100 * report["hit_rate"], abs=0.051)
    lost = dict(re.findall(rf"^  (\S+) +{counted} +[\d.]+ %", shown, re.MULTILINE))
    expected = {r: n for r, n in report["lost_tokens"].items() if r != "last_token"}
    assert {r: number(n) for r, n in lost.items()} == expected
    hours = run(store, "--by", "hour").stdout.split("\n\n")[1].splitlines()[1:]
    counts = [int(re.split(r" {2,}", line)[1]) for line in hours]
    assert counts == [h["totals"]["lookups"] for h in report["hours"]]


@pytest.mark.parametrize("by", ["space", "model", "kind", "reason", "hour"])
def test_the_text_fits_80_columns_without_colour(filled: Filled, by: str) -> None:
    store, _ = filled
    for words in ((), ("--by", by), ("--since", "1h", "--by", by)):
        shown = run(store, *words).stdout
        assert max(map(len, shown.splitlines())) <= 80
        assert "\x1b" not in shown


def test_the_worst_requests_are_the_worst(filled: Filled) -> None:
    store, _ = filled
    raw = Raw(store)
    rows = raw.rows(
        "select request, prompt - resumed as lost from events where what = 'lookup' "
        "order by lost desc limit 8"
    )
    worst = ask(store, "--worst", "8")["worst"]
    assert [w["lost_tokens"] for w in worst] == [row["lost"] for row in rows]
    assert {w["request"] for w in worst} == {row["request"] for row in rows}
    assert ask(store, "--worst", "0")["worst"] == []


def test_needed_bytes_are_those_of_resumed_paths(filled: Filled) -> None:
    store, spaces = filled
    report = ask(store)
    kept = {s["space"]: s for s in report["spaces"]}
    assert 0 < report["needed_bytes"] < report["used_bytes"]
    for space in spaces.values():
        assert 0 < kept[space]["needed_bytes"] <= kept[space]["kept_bytes"]
