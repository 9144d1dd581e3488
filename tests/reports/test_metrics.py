"""Prometheus text: what it counts, that its labels are bounded, and the dashboard beside it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.cli import main
from kvkeep.hooks.metrics import Lookup, Metrics
from kvkeep.prefixstore import events as events_module
from kvkeep.prefixstore.metrics import MOST_SPACES, NAMES
from kvkeep.prefixstore.policy import Reason
from tests.reports.raw import Raw
from tests.reports.stores import event, opened, space_of, write

ROOT = Path(__file__).parents[2]
Filled = tuple[Path, dict[str, str]]
Found = dict[str, list[tuple[dict[str, str], float]]]


def parsed(text: str) -> Found:
    """Samples by name, as Prometheus' own client reads them."""
    found: Found = defaultdict(list)
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return found


def metrics(store: Path, *words: str) -> Found:
    result = CliRunner().invoke(main, ["report", "--prometheus", *words, "--store", str(store)])
    assert result.exit_code == 0, result.output
    return parsed(result.stdout)


def total(found: Found, name: str, **labels: str) -> float:
    return sum(v for have, v in found[name] if labels.items() <= have.items())


def test_counters_are_the_sums_of_the_raw_events(filled: Filled) -> None:
    store, spaces = filled
    raw, found = Raw(store), metrics(store)
    due = {
        "kvkeep_hits_total": "hits",
        "kvkeep_prompt_tokens_total": "prompt_tokens",
        "kvkeep_matched_tokens_total": "matched_tokens",
        "kvkeep_saved_seconds_total": "saved_seconds",
        "kvkeep_lookup_seconds_total": "lookup_seconds",
        "kvkeep_restore_seconds_sum": "restore_seconds",
        "kvkeep_restore_seconds_count": "restores",
        "kvkeep_restored_bytes_total": "restored_bytes",
        "kvkeep_stored_tokens_total": "stored_tokens",
        "kvkeep_stored_bytes_total": "written_bytes",
        "kvkeep_evicted_tokens_total": "evicted_tokens",
        "kvkeep_evicted_bytes_total": "evicted_bytes",
        "kvkeep_regret_tokens_total": "regret_tokens",
        "kvkeep_lookups_total": "lookups",
        "kvkeep_snapshots_total": "snapshots",
        "kvkeep_resumed_tokens_total": "resumed_tokens",
    }
    whole = raw.sums()
    for name, key in due.items():
        assert total(found, name) == pytest.approx(whole[key]), name
        for space in spaces.values():
            mine = raw.sums("space = :id", id=space)
            assert total(found, name, space=space[:12]) == pytest.approx(mine[key]), name
    assert total(found, "kvkeep_lost_tokens_total") == (
        whole["prompt_tokens"] - whole["resumed_tokens"]
    )
    refused = total(found, "kvkeep_snapshots_total", outcome="refused")
    assert refused == whole["snapshots_refused"] > 0
    known = total(found, "kvkeep_snapshots_total", outcome="already_stored")
    assert known == whole["snapshots_known"]
    for tier, tokens in raw.by("tier", "resumed", "what = 'lookup' and resumed > 0").items():
        assert total(found, "kvkeep_resumed_tokens_total", tier=tier) == tokens
    full = raw.sums("reason = 'full'")["lookups"]
    assert total(found, "kvkeep_lookups_total", reason="full") == full
    rated = raw.rows(
        "select count(*) as n from events where seconds <= 0.25 and "
        "(what = 'restore' or (what = 'lookup' and resumed > 0))"
    )
    assert total(found, "kvkeep_restore_seconds_bucket", le="0.25") == rated[0]["n"]
    assert found["kvkeep_store_bytes"][0][1] > 0


def test_every_metric_is_named_described_and_documented(filled: Filled) -> None:
    found = metrics(filled[0])
    page = (ROOT / "docs/reports.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(kvkeep_\w+)` \| [^|]* \| ([^|]+) \|$", page, re.MULTILINE))
    assert documented == dict(NAMES)
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}
    assert bare <= set(NAMES)
    assert len(bare) > 15


