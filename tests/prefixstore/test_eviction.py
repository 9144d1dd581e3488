"""Eviction in a store: whole leaves and their ends, policies by name, budgets that hold."""

from __future__ import annotations

from itertools import count, islice

import numpy as np
import pytest

import kvkeep
from kvkeep import Reason
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.events import read_events
from kvkeep.prefixstore.eviction import UnknownPolicy
from kvkeep.prefixstore.records import unpack
from tests.prefixstore.clock import SECOND
from tests.prefixstore.processes import start, together
from tests.prefixstore.shapes import make, problem, space_of

LONG = list(range(320))
BYTES = 2 * 2 * 2 * 16 * 2  # of a token: layers, planes, heads, width, bytes


pytestmark = pytest.mark.usefixtures("raw", "small")


def opened(path, budget="1GB", **options):
    return kvkeep.open(path, max_bytes=budget, disk_reserve=1, **options)


def keep(space, tokens, shape="plain"):
    receipt = space.snapshot(tokens, make(shape, tokens))
    assert receipt.stored, receipt
    return receipt


def recounted(store):
    """Bytes in use, from the records alone."""
    with store.env.begin() as txn:
        used = sum(layout.footprint(len(data)) for _, data in txn.items("nodes"))
        used += sum(layout.footprint(len(data)) for _, data in txn.items("chunks"))
        for key, data in txn.items("nodes"):
            assert unpack(key, data).stop > 0
    return used


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_a_leaf_is_cut_from_its_end_and_what_is_left_resumes(tmp_path, share):
    with opened(tmp_path / "store") as store:
        space = space_of(store)
        keep(space, LONG)
        used = store.used_bytes
        gone = store.evict(to=int(used * share))
        assert gone.nodes == 0
        assert gone.bytes == used - store.used_bytes
        assert store.used_bytes == recounted(store) <= used * share
        hit = space.resume([*LONG, 1])
        assert hit.offset == len(LONG) - gone.tokens
        assert hit.offset % 16 == 0
        assert hit.offset > len(LONG) * share - 40
        assert not problem("plain", LONG[: hit.offset], hit.caches)
        assert hit.decision.reason is Reason.EVICTED
        assert not store.verify().problems
        again = keep(space, LONG)
        assert (again.tokens_known, again.tokens_new) == (hit.offset, gone.tokens)
        assert space.explain([*LONG, 1]).offset == len(LONG)


def test_the_least_recently_used_conversation_goes_first_and_the_shared_part_last(tmp_path):
    with opened(tmp_path / "store") as store:
        space = space_of(store)
        shared = LONG[:48]
        ends = [[1000 * n + i for i in range(64)] for n in range(1, 5)]
        for end in ends:
            keep(space, shared + end)
        space.resume([*shared, *ends[0], 1])
        store.flush()
        kept = []
        while store.used_bytes:
            kept.append([space.explain([*shared, *end, 1]).offset for end in ends])
            store.evict(to=max(1, store.used_bytes - 1))
            assert store.used_bytes == recounted(store)
        totals = [sum(row) for row in kept]
        assert totals == sorted(totals, reverse=True)
        first_loss = [next(i for i, row in enumerate(kept) if row[n] < 112) for n in range(4)]
        assert sorted(range(4), key=first_loss.__getitem__) == [1, 2, 3, 0]
        assert kept[-1] == [kept[-1][0]] * 4


def test_scans_do_not_push_out_what_is_resumed_now_and_then_under_probation(tmp_path, clock):
    resumed = {}
    for policy in ("lru", "probation"):
        with opened(tmp_path / policy, 140 * BYTES * 4, eviction=policy) as store:
            space, fresh = space_of(store), count(4)
            wanted = [[10_000 * number + i for i in range(64)] for number in range(4)]
            resumed[policy] = 0
            for _ in range(6):
                for tokens in wanted:
                    clock.now += SECOND
                    resumed[policy] += space.resume([*tokens, 1]).offset
                    keep(space, tokens)
                for number in islice(fresh, 10):
                    clock.now += SECOND
                    keep(space, [10_000 * number + i for i in range(64)])
                    assert store.used_bytes <= store.max_bytes
    assert resumed["lru"] == 0
    assert resumed["probation"] >= 3 * 4 * 64


