"""Evictions leave an event for each space that lost something."""

from __future__ import annotations

from pathlib import Path

from tests.faults.rows import tokens_of
from tests.reports.stores import keep, opened, ring, space_of


def test_an_eviction_that_was_asked_for_is_counted_by_space(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        for name in ("a", "b"):
            space = space_of(store, name=name)
            for conversation in (0, 1, 5):
                keep(space, "plain", tokens_of(conversation, 200))
        store.flush()
        gone = store.evict(to=0)
        events = [e for e in ring(store)[0] if e.what == "evict"]
        report = store.report()
    assert len(events) == 2
    assert {e.reason for e in events} == {"asked"}
    assert sum(e.nodes for e in events) == gone.nodes == report.total.evicted_nodes == 10
    assert sum(e.known for e in events) == gone.tokens == report.total.evicted_tokens
    assert sum(e.nbytes for e in events) == gone.bytes == report.total.evicted_bytes
    assert [t.evictions for t in report.by_space.values()] == [1, 1]


def test_making_room_is_counted(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space = space_of(store)
        for conversation in range(12):
            keep(space, "plain", tokens_of(4 * conversation, 400))
        store.flush()
        kept = store.used_bytes
    import kvkeep

    with kvkeep.open(tmp_path / "s", max_bytes=kept // 2) as store:
        shrunk = store.report().total
        assert shrunk.evictions == 1
        assert shrunk.evicted_bytes >= kept - kept // 2
        space = space_of(store)
        for conversation in range(12, 24):
            keep(space, "plain", tokens_of(4 * conversation, 400))
        store.flush()
        events = [e for e in ring(store)[0] if e.what == "evict"]
    assert len(events) > 1
    assert {e.reason for e in events} == {"budget"}
    assert all(e.nodes and e.known and e.nbytes for e in events)


def test_what_was_evicted_and_then_wanted_is_a_regret(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space = space_of(store)
        keep(space, "plain", tokens_of(0, 200))
        store.flush()
        store.evict(to=0)
        assert space.resume(tokens_of(0, 240)).decision.reason == "evicted"
        space.resume(list(range(900, 950)))
        total = store.report().total
    assert (total.lookups, total.regrets, total.regret_tokens) == (2, 1, 240)
