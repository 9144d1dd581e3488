"""Snapshots: refusals, receipts, untouched caches, budget and disk, threads."""

from __future__ import annotations

import sys
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, RotatingKVCache

import kvkeep
from kvkeep.errors import (
    BadTokens,
    BatchCache,
    EmptyCache,
    MalformedCache,
    OffsetMismatch,
    Refused,
    UnknownCache,
)
from kvkeep.persistence.memory import host
from tests.prefixstore import shapes
from tests.prefixstore.contents import content, coverage
from tests.prefixstore.shapes import make, problem, space_of

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6] * 5


pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def store(tmp_path):
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as opened:
        yield opened


def stored_bytes(store):
    return sum(map(len, content(store, ["chunks"])["chunks"].values()))


def one_kv(length, heads=1):
    cache = KVCache()
    if length:
        cache.update_and_fetch(mx.ones((1, heads, length, 4)), mx.ones((1, heads, length, 4)))
    return cache


def ring(length):
    cache = RotatingKVCache(4)
    for _ in range(length):
        cache.update_and_fetch(mx.ones((1, 1, 1, 4)), mx.ones((1, 1, 1, 4)))
    return cache


def batch():
    cache = BatchKVCache([0, 0])
    cache.update_and_fetch(mx.ones((2, 1, 8, 4)), mx.ones((2, 1, 8, 4)))
    return cache


def two_rows():
    cache = KVCache()
    cache.update_and_fetch(mx.ones((2, 1, 8, 4)), mx.ones((2, 1, 8, 4)))
    return cache


def state():
    cache = ArraysCache(1)
    cache[0] = mx.ones((1, 4))
    return cache


def torn():
    cache = one_kv(8)
    cache.offset = 300
    return cache


REFUSED = {
    "no caches": (EmptyCache, list, 8),
    "an empty cache": (EmptyCache, lambda: [one_kv(8), one_kv(0)], 8),
    "no tokens": (EmptyCache, lambda: [one_kv(8)], 0),
    "an unknown class": (UnknownCache, lambda: [one_kv(8), object()], 8),
    "a batch layout": (BatchCache, lambda: [batch()], 8),
    "two rows": (BatchCache, lambda: [two_rows()], 8),
    "layers at different offsets": (OffsetMismatch, lambda: [one_kv(8), one_kv(7)], 8),
    "a ring that cannot be cut": (OffsetMismatch, lambda: [one_kv(8), ring(8)], 7),
    "state that cannot be cut": (OffsetMismatch, lambda: [one_kv(8), state()], 7),
    "more positions than rows": (MalformedCache, lambda: [torn()], 300),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(store, what):
    error, caches, tokens = REFUSED[what]
    space = store.space(identity={}, layout=())
    store.flush()
    before = content(store)
    with pytest.raises(error) as refused:
        space.snapshot(list(range(tokens)), caches())
    assert isinstance(refused.value, Refused)
    assert refused.value.remedy
    store.flush()
    assert content(store) == before


def test_caches_of_another_layout_are_refused(store):
    space = store.space(identity={}, layout=[one_kv(0), one_kv(0)])
    with pytest.raises(Refused, match="the space was made for kv, kv"):
        space.snapshot(list(range(8)), [one_kv(8), ring(8)])
    assert not store.spaces()


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.0],
        np.ones(4),
        [[1, 2], [3, 4]],
        [True, False, True],
        np.array([True, False]),
        "text",
        None,
        7,
        [1, None],
        [2**63],
        [2**70],
        np.array([2**63], np.uint64),
        mx.ones((4,)),
        mx.zeros((2, 2), mx.int32),
        {1, 2},
    ],
    ids=repr,
)
def test_tokens_that_are_no_tokens_are_refused(store, tokens):
    space = store.space(identity={}, layout=())
    for use in (space.resume, space.explain, lambda t: space.snapshot(t, [one_kv(4)])):
        with pytest.raises(BadTokens, match="Pass a list"):
            use(tokens)


def test_every_form_of_the_same_tokens_is_the_same_prompt(store):
    space = space_of(store, "plain")
    forms = [list, tuple, np.array, lambda t: np.array(t, np.uint16), mx.array, mx.array]
    forms += [lambda t: mx.array(t, mx.int64), lambda t: np.array([t, t]).T[:, 0], range_of]
    for number, form in enumerate(forms):
        tokens = [100 + number, *TOKENS]
        assert space.snapshot(form(tokens), make("plain", tokens)).tokens_new == len(tokens)
        for other in forms:
            assert space.resume(other([*tokens, 1])).offset == len(tokens)