def test_labels_come_out_of_bounded_sets(tmp_path: Path) -> None:
    def spaces(first: int, number: int) -> None:
        for i in range(first, first + number):
            name = (i + 1).to_bytes(2, "big") * 8
            write(store, event(space=name, prompt=10, matched=4, resumed=4, reason=f"new_{i}:x"))

    with opened(tmp_path / "s") as store:
        spaces(1000, MOST_SPACES)
        before = parsed(store.metrics())
        spaces(0, 70)
        after = parsed(store.metrics())
    labels = {have["space"] for have, _ in after["kvkeep_hits_total"]}
    assert len(labels) == MOST_SPACES + 1
    assert total(after, "kvkeep_prompt_tokens_total") == 10 * (MOST_SPACES + 70)
    assert total(after, "kvkeep_prompt_tokens_total", space="other") == 700
    reasons = {have["reason"] for have, _ in after["kvkeep_lookups_total"]}
    assert reasons == {*map(str, Reason), "other"}
    for name, samples in before.items():
        if name.endswith("_total"):
            for have, value in samples:
                assert total(after, name, **have) >= value, (name, have)


def test_counters_do_not_fall_when_the_ring_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "RING", 10)
    with opened(tmp_path / "s") as store:
        seen = 0.0
        for at in range(0, 60, 6):
            write(store, *(event(at=at + i, prompt=7) for i in range(6)))
            now = total(parsed(store.metrics()), "kvkeep_prompt_tokens_total")
            assert now == seen + 42
            seen = now
        assert store.report().total.prompt_tokens == 70


def test_names_of_models_are_escaped(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space_of(store, name='a "quoted\\" name\nof two lines').resume([1, 2, 3])
        found = parsed(store.metrics())
    assert found["kvkeep_hits_total"][0][0]["model"] == 'a "quoted\\" name\nof two lines'


def test_counters_of_one_tenant_tell_of_no_other(filled: Filled) -> None:
    store, spaces = filled
    found = metrics(store, "--salt", "red")
    mine = {space[:12] for name, space in spaces.items() if name.endswith("/red")}
    assert {have["space"] for samples in found.values() for have, _ in samples if have} == mine
    assert "kvkeep_store_bytes" not in found
    assert "kvkeep_quarantined_records" not in found


def test_a_servers_counters_have_the_same_names() -> None:
    counted = Metrics()
    counted.look_up(Lookup("full", "store", 100, 80, 80, 0.02, 1.5))
    counted.look_up(Lookup("no_prefix", "none", 50, 0, 0, 0.01, 0.0))
    counted.snapshot("stored", 4096)
    counted.fail("lookup")
    found = parsed(counted.prometheus({"kvkeep_memory_bytes": 12, "kvkeep_queue_bytes": 0}))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in found} <= set(NAMES)
    assert total(found, "kvkeep_prompt_tokens_total") == 150
    assert total(found, "kvkeep_lost_tokens_total") == 70
    assert total(found, "kvkeep_restore_seconds_count") == 1
    assert total(found, "kvkeep_restore_seconds_bucket", le="0.025") == 1
    assert total(found, "kvkeep_restore_seconds_bucket", le="0.01") == 0


def test_options_that_contradict_are_usage_errors(filled: Filled) -> None:
    for words in (
        ("--prometheus", "--json"),
        ("--csv", "--json"),
        ("--prometheus", "--since", "1h"),
    ):
        result = CliRunner().invoke(main, ["report", *words, "--store", str(filled[0])])
        assert result.exit_code == 2


DASHBOARD = ROOT / "examples/grafana-dashboard.json"


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return panels


def test_the_dashboard_is_read_by_grafanas_own_model() -> None:
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    plugins.register_default_plugins()
    given = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    read = dashboard.Dashboard.from_json(given)
    again = json.loads(JSONEncoder().encode(read))
    assert _within(given, again) == []
    assert len(read.panels) == len(_panels()) > 10


def _within(given: Any, again: Any, at: str = "") -> list[str]:
    """Where ``again`` lacks something of ``given``."""
    if isinstance(given, dict):
        return [x for k, v in given.items() for x in _within(v, again.get(k), f"{at}.{k}")]
    if isinstance(given, list):
        pairs = zip(given, again, strict=True)
        return [x for i, (a, b) in enumerate(pairs) for x in _within(a, b, f"{at}[{i}]")]
    return [] if given == again else [at]


def test_the_dashboard_asks_only_for_metrics_that_there_are() -> None:
    asked: set[str] = set()
    labels: set[str] = set()
    for panel in _panels():
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            names = re.findall(r"kvkeep_\w+", target["expr"])
            assert names
            assert target["expr"].count("(") == target["expr"].count(")")
            asked |= {re.sub(r"_bucket$", "", name) for name in names}
            labels |= set(re.findall(r"by \((\w+)\)", target["expr"]))
    assert asked <= set(NAMES)
    assert len(asked) > 15
    assert labels <= {"model", "reason", "tier", "outcome", "doing", "le"}


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in _panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in _panels()}) == len(_panels())
