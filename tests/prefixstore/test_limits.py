"""Pins, times to live and quotas: what they keep, what they drop, and what lookups say."""

from __future__ import annotations

import math

import pytest

import kvkeep
from kvkeep import Reason
from kvkeep.errors import KvkeepError, StoreReadOnly
from kvkeep.prefixstore.identity import salt_digest
from kvkeep.prefixstore.pins import NothingToPin, TooMuchPinned
from kvkeep.prefixstore.tenants import read_tenant
from tests.prefixstore.clock import SECOND
from tests.prefixstore.shapes import make, problem, space_of

BYTES = 512  # of a token in the file: half a chunk of 16 is its rows, the rest fills pages


pytestmark = pytest.mark.usefixtures("raw", "small")


@pytest.fixture
def store(tmp_path):
    with kvkeep.open(tmp_path / "store", max_bytes=800 * BYTES, disk_reserve=1) as opened:
        yield opened


def numbered(number, length=64):
    return [10_000 * number + i for i in range(length)]


def keep(space, tokens, shape="plain"):
    receipt = space.snapshot(tokens, make(shape, tokens))
    assert receipt.stored, receipt


def scan(space, numbers, shape="plain"):
    for number in numbers:
        keep(space, numbered(number), shape)


@pytest.mark.parametrize("shape", ["plain", "recurrent"])
@pytest.mark.parametrize("seconds", [None, 3600])
def test_what_is_pinned_stays_with_every_byte(store, shape, seconds):
    space = space_of(store, shape)
    wanted, end = numbered(1, 96), numbered(2)
    keep(space, wanted[:48], shape)
    keep(space, wanted, shape)
    keep(space, [*wanted[:48], *end], shape)
    pin = space.pin(wanted, seconds)
    assert (pin.tokens, pin.until is None) == (96, seconds is None)
    assert pin.bytes > 96 * BYTES / 2
    scan(space, range(10, 60), shape)
    assert store.used_bytes <= store.max_bytes
    hit = space.resume([*wanted, 1])
    assert hit.offset == 96
    assert not problem(shape, wanted, hit.caches)
    assert space.explain([*wanted[:48], *end, 1]).offset == 48
    assert [p.id for p in store.pins()] == [pin.id]
    assert space.unpin([*wanted, 5, 6])
    assert not space.unpin(wanted)
    assert store.pins() == []
    scan(space, range(60, 110), shape)
    assert space.explain([*wanted, 1]).offset == 0
    assert not store.verify().problems


def test_a_pin_may_end_within_an_edge_and_holds_no_more(store):
    space = space_of(store)
    wanted = numbered(3, 160)
    keep(space, wanted)
    pin = space.pin([*wanted[:70], 5, 6])
    assert pin.tokens == 70
    scan(space, range(10, 60))
    hit = space.resume([*wanted, 1])
    assert hit.offset == 70
    assert not problem("plain", wanted[:70], hit.caches)
    assert hit.decision.reason is Reason.EVICTED
    assert not store.verify().problems


def test_a_soft_pin_ends_with_its_time(store, clock):
    space = space_of(store)
    keep(space, numbered(1))
    pin = space.pin(numbered(1), 60)
    assert pin.until == pytest.approx(clock.time() + 60)
    clock.now += 61 * SECOND
    assert store.pins() == []
    scan(space, range(10, 60))
    assert space.explain([*numbered(1), 1]).offset == 0
    with store.env.begin() as txn:
        assert txn.count("pins") == 0


def test_a_soft_pin_gives_way_before_a_snapshot_is_refused_and_a_hard_one_does_not(store):
    space = space_of(store)
    keep(space, numbered(1, 200))
    space.pin(numbered(1, 200))
    keep(space, numbered(2, 300))
    space.pin(numbered(2, 300), 3600)
    keep(space, numbered(3, 450))
    assert space.explain([*numbered(1, 200), 1]).offset == 200
    assert space.explain([*numbered(2, 300), 1]).offset < 300
    tokens = numbered(4, 700)
    refused = space.snapshot(tokens, make("plain", tokens))
    assert not refused.stored
    assert "what is pinned" in refused.reason
    assert space.explain([*numbered(3, 450), 1]).offset == 450
    assert not store.verify().problems


