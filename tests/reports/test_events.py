"""The ring: bounded, ordered by writing, shared, always on, and free of prompts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvkeep.errors import StoreFull
from kvkeep.prefixstore import events as events_module
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.events import Rate, all_totals, read_events
from tests.faults.rows import tokens_of
from tests.reports.stores import NOW, event, keep, opened, ring, space_of, write

STEP = 7


def test_lookups_and_snapshots_leave_whole_records(tmp_path: Path) -> None:
    tokens = tokens_of(0, 120)
    with opened(tmp_path / "s") as store:
        space = space_of(store, "recurrent")
        keep(space, "recurrent", tokens[:100], origin="boundary", request="r1")
        space.measured(500, 2.0)
        hit = space.resume(tokens[:115], request="r2")
        missed = space.resume(tokens_of(0, 90))
        store.flush()
        snapshot, found, lost = ring(store)[0]
    assert (snapshot.what, snapshot.reason, snapshot.origin) == ("snapshot", "stored", "boundary")
    assert (snapshot.prompt, snapshot.new, snapshot.known, snapshot.offset) == (100, 100, 0, 100)
    assert snapshot.request == "r1"
    assert snapshot.nbytes > 0
    assert (found.what, found.reason, found.tier) == ("lookup", "full", "store")
    assert (found.prompt, found.matched, found.resumed) == (115, 100, hit.offset)
    assert (found.request, found.origin, found.rate) == (hit.request, "boundary", 250.0)
    assert found.saved == 100 / 250
    assert 0 < found.rebuild <= found.seconds
    assert found.node == snapshot.node != 0
    assert (lost.reason, lost.kinds, lost.layers, lost.limit, lost.rule) == (
        "no_state_at_offset",
        "arrays",
        "1",
        0,
        "no_state_at_offset",
    )
    assert (lost.matched, lost.resumed, lost.tier, lost.request) == (90, 0, "", missed.request)


def test_no_token_is_kept_unless_asked_for(tmp_path: Path) -> None:
    tokens = tokens_of(3, 60)
    asked = [*tokens[:40].tolist(), 31001, 31002, 31003]
    for keeps, due in ((0, ()), (2, (31001, 31002)), (500, (31001, 31002, 31003))):
        with opened(tmp_path / str(keeps), event_tokens=keeps) as store:
            space = space_of(store)
            keep(space, "plain", tokens)
            space.resume(asked)
            store.flush()
            assert ring(store)[0][-1].asked == due
            with store.env.begin() as txn:
                raw = b"".join(bytes(value) for _, value in txn.items("events"))
    assert b"\xcd\x79\x1a" in raw  # 31002, as msgpack has it
    with opened(tmp_path / "0") as store, store.env.begin() as txn:
        raw = b"".join(bytes(value) for _, value in txn.items("events"))
        assert raw
        assert b"\xcd\x79\x1a" not in raw


def test_the_ring_is_bounded_and_the_totals_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "RING", 50)
    with opened(tmp_path / "s") as store:
        for start in range(0, 210, STEP):
            batch = range(start, start + STEP)
            write(store, *(event(at=i, prompt=10, matched=i % 10, resumed=i % 10) for i in batch))
        found, gaps = ring(store)
        assert [e.time - NOW for e in found] == list(range(160, 210))
        assert gaps.trimmed == 160
        with store.env.begin() as txn:
            (total,) = all_totals(txn).values()
    assert total.lookups == 210
    assert total.prompt_tokens == 2100
    assert total.resumed_tokens == sum(i % 10 for i in range(210))


def test_a_clock_that_jumps_neither_reorders_nor_fills_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "RING", 20)
    years = 3e8
    with opened(tmp_path / "s") as store:
        for at in (0, 1, 2):
            write(store, event(at=at, prompt=at))
        write(store, *(event(at=years + i, prompt=3 + i) for i in range(3)))
        for at in range(6, 12):
            write(store, event(at=at, prompt=at))
        found, gaps = ring(store)
        assert [e.prompt for e in found] == list(range(12))
        assert gaps.jumps == 1
        assert gaps.ahead == 3
        assert [e.prompt for e in ring(store, NOW + 8)[0]] == [3, 4, 5, 8, 9, 10, 11]
        for at in range(12, 40):
            write(store, event(at=at, prompt=at))
        assert [e.prompt for e in ring(store)[0]] == list(range(20, 40))


def test_an_unreadable_record_is_a_marked_gap(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        write(store, *(event(at=i, prompt=10) for i in range(5)))
        with store.env.begin(write=True) as txn:
            keys = list(txn.keys("events"))
            txn.put("events", keys[1], b"\x00 not a record")
            txn.put("events", keys[3], event(prompt=1, resumed=5, matched=5).pack())
        found, gaps = ring(store)
        assert len(found) == 3
        assert gaps.unreadable == 2
        report = store.report()
        assert (report.total.lookups, report.total.prompt_tokens) == (3, 30)
        assert report.gaps.unreadable == 2


def test_a_ring_of_the_first_version_is_counted_once(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        with store.env.begin(write=True) as txn:
            for i in range(4):
                when = int((NOW + i) * 1e9)
                txn.put("events", layout.pair(when, 1000 + i), event(at=i, prompt=7).pack())
        write(store, event(at=2, prompt=5))
        found, gaps = ring(store)
        assert [e.prompt for e in found] == [7, 7, 7, 7, 5]
        assert gaps.trimmed == 0
        with store.env.begin() as txn:
            (total,) = all_totals(txn).values()
        assert (total.lookups, total.prompt_tokens) == (5, 33)


def test_reading_goes_on_after_a_key(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        write(store, *(event(at=i, prompt=i) for i in range(4)))
        with store.env.begin() as txn:
            keys = [key for key, _ in read_events(txn)]
            rest = [e.prompt for _, e in read_events(txn, after=keys[1])]
        assert rest == [2, 3]


WORKER = """
import sys, kvkeep
with kvkeep.open(sys.argv[1]) as store:
    space = store.space(identity={"name": sys.argv[2]}, layout=())
    for i in range(300):
        space.resume([1, 2, 3 + i])
