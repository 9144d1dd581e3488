"""Stores that are not as they should be: a clear error or a marked gap, never a wrong total."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner, Result

from kvkeep.cli import main
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.events import LAST, NUMBER, TOTALS, all_totals
from tests.reports.raw import Raw
from tests.reports.stores import SPACE, event, opened, write

COMMANDS = (("report",), ("report", "--prometheus"), ("top",), ("tree",), ("why", "x"))


def run(store: Path, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--store", str(store)])


def ask(store: Path, *words: str) -> Any:
    result = run(store, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_store_of_another_version_is_refused_by_name(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with opened(tmp_path / "s") as store:
        write(store, event(prompt=5))
    marker = tmp_path / "s/store.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"kvkeep": 99}))
    result = run(tmp_path / "s", *words)
    assert result.exit_code == 7
    assert "store format 99" in result.stderr
    assert "Upgrade kvkeep" in result.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_folder_that_is_no_store_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    for folder in (tmp_path / "other", tmp_path / "missing"):
        result = run(folder, *words)
        assert result.exit_code == 6
        assert result.stderr.startswith("error: ")


RUBBISH = (
    b"",
    b"\xc1",
    b"\xff" * 40,
    msgpack.packb("text"),
    msgpack.packb({"what": "lookup"}),
    msgpack.packb(["lookup"]),
    msgpack.packb(["lookup", "soon", SPACE, "full"]),
    msgpack.packb(["lookup", 1.0, "no bytes", "full"]),
    msgpack.packb(["lookup", 1.0, SPACE, "full", 10, 20, 30]),
    msgpack.packb(["lookup", 1.0, SPACE, "full", -1]),
    msgpack.packb(["lookup", float("nan"), SPACE, "full", 1, 1, 1]),
    msgpack.packb(["snapshot", 1.0, SPACE, "stored", 1, 0, 0, -5]),
)


def test_unreadable_records_are_left_out_and_said(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        write(store, *(event(at=i, prompt=10, matched=4, resumed=4) for i in range(20)))
        with store.env.begin(write=True) as txn:
            last = layout.from_pair(list(txn.keys("events"))[-1])[0]
            for i, bad in enumerate(RUBBISH):
                txn.put("events", layout.pair(last + 1 + i, 10**6 + i), bad)
        write(store, event(at=30, prompt=10, matched=4, resumed=4))
    report = ask(tmp_path / "s", "report")
    assert report["gaps"]["unreadable"] == len(RUBBISH)
    assert (report["lookups"], report["prompt_tokens"], report["resumed_tokens"]) == (21, 210, 84)
    shown = run(tmp_path / "s", "report").stdout
    assert f"note: not counted: {len(RUBBISH)} records that cannot be read" in shown
    assert ask(tmp_path / "s", "top")["windows"]


def test_an_event_of_a_kind_that_is_not_known_counts_nowhere(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        write(store, event(prompt=10), event("tomorrow", prompt=10**9, resumed=5, nbytes=77))
    report = ask(tmp_path / "s", "report")
    assert (report["lookups"], report["prompt_tokens"]) == (1, 10)
    assert report["restored_bytes"] == report["written_bytes"] == 0


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x81\xa7lookups\xff", b"\xa4text"])
def test_damaged_totals_begin_anew_and_the_ring_still_counts(tmp_path: Path, damage: bytes) -> None:
    with opened(tmp_path / "s") as store:
        write(store, *(event(at=i, prompt=10) for i in range(5)))
        with store.env.begin(write=True) as txn:
            txn.put("meta", TOTALS + SPACE, damage)
        assert run(tmp_path / "s", "report", "--prometheus").exit_code == 0
        write(store, event(at=9, prompt=10))
        with store.env.begin() as txn:
            assert all_totals(txn)[SPACE].lookups == 1
    report = ask(tmp_path / "s", "report")
    assert (report["lookups"], report["prompt_tokens"]) == (6, 60)


def test_missing_counters_are_counted_again(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        write(store, *(event(at=i, prompt=10) for i in range(5)))
        with store.env.begin(write=True) as txn:
            for name in (NUMBER, LAST):
                txn.delete("meta", name.encode())
        write(store, event(at=9, prompt=10))
        with store.env.begin() as txn:
            assert all_totals(txn)[SPACE].lookups == 6
    assert ask(tmp_path / "s", "report")["gaps"]["trimmed"] == 0


def test_clocks_that_jump_are_said_and_change_no_total(tmp_path: Path) -> None:
    import time

    at = time.time() - 1_790_000_000
    with opened(tmp_path / "s") as store:
        for shift in (-86_400, -3600 * 30, +7200, -60):
            write(store, *(event(at=at + shift + i, prompt=10) for i in range(3)))
    report = ask(tmp_path / "s", "report")
    assert (report["lookups"], report["prompt_tokens"]) == (12, 120)
    assert (report["gaps"]["jumps"], report["gaps"]["ahead"]) == (2, 3)
    assert sum(h["totals"]["lookups"] for h in report["hours"]) == 12
    shown = run(tmp_path / "s", "report").stdout
    assert "note: the clock went back 2 times" in shown
    assert "note: 3 events of the future" in shown
    recent = ask(tmp_path / "s", "report", "--since", "1h")
    assert recent["lookups"] == Raw(tmp_path / "s").sums(since=recent["since"])["lookups"] == 6


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_store_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        write(store, event(prompt=5))
    (tmp_path / "s/data.mdb").chmod(0)
    result = run(tmp_path / "s", "report")
    assert result.exit_code == 6


def test_a_reader_that_may_not_write_still_reports(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        write(store, event(prompt=5))
    for name in ("data.mdb", "lock.mdb", "store.json"):
        (tmp_path / "s" / name).chmod(0o400)
    (tmp_path / "s").chmod(0o500)
    try:
        assert ask(tmp_path / "s", "report")["lookups"] == 1
    finally:
        (tmp_path / "s").chmod(0o700)