def test_hard_pins_leave_room_and_a_budget_cannot_fall_below_them(tmp_path):
    path = tmp_path / "store"
    with kvkeep.open(path, max_bytes=800 * BYTES, disk_reserve=1) as store:
        space = space_of(store)
        keep(space, numbered(1, 400))
        keep(space, numbered(2, 300))
        space.pin(numbered(1, 400))
        with pytest.raises(TooMuchPinned, match="without a deadline"):
            space.pin(numbered(2, 300))
        assert [p.tokens for p in store.pins()] == [400]
        assert space.pin(numbered(2, 300), 60).tokens == 300
    with pytest.raises(TooMuchPinned):
        kvkeep.open(path, max_bytes=300 * BYTES, disk_reserve=1)
    with kvkeep.open(path, disk_reserve=1) as store:
        assert store.max_bytes == 800 * BYTES
        assert space_of(store).explain([*numbered(1, 400), 1]).offset == 400


def test_pins_survive_splits_and_go_with_an_explicit_eviction_alone(store):
    space = space_of(store)
    wanted = numbered(1, 96)
    keep(space, wanted)
    pin = space.pin(wanted)
    keep(space, [*wanted[:40], *numbered(2)])
    assert [p.id for p in store.pins()] == [pin.id]
    store.evict(to=0)
    assert space.explain([*wanted, 1]).offset == 96
    store.evict(space=space)
    assert space.explain([*wanted, 1]).offset == 96
    store.evict(space=space, pinned=True)
    assert store.used_bytes == 0
    assert store.pins() == []
    assert not store.verify().problems


def test_conversations_are_pinned_by_their_ids(store):
    space = space_of(store)
    keep(space, numbered(1))
    (conversation,) = store.conversations()
    pin = store.pin(conversation.id, 60)
    assert (pin.id, pin.space, pin.tokens) == (conversation.id, space.id.hex(), 64)
    assert store.unpin(pin.id)
    assert not store.unpin(pin.id)
    with pytest.raises(NothingToPin):
        store.pin("ffff")
    with pytest.raises(NothingToPin):
        space.pin(numbered(3))


def test_what_is_too_old_is_a_miss_and_goes_at_the_next_write(store, clock):
    space = space_of(store, ttl=100)
    keep(space, numbered(1))
    clock.now += 99 * SECOND
    assert space.resume([*numbered(1), 1]).offset == 64
    store.flush()
    clock.now += 99 * SECOND
    hit = space.resume([*numbered(1), 1])
    assert (hit.offset, hit.decision.reason) == (64, Reason.FULL)
    store.flush()
    clock.now += 101 * SECOND
    late = space.resume([*numbered(1), 1])
    assert (late.offset, late.decision.reason) == (0, Reason.EXPIRED)
    keep(space, numbered(2))
    assert [c.tokens for c in store.conversations()] == [64]
    assert space.explain([*numbered(1), 1]).reason is Reason.EXPIRED
    assert space.explain([*numbered(2), 1]).offset == 64
    assert store.report().total.regrets == 1
    assert not store.verify().problems


def test_only_the_old_part_of_a_path_expires(store, clock):
    space = space_of(store, ttl=100)
    shared = numbered(1, 48)
    keep(space, [*shared, *numbered(2)])
    clock.now += 60 * SECOND
    keep(space, [*shared, *numbered(3)])
    clock.now += 60 * SECOND
    old = space.explain([*shared, *numbered(2), 1])
    assert (old.offset, old.matched, old.reason) == (48, 48, Reason.EXPIRED)
    assert space.explain([*shared, *numbered(3), 1]).offset == 48 + 64