"""


def test_processes_share_the_ring(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        command = [sys.executable, "-W", "error", "-c", WORKER, str(store.path)]
        running = [subprocess.Popen([*command, name]) for name in ("a", "a", "b")]
        assert [p.wait(120) for p in running] == [0, 0, 0]
        report = store.report()
        assert len(ring(store)[0]) == report.total.lookups == 900
        assert sorted(t.lookups for t in report.by_space.values()) == [300, 600]
        assert {m: t.lookups for m, t in report.by_model.items()} == {"a": 600, "b": 300}


def test_a_few_events_are_written_without_a_flush(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space_of(store).resume([1, 2, 3])
        patience = time.monotonic() + 60
        while not ring(store)[0] and time.monotonic() < patience:
            time.sleep(0.05)
        assert len(ring(store)[0]) == 1


def test_events_that_cannot_be_written_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise StoreFull("no room")

    with opened(tmp_path / "s") as store:
        space = space_of(store)
        with monkeypatch.context() as patch:
            patch.setattr(events_module, "append", full)
            space.resume([1, 2, 3])
            space.resume([1, 2, 4])
            store.flush()
        assert ring(store)[0] == []
        space.resume([1, 2, 5])
        report = store.report()
        assert (report.total.lookups, report.gaps.lost) == (1, 2)


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        keep(space_of(store), "plain", tokens_of(0, 30))
    with opened(tmp_path / "s", read_only=True) as store:
        assert space_of(store).resume(tokens_of(0, 40)).offset == 30
        store.flush()
        assert [e.what for e in ring(store)[0]] == ["snapshot"]


def test_a_rate_fades_and_survives(tmp_path: Path) -> None:
    assert Rate().speed == 0
    assert Rate().plus(0, 1.0) == Rate().plus(5, 0.0) == Rate()
    rate = Rate().plus(100_000, 100.0)
    for _ in range(20):
        rate = rate.plus(10_000, 1.0)
    assert 8_000 < rate.speed < 10_000
    assert Rate.unpack(memoryview(rate.pack())) == rate
    assert Rate.unpack(memoryview(b"\xff")) == Rate.unpack(None) == Rate()
    with opened(tmp_path / "s") as store:
        space = space_of(store)
        space.measured(100, 4.0)
        space.resume([1, 2, 3])
    with opened(tmp_path / "s") as store:
        space_of(store).resume([1, 2, 3])
        store.flush()
        assert [e.rate for e in ring(store)[0]] == [25.0, 25.0]
