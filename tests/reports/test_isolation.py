"""A report for one salt shows nothing of another, in any of its forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvkeep.cli import main
from kvkeep.prefixstore.identity import salt_digest
from tests.reports.raw import Raw

Filled = tuple[Path, dict[str, str]]

FORMS = {
    "report": ("report", "--worst", "500"),
    "report by space": ("report", "--by", "space", "--by", "model", "--by", "hour"),
    "json": ("report", "--json", "--worst", "500"),
    "csv": ("report", "--csv"),
    "prometheus": ("report", "--prometheus"),
    "top": ("top", "--once"),
    "top json": ("top", "--json"),
    "tree": ("tree", "--limit", "500"),
    "tree json": ("tree", "--json"),
}


def output(store: Path, *words: str) -> str:
    result = CliRunner().invoke(main, [*words, "--store", str(store), "--debug"])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mine", ["red", "blue"])
def test_no_form_names_another_tenants_spaces_or_requests(
    filled: Filled, form: str, mine: str
) -> None:
    store, spaces = filled
    shown = output(store, *FORMS[form], "--salt", mine)
    others = {name: space for name, space in spaces.items() if not name.endswith(f"/{mine}")}
    assert not [name for name, space in others.items() if space[:6] in shown]
    for tenant in {"None", "red", "blue"} - {mine}:
        assert f"-{tenant}-" not in shown
    assert "made-" not in shown
    if form not in ("report by space",):
        ids = [s for n, s in spaces.items() if n.endswith(f"/{mine}")]
        assert any(space[:6] in shown for space in ids) or f"-{mine}-" in shown


def test_numbers_of_a_tenant_are_its_own(filled: Filled) -> None:
    store, spaces = filled
    report = json.loads(output(store, "report", "--json", "--salt", "red"))
    ids = [space for name, space in spaces.items() if name.endswith("/red")]
    due = Raw(store).sums(f"space in ({','.join(repr(i) for i in ids)})")
    for name in ("lookups", "prompt_tokens", "resumed_tokens", "written_bytes", "restored_bytes"):
        assert report[name] == due[name] > 0
    assert report["used_bytes"] == sum(s["kept_bytes"] for s in report["spaces"])
    assert {s["space"] for s in report["spaces"]} == set(ids)
    assert report["quarantined"] is None
    assert (report["gaps"]["trimmed"], report["gaps"]["lost"]) == (0, 0)


def test_what_one_tenant_does_changes_nothing_for_another(tmp_path: Path) -> None:
    from tests.faults.rows import tokens_of
    from tests.reports.stores import keep, opened, space_of

    def red() -> str:
        told = json.loads(output(tmp_path / "s", "report", "--json", "--salt", "red"))
        return json.dumps({k: v for k, v in told.items() if k != "until"})

    with opened(tmp_path / "s") as store:
        space = space_of(store, salt="red")
        keep(space, "plain", tokens_of(0, 80))
        space.resume(tokens_of(0, 90))
    before = red()
    with opened(tmp_path / "s") as store:
        for salt in ("blue", None):
            space = space_of(store, salt=salt)
            for conversation in range(5):
                keep(space, "plain", tokens_of(conversation, 80))
                space.resume(tokens_of(conversation, 90))
    assert red() == before


def test_without_any_space_a_tenants_report_is_empty(filled: Filled) -> None:
    report = json.loads(output(filled[0], "report", "--json", "--salt", "nobody"))
    assert (report["lookups"], report["used_bytes"], report["spaces"]) == (0, 0, [])
    assert salt_digest("nobody") not in json.dumps(report)


def test_one_space_can_be_chosen_by_the_beginning_of_its_id(filled: Filled) -> None:
    store, spaces = filled
    space = spaces["plain/red"]
    report = json.loads(output(store, "report", "--json", "--space", space[:8]))
    assert [s["space"] for s in report["spaces"]] == [space]
    assert report["lookups"] == Raw(store).sums("space = :s", s=space)["lookups"]
    wrong = ["report", "--space", "zz", "--store", str(store)]
    assert CliRunner().invoke(main, wrong).exit_code == 2
    hidden = ["report", "--space", space[:8], "--salt", "blue", "--store", str(store)]
    assert "No space has the id" in CliRunner().invoke(main, hidden).stderr