def range_of(tokens):
    """Every second one of an array: not contiguous."""
    return np.repeat(np.array(tokens), 2)[::2]


@pytest.mark.parametrize("odd", [-1, -(2**63), 2**63 - 1, 2**31, -(2**31) - 1, 0])
def test_negative_and_wide_ids_are_told_apart(store, odd):
    space = space_of(store, "recurrent")
    for tokens in ([odd, 1, 2, 3], [5, 5, odd, 6]):
        assert space.snapshot(tokens, make("recurrent", tokens)).stored
        hit = space.resume([*tokens, 9])
        assert hit.offset == 4
        assert not problem("recurrent", tokens, hit.caches)
        assert hit.rest == [9]
    other = odd - 1 if odd > -(2**63) else odd + 1
    assert space.explain([other, 1, 2, 3, 9]).matched == 0
    assert space.explain([5, 5, other, 6, 9]).matched == 2
    assert not store.verify().problems


@pytest.mark.parametrize("shape", ["plain", "recurrent", "ring", "nested", "arrays"])
def test_receipts_count_what_is_new(store, shape):
    space = space_of(store, shape)
    more, branch = [*TOKENS, *[8] * 10], [*TOKENS[:25], *[7] * 10]
    rows = shape != "arrays"

    def snapshot(tokens):
        before = stored_bytes(store)
        receipt = space.snapshot(tokens, make(shape, tokens))
        written = receipt.bytes_written
        assert receipt.stored
        assert receipt.reason == ("stored" if written else "already_stored")
        return receipt.tokens_new, receipt.tokens_known, written, stored_bytes(store) - before

    new, known, written, grown = snapshot(TOKENS)
    assert (new, known) == (40, 0)
    assert written == grown > 0
    assert snapshot(TOKENS) == (0, 40, 0, 0)
    new, known, written, grown = snapshot(more)
    # Of a ring's window only what was not yet held is new.
    assert (new, known) == (10, 40)
    assert written == grown > 0
    new, known, written, _ = snapshot(branch)
    assert new + known == 35
    assert new >= 10
    assert written > 0
    new, known, written, _ = snapshot(TOKENS[:20])
    assert new + known == 20
    if shape == "plain":
        assert (new, written) == (0, 0)
    else:
        assert written > 0
    assert rows or (new, known) == (0, 20)
    assert not store.verify().problems


def test_tokens_beyond_the_caches_are_left_out(store):
    space = space_of(store, "recurrent")
    receipt = space.snapshot([*TOKENS, 1, 2, 3], make("recurrent", TOKENS))
    assert (receipt.stored, receipt.tokens_new) == (True, 40)
    assert space.explain([*TOKENS, 1, 2, 3]).matched == 40


def test_a_whole_ring_replaces_a_point_that_was_cut_from_a_longer_one(store):
    space, tokens = space_of(store, "ring"), TOKENS[:20]
    assert space.snapshot(tokens[:15], make("ring", tokens)).stored
    live = make("ring", tokens[:15], prefill=3)
    receipt = space.snapshot(tokens[:15], live)
    assert receipt.stored
    assert receipt.bytes_written > 0
    hit = space.resume([*tokens[:15], 1])
    got, wanted = (shapes.held_by_ring(caches[1]).tolist() for caches in (hit.caches, live))
    assert got == wanted != sorted(wanted)
    longer = [*tokens[:15], 1]
    for a, b in zip(shapes.append(hit.caches, longer), shapes.append(live, longer), strict=True):
        assert np.array_equal(a, b)
    assert not store.verify().problems


def pointer(array):
    """The address of a bfloat16 array's buffer, without holding it."""
    return host(array).ctypes.data


def feed(cache, tokens):
    new = mx.random.normal((2, 1, 2, tokens, 64)).astype(mx.bfloat16)
    mx.eval(cache.update_and_fetch(new[0], new[1]))


def appended(cache):
    """Whether one more token is written in place, and not into a copy of everything."""
    before = pointer(cache.keys)
    feed(cache, 1)
    return pointer(cache.keys) == before