def test_a_time_to_live_is_kept_with_the_store_and_can_be_lifted(tmp_path, clock):
    path = tmp_path / "store"
    with kvkeep.open(path, max_bytes="1MB", disk_reserve=1) as store:
        keep(space_of(store, ttl=100), numbered(1))
        keep(space_of(store, "ring"), numbered(1), "ring")
    clock.now += 101 * SECOND
    with kvkeep.open(path, disk_reserve=1, read_only=True) as store:
        assert space_of(store).explain([*numbered(1), 1]).reason is Reason.EXPIRED
        with pytest.raises(StoreReadOnly):
            space_of(store, ttl=5)
    with kvkeep.open(path, disk_reserve=1) as store:
        assert len(store.conversations()) == 1, "opening drops what has expired"
        assert space_of(store, "ring").explain([*numbered(1), 1]).offset == 64
        space = space_of(store, ttl=math.inf)
        keep(space, numbered(1))
        clock.now += 10**6 * SECOND
        assert space.explain([*numbered(1), 1]).offset == 64


def test_what_is_pinned_does_not_expire(store, clock):
    space = space_of(store, ttl=100)
    keep(space, numbered(1))
    keep(space, numbered(2))
    space.pin(numbered(1), 500)
    clock.now += 300 * SECOND
    assert space.explain([*numbered(1), 1]).offset == 64
    assert space.explain([*numbered(2), 1]).reason is Reason.EXPIRED
    keep(space, numbered(3))
    assert space.explain([*numbered(1), 1]).offset == 64
    clock.now += 300 * SECOND
    assert space.explain([*numbered(1), 1]).reason is Reason.EXPIRED


def test_a_quota_holds_a_tenant_and_leaves_others_alone(store):
    guest = space_of(store, salt="guest", quota=150 * BYTES)
    other = space_of(store, "ring", salt="guest")
    host = space_of(store, salt="host")
    keep(host, numbered(1, 128))
    keep(other, numbered(1), "ring")
    for number in range(10, 30):
        keep(guest, numbered(number))
        assert used_by(store, "guest") <= 150 * BYTES
    assert other.explain([*numbered(1), 1]).offset == 0, "all spaces of a salt share its quota"
    assert host.explain([*numbered(1, 128), 1]).offset == 128
    assert guest.explain([*numbered(29), 1]).offset == 64
    tokens = numbered(50, 200)
    refused = guest.snapshot(tokens, make("plain", tokens))
    assert not refused.stored
    assert "quota of its salt" in refused.reason
    assert not store.verify().problems


def used_by(store, salt):
    with store.env.begin() as txn:
        return read_tenant(txn, salt_digest(salt).encode()).used


def test_a_smaller_quota_holds_at_once(store):
    guest = space_of(store, salt="guest")
    for number in range(8):
        keep(guest, numbered(number))
    before = used_by(store, "guest")
    space_of(store, salt="guest", quota=before // 3)
    assert 0 < used_by(store, "guest") <= before // 3
    space_of(store, salt="guest", quota=math.inf)
    for number in range(8):
        keep(guest, numbered(number))
    assert used_by(store, "guest") >= before
    with pytest.raises(KvkeepError, match="not a size"):
        space_of(store, salt="guest", quota="much")


def test_a_repair_counts_tenants_anew_and_keeps_their_quotas(store):
    guest = space_of(store, salt="guest", quota=150 * BYTES)
    keep(guest, numbered(1))
    used = used_by(store, "guest")
    with store.env.begin(write=True) as txn:
        (key,) = txn.keys("tenants")
        txn.put("tenants", key, bytes(txn.get("tenants", key))[:8] + bytes(8))
    assert {p.where for p in store.verify().problems} == {"tenants"}
    store.repair()
    assert not store.verify().problems
    assert used_by(store, "guest") == used
    for number in range(10, 20):
        keep(guest, numbered(number))
        assert used_by(store, "guest") <= 150 * BYTES