def test_a_light_space_outlives_a_heavy_one_by_size(tmp_path):
    offsets = {}
    for policy in ("lru", "size"):
        with opened(tmp_path / policy, eviction=policy) as store:
            heavy, light = space_of(store, "plain"), space_of(store, "arrays")
            keep(light, LONG, "arrays")
            keep(heavy, LONG)
            store.evict(to=store.used_bytes // 2)
            offsets[policy] = [s.explain([*LONG, 1]).offset for s in (light, heavy)]
    assert offsets["lru"][0] == 0
    assert offsets["size"][0] == len(LONG)
    assert 0 < offsets["size"][1] < len(LONG)


def test_a_store_keeps_its_policy_and_takes_another(tmp_path):
    path = tmp_path / "store"
    with opened(path) as store:
        assert store.eviction == "lru"
        space = space_of(store)
        keep(space, LONG)
        keep(space, [*LONG[:100], *range(900, 960)])
    with opened(path, eviction="size") as store:
        assert store.eviction == "size"
        assert not store.verify().problems
        assert space_of(store).explain([*LONG, 1]).offset == len(LONG)
    with opened(path, None) as store:
        assert store.eviction == "size"
        store.evict(to=1)
        assert store.used_bytes == 0
    with pytest.raises(UnknownPolicy, match="newest"):
        opened(path, eviction="newest")
    with pytest.raises(ValueError, match="state_share"):
        opened(path, state_share=1.5)


def test_a_smaller_budget_holds_right_after_opening_and_in_other_handles(tmp_path):
    path = tmp_path / "store"
    with opened(path) as store:
        space = space_of(store)
        for number in range(8):
            keep(space, [1000 * number + i for i in range(160)])
        used = store.used_bytes
        with opened(path, used // 3) as smaller:
            assert smaller.used_bytes <= used // 3
            assert not smaller.verify().problems
            # The first handle, opened with more, keeps to what is now in force.
            for number in range(8, 14):
                keep(space, [1000 * number + i for i in range(160)])
                assert store.used_bytes <= used // 3


def test_what_does_not_fit_is_refused_and_nothing_is_evicted_for_it(tmp_path):
    with opened(tmp_path / "store", 200 * BYTES) as store:
        space = space_of(store)
        keep(space, LONG[:64])
        receipt = space.snapshot([7, *LONG], make("plain", [7, *LONG]))
        assert not receipt.stored
        assert "does not fit the budget" in receipt.reason
        assert space.explain([*LONG[:64], 1]).offset == 64
        assert store.report().total.evictions == 0


def test_evictions_are_reported_by_space_with_their_reason(tmp_path):
    with opened(tmp_path / "store", 300 * BYTES) as store:
        space = space_of(store)
        for number in range(6):
            keep(space, [1000 * number + i for i in range(96)])
        missed = space.resume([*range(96), 1])
        assert missed.decision.reason is Reason.EVICTED
        report = store.report()
        assert report.total.evictions > 0
        assert report.total.evicted_tokens >= 96
        assert report.total.regrets == 1
        assert report.total.regret_tokens > 0
        with store.env.begin() as txn:
            events = [event for _, event in read_events(txn)]
        assert {e.reason for e in events if e.what == "evict"} == {"budget"}


def test_what_was_never_stored_is_not_called_evicted(tmp_path):
    with opened(tmp_path / "store") as store:
        space = space_of(store)
        keep(space, LONG)
        store.evict(to=1)
        assert space.explain([*LONG, 1]).reason is Reason.EVICTED
        assert space.explain([5, *LONG, 1]).reason is Reason.NO_PREFIX
        other = space_of(store, "ring")
        assert other.explain([*LONG, 1]).reason is not Reason.EVICTED


WRITER = """
import sys
import kvkeep
from kvkeep.prefixstore import recipe
from tests.prefixstore.clock import SECOND
from tests.prefixstore.shapes import make
recipe.CHUNK_BYTES = 1
path, first, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
with kvkeep.open(path, disk_reserve=1) as store:
    space = store.space(identity={"shape": "recurrent"}, layout=make("recurrent", ()))
    stored = 0
    for number in range(25):
        tokens = [1000 * first + 50 * number + i for i in range(90)]
        stored += space.snapshot(tokens, make("recurrent", tokens)).stored
        assert store.used_bytes <= budget, (store.used_bytes, budget)
    print(stored, flush=True)
"""


def test_the_budget_holds_while_two_processes_write(tmp_path):
    path, budget = tmp_path / "store", 400 * BYTES
    opened(path, budget).close()
    stored = together(*(start(WRITER, path, first, budget) for first in (1, 7)))
    assert list(map(int, stored)) == [25, 25]
    with opened(path, None) as store:
        assert recounted(store) == store.used_bytes <= budget
        assert not store.verify().problems
        assert store.report().total.evictions > 5


def test_a_million_idle_nodes_are_not_read_to_evict_one(tmp_path, monkeypatch):
    """The cost of an eviction follows what goes, not what is stored."""
    with opened(tmp_path / "store") as store:
        space = space_of(store)
        for number in range(300):
            space.snapshot([1000 * number + i for i in range(4)], make("plain", range(4)))
        store.flush()
        read = []
        monkeypatch.setattr(
            "kvkeep.prefixstore.evict.unpack",
            lambda key, data: read.append(key) or unpack(key, data),
        )
        gone = store.evict(to=store.used_bytes - 1)
        assert gone.tokens
        assert 0 < len(read) < 10
        assert np.unique(read).size == len(read)