def test_the_live_caches_are_neither_changed_nor_held(store):
    caches = [KVCache() for _ in range(2)]
    for cache in caches:
        feed(cache, 40)
        assert appended(cache), "without a snapshot a token is written in place"
    arrays = [array for cache in caches for array in (cache.keys, cache.values)]
    before = [np.array(host(array)) for array in arrays]
    space = store.space(identity={}, layout=())
    receipt = space.snapshot(list(range(41)), caches)
    same = [array for cache in caches for array in (cache.keys, cache.values)]
    assert all(a is b for a, b in zip(arrays, same, strict=True))
    assert all(np.array_equal(a, host(b)) for a, b in zip(before, same, strict=True))
    del arrays, same
    assert all(map(appended, caches)), "a snapshot that is still queued holds no buffer"
    assert receipt.stored
    assert all(map(appended, caches))
    held = host(caches[0].keys)
    assert not appended(caches[0]), "a buffer that is held shows"
    assert held.size


def test_a_reserve_that_would_be_touched_refuses_the_snapshot(tmp_path):
    path = tmp_path / "store"
    with kvkeep.open(path, max_bytes="1GB", disk_reserve=1) as store:
        assert space_of(store, "plain").snapshot(TOKENS, make("plain", TOKENS)).stored
    more = [*TOKENS, 1, 2, 3]
    with kvkeep.open(path, disk_reserve="900PB") as store:
        before = content(store, ["nodes", "chunks", "pending"])
        receipt = space_of(store, "plain").snapshot(more, make("plain", more))
        assert not receipt.stored
        assert "reserve" in receipt.reason
        assert (receipt.bytes_written, receipt.tokens_new) == (0, 3)
        assert content(store, ["nodes", "chunks", "pending"]) == before
        assert space_of(store, "plain").resume(more).offset == 40


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_larger_than_the_budget_is_refused_before_anything_is_evicted(
    tmp_path, monkeypatch, at_once
):
    monkeypatch.setattr("kvkeep.prefixstore.writer.ONE_TRANSACTION", (1 << 20) * at_once)
    with kvkeep.open(tmp_path / "store", max_bytes=60_000, disk_reserve=1) as store:
        space = space_of(store, "recurrent")
        assert space.snapshot(TOKENS, make("recurrent", TOKENS)).stored
        before = content(store, ["nodes", "chunks", "pending"])
        large = [9, *range(400)]
        receipt = space.snapshot(large, make("recurrent", large))
        assert not receipt.stored
        assert "budget of 58.6 KiB" in receipt.reason
        assert content(store, ["nodes", "chunks", "pending"]) == before
        assert space.resume([*TOKENS, 1]).offset == 40


def test_the_budget_holds_while_edges_are_split(tmp_path):
    """A split costs a node, references, and the page that each part of a chunk rounds up to."""
    with kvkeep.open(tmp_path / "store", max_bytes=40_000, disk_reserve=1) as store:
        space = space_of(store, "plain")
        stored = refused = 0
        for cut in [*range(39, 0, -1)] * 2:
            tokens = [*TOKENS[:cut], 7]
            if not cut % 7:
                tokens = TOKENS
            receipt = space.snapshot(tokens, make("plain", tokens))
            stored += receipt.stored
            refused += not receipt.stored
            assert store.used_bytes <= store.max_bytes
        assert stored > 20
        assert not store.verify().problems


def test_eviction_reaches_its_goal_whatever_was_split_after_it_was_used(store):
    """The lookup is noted after the split: then a node may be older than what hangs on it."""
    space = space_of(store, "plain")
    for tokens in (TOKENS[:20], TOKENS):
        assert space.snapshot(tokens, make("plain", tokens)).stored
    assert space.resume([*TOKENS, 1]).offset == 40
    parted = [*TOKENS[:10], 7, 7]
    assert space.snapshot(parted, make("plain", parted)).stored
    gone = store.evict(to=0)
    assert store.used_bytes == 0
    assert gone.tokens == 42
    assert not content(store, ["chunks"])["chunks"]


class Gate:
    """Holds up a store's writer until it is opened."""

    def __init__(self, store):
        self.event = threading.Event()
        store._core.writer.call(self.event.wait)

    def open(self):
        self.event.set()


@pytest.mark.parametrize("lengths", [(40, 40), (40, 33), (33, 40), (21, 40)])
def test_rows_that_another_handle_stored_meanwhile_are_not_kept_twice(tmp_path, lengths):
    first, second = (TOKENS[:n] for n in lengths)
    with (
        kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as slow,
        kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as quick,
    ):
        gate = Gate(slow)
        late = space_of(slow, "plain").snapshot(first, make("plain", first))
        assert space_of(quick, "plain").snapshot(second, make("plain", second)).stored
        gate.open()
        assert late.stored
        assert late.tokens_new == len(first), "nobody had stored them when they were copied"
        covered = coverage(quick)
        assert len(covered) == max(lengths)
        assert (covered == 1).all()
        for tokens in (first, second):
            hit = space_of(quick, "plain").resume([*tokens, 7])
            assert hit.offset == len(tokens)
            assert not problem("plain", tokens, hit.caches)
        assert not quick.verify().problems


@pytest.mark.usefixtures("raw")
def test_what_a_queued_snapshot_builds_on_is_not_evicted_for_another(tmp_path):
    older, other = list(range(100, 140)), list(range(200, 240))
    more = [*older, 1, 2, 3]
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as measured:
        space = space_of(measured, "plain")
        assert space.snapshot(older, make("plain", older)).stored
        one = measured.used_bytes
    with kvkeep.open(tmp_path / "small", max_bytes=int(2.5 * one), disk_reserve=1) as store:
        space = space_of(store, "plain")
        for tokens in (older, TOKENS):
            assert space.snapshot(tokens, make("plain", tokens)).stored
        gate = Gate(store)
        first = space.snapshot(other, make("plain", other))  # needs the room of one of the two
        second = space.snapshot(more, make("plain", more))
        assert second.tokens_known == 40
        gate.open()
        assert (first.stored, second.stored) == (True, True)
        assert space.explain([*TOKENS, 4]).offset < 40
        assert space.explain([*more, 4]).offset == 43
        assert not store.verify().problems


def test_rows_that_were_evicted_meanwhile_leave_no_hole(tmp_path):
    more = [*TOKENS, 1, 2, 3]
    with (
        kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as slow,
        kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as other,
    ):
        space = space_of(slow, "recurrent")
        assert space.snapshot(TOKENS, make("recurrent", TOKENS)).stored
        gate = Gate(slow)
        late = space.snapshot(more, make("recurrent", more))
        assert late.tokens_known == 40
        assert other.evict(to=0).tokens == 40
        gate.open()
        assert not late.stored
        assert "no longer stored" in late.reason
        assert space.explain([*more, 4]).matched == 0
        assert not slow.verify().problems
        assert space.snapshot(more, make("recurrent", more)).tokens_new == 43
        assert space.resume([*more, 4]).offset == 43


def test_many_threads_leave_one_copy_and_an_empty_queue(store):
    space, receipts, errors = space_of(store, "plain"), [], []
    before = sys.getswitchinterval()

    def work(number):
        try:
            for turn in range(6):
                for tokens in (TOKENS, [*TOKENS[:20], number, turn, 7]):
                    receipts.append((tokens, space.snapshot(tokens, make("plain", tokens))))
                    assert space.resume([*tokens, 2**33]).offset == len(tokens)
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    assert len(receipts) == 60
    assert all(receipt.stored for _, receipt in receipts)
    assert store._core.writer.queued(space.id) == []
    assert (coverage(store) == 1).all()
    for tokens, _ in receipts:
        hit = space.resume([*tokens, 2**33])
        assert not problem("plain", tokens, hit.caches)
    assert not store.verify().problems


def test_what_is_queued_can_be_resumed_and_built_upon_at_once(store):
    space, gate = space_of(store, "recurrent"), Gate(store)
    receipts = [space.snapshot(TOKENS[:n], make("recurrent", TOKENS[:n])) for n in (10, 20, 30, 40)]
    assert [r.tokens_known for r in receipts] == [0, 10, 20, 30]
    threading.Timer(0.1, gate.open).start()
    hit = space.resume([*TOKENS[:30], 7])
    assert hit.offset == 30
    assert not problem("recurrent", TOKENS[:30], hit.caches)
    assert all(receipt.stored for receipt in receipts)
    assert (coverage(store) == 1).all()


def test_a_conversation_owns_what_no_other_one_shares(store):
    space = space_of(store, "plain")
    for stop in (8, 24, 40):
        assert space.snapshot(TOKENS[:stop], make("plain", TOKENS[:stop])).stored
    (only,) = store.conversations()
    assert (only.tokens, only.own_tokens, only.points) == (40, 40, 3)
    assert only.bytes == store.spaces()[0].bytes
    other = [*TOKENS[:16], 77, 78]
    assert space.snapshot(other, make("plain", other)).stored
    found = sorted((x.tokens, x.own_tokens, x.points) for x in store.conversations())
    assert found == [(18, 2, 1), (40, 24, 2)]
    assert sum(x.bytes for x in store.conversations()) < store.spaces()[0].bytes
