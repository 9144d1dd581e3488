"""Damage of every kind: a miss or the next best offset, never wrong bits, nothing else lost."""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import xxhash

import kvkeep
from kvkeep import Reason
from kvkeep.persistence.frame import CHECKED, HEAD, VERSION
from kvkeep.prefixstore import layout, records
from kvkeep.prefixstore.layout import DATABASES
from kvkeep.prefixstore.repair import repair
from tests.prefixstore import shapes
from tests.prefixstore.shapes import make, problem

FIRST = [7, 8, 9, 10] * 10
SECOND = [*FIRST[:8], *[5, 6] * 16]
"""Two prompts of 40 tokens that part after 8. The first has chunks from 0, 8, 16, 20 and 32 on."""

NOT_CONTENT = {"quarantine", "events", "uses", "lru", "ages", "states", "fading", "meta"}
"""Databases that a lookup may write to."""


pytestmark = pytest.mark.usefixtures("small")


@contextmanager
def opened(path, shape, **options):
    with kvkeep.open(path, max_bytes="1GB", **options) as store:
        yield store, store.space(identity={"shape": shape}, layout=make(shape, ()))


def fill(path, shape):
    """A store of both prompts, with resume points at 40, and of the first also at 20."""
    with opened(path, shape) as (store, space):
        for tokens in (FIRST[:20], FIRST, SECOND):
            assert space.snapshot(tokens, make(shape, tokens)).stored
        store.flush()
        assert not store.verify().problems


@pytest.fixture(params=["plain", "recurrent"])
def filled(request, tmp_path):
    fill(tmp_path / "store", request.param)
    return tmp_path / "store", request.param


def content(store, without=()):
    """Every record of every database."""
    with store.env.begin() as txn:
        return {
            name: {key: bytes(value) for key, value in txn.items(name)}
            for name in DATABASES
            if name not in without
        }


def path_of(store, space, tokens):
    """The nodes of a stored path, detached."""
    from kvkeep.prefixstore.tokens import as_tokens
    from kvkeep.prefixstore.trie import walk

    with store.env.begin() as txn:
        return [records.detach(n) for n in walk(txn, space.id, as_tokens(tokens)).nodes]


def chunk_at(store, space, tokens, position):
    """The id of the chunk that holds the row of a position."""
    found = [
        int(ref["chunk"])
        for node in path_of(store, space, tokens)
        for ref in node.refs
        if ref["start"] <= position < ref["stop"]
    ]
    assert len(found) == 1
    return found[0]


def state_at(store, space, tokens, offset):
    """The id of the state of a resume point."""
    points = [p for node in path_of(store, space, tokens) for p in node.points]
    return next(p.state for p in points if p.offset == offset)


def value(store, chunk):
    with store.env.begin() as txn:
        return bytes(txn.get("chunks", layout.u64(chunk)))


def put(store, database, key, data):
    with store.env.begin(write=True) as txn:
        txn.put(database, key, data)


def flip_in_file(path, record, place):
    """Flip a bit of a stored record, in the file itself."""
    file = path / "data.mdb"
    data = bytearray(file.read_bytes())
    at, hits = data.find(record), 0
    while at >= 0:
        data[at + place] ^= 0x10
        hits += 1
        at = data.find(record, at + 1)
    assert hits
    file.write_bytes(data)


def check_hit(shape, tokens, hit, offset, reason):
    assert (hit.offset, hit.decision.reason) == (offset, reason), hit.decision
    if offset:
        assert not shapes.problem(shape, tokens[:offset], hit.caches)
    else:
        assert hit.caches is None


def check_damage(path, shape, chunk, offset):
    """What must hold once ``chunk``, a frame of the first prompt, is damaged.

    ``offset`` is what can still be resumed.
    """
    with opened(path, shape) as (store, space):
        before = content(store)
        audit = store.verify()
        assert content(store) == before
        assert [p.where for p in audit.problems] == [f"chunk {chunk}"]
        assert audit.damaged
        prompt = [*FIRST, 1]
        check_hit(shape, FIRST, space.resume(prompt), offset, Reason.CORRUPT)
        for _ in range(2):
            check_hit(shape, FIRST, space.resume(prompt), offset, Reason.CORRUPT)
        assert space.explain(prompt).reason is Reason.CORRUPT
        assert space.trace(prompt).decision.reason is Reason.CORRUPT
        assert space.explain(FIRST[:4]).reason is not Reason.CORRUPT
        check_hit(shape, SECOND, space.resume([*SECOND, 1]), 40, Reason.FULL)
        store.flush()
        assert content(store, NOT_CONTENT) == {
            name: rows for name, rows in before.items() if name not in NOT_CONTENT
        }
        assert list(content(store)["quarantine"]) == [layout.u64(chunk)]
        report = store.report()
        assert (report.quarantined, report.by_reason["corrupt"].lookups) == (1, 3)
        assert [p.where for p in store.verify().problems] == [f"chunk {chunk}"]


def check_repair(path, shape, chunk, offset):
    """A repair takes out the damaged frame and nothing else; the next snapshot heals the rest."""
    with opened(path, shape) as (store, space):
        before = content(store)["chunks"]
        assert [p.where for p in store.repair().problems] == [f"chunk {chunk}"]
        assert not store.verify().problems
        after = content(store)
        assert set(before) - set(after["chunks"]) <= {layout.u64(chunk)}
        assert not after["quarantine"]
        hit = space.resume([*FIRST, 1])
        assert hit.offset == offset
        assert hit.decision.reason is not Reason.CORRUPT
        assert space.snapshot(FIRST, make(shape, FIRST)).stored
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 40, Reason.FULL)
        assert not store.verify().problems


def check_heal(path, shape, chunk):
    """Without a repair, a snapshot of the same tokens brings the damaged frame anew."""
    with opened(path, shape) as (store, space):
        space.resume([*FIRST, 1])
        receipt = space.snapshot(FIRST, make(shape, FIRST))
        assert receipt.stored
        assert receipt.bytes_written > 0
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 40, Reason.FULL)
        assert [p.where for p in store.verify().problems] == [f"chunk {chunk}"]
        store.repair()
        assert not store.verify().problems
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 40, Reason.FULL)


PLACES = {"magic": 0, "version": 4, "header length": 8, "checksum": CHECKED + 3, "table": HEAD.size}


@pytest.mark.parametrize("place", [*PLACES, "payload"])
@pytest.mark.parametrize("then", [check_repair, check_heal])
def test_a_flipped_bit_of_rows_is_never_served(filled, place, then):
    path, shape = filled
    with opened(path, shape) as (store, space):
        chunk = chunk_at(store, space, FIRST, 35)
        data = value(store, chunk)
    flip_in_file(path, data, PLACES.get(place, len(data) - 5))
    offset = {"plain": 32, "recurrent": 20}[shape]
    check_damage(path, shape, chunk, offset)
    if then is check_repair:
        check_repair(path, shape, chunk, offset)
    else:
        check_heal(path, shape, chunk)


@pytest.mark.parametrize("then", [check_repair, check_heal])
def test_a_flipped_bit_of_a_state_is_never_served(tmp_path, then):
    path, shape = tmp_path / "store", "recurrent"
    fill(path, shape)
    with opened(path, shape) as (store, space):
        chunk = state_at(store, space, FIRST, 40)
        data = value(store, chunk)
    flip_in_file(path, data, len(data) - 1)
    check_damage(path, shape, chunk, 20)
    if then is check_repair:
        check_repair(path, shape, chunk, 20)
    else:
        check_heal(path, shape, chunk)


WRONG = {
    "cut short": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + bytes(64),
    "zeros": lambda data: bytes(len(data)),
    "a few bytes": lambda data: data[:3],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("how", WRONG)
def test_a_value_that_is_no_frame_is_never_served(tmp_path, how):
    path, shape = tmp_path / "store", "plain"
    fill(path, shape)
    with opened(path, shape) as (store, space):
        chunk = chunk_at(store, space, FIRST, 25)
        put(store, "chunks", layout.u64(chunk), WRONG[how](value(store, chunk)))
    check_damage(path, shape, chunk, 20)
    check_repair(path, shape, chunk, 20)


def test_a_missing_frame_is_never_missed(tmp_path):
    path, shape = tmp_path / "store", "plain"
    fill(path, shape)
    with opened(path, shape) as (store, space):
        chunk = chunk_at(store, space, FIRST, 25)
        with store.env.begin(write=True) as txn:
            txn.delete("chunks", layout.u64(chunk))
        assert [(p.what, p.where) for p in store.verify().problems][:1] == [
            ("missing", f"chunk {chunk}")
        ]
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 20, Reason.CORRUPT)
        store.repair()
        assert not store.verify().problems
        assert space.snapshot(FIRST, make(shape, FIRST)).stored
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 40, Reason.FULL)


@pytest.mark.parametrize("source", ["another prompt", "another position", "a state"])
def test_a_whole_frame_in_the_place_of_another_is_never_served(filled, source):
    path, shape = filled
    if source == "a state" and shape == "plain":
        source = "another position"
    with opened(path, shape) as (store, space):
        chunk = chunk_at(store, space, FIRST, 10)
        other = {
            "another prompt": lambda: chunk_at(store, space, SECOND, 10),
            "another position": lambda: chunk_at(store, space, FIRST, 20),
            "a state": lambda: state_at(store, space, FIRST, 40),
        }[source]()
        put(store, "chunks", layout.u64(chunk), value(store, other))
    offset = {"plain": 8, "recurrent": 0}[shape]
    check_damage(path, shape, chunk, offset)


def test_a_whole_state_in_the_place_of_another_is_never_served(tmp_path):
    path, shape = tmp_path / "store", "recurrent"
    fill(path, shape)
    with opened(path, shape) as (store, space):
        chunk = state_at(store, space, FIRST, 40)
        put(store, "chunks", layout.u64(chunk), value(store, state_at(store, space, SECOND, 40)))
    check_damage(path, shape, chunk, 20)
    check_heal(path, shape, chunk)


@pytest.mark.parametrize("source", ["another prompt", "another position"])
def test_splitting_an_edge_never_gives_a_misplaced_frame_a_fitting_header(tmp_path, source):
    path, shape = tmp_path / "store", "plain"
    fill(path, shape)
    parted = [*FIRST[:12], 1, 2, 3]
    with opened(path, shape) as (store, space):
        chunk = chunk_at(store, space, FIRST, 10)
        other = chunk_at(store, space, *((SECOND, 10) if "prompt" in source else (FIRST, 20)))
        put(store, "chunks", layout.u64(chunk), value(store, other))
        assert space.snapshot(parted, make(shape, parted)).stored is False
        hit = space.resume([*FIRST, 1])
        check_hit(shape, FIRST, hit, 8, hit.decision.reason)
        assert space.snapshot(parted, make(shape, parted)).stored
        check_hit(shape, parted, space.resume([*parted, 1]), 15, Reason.FULL)
        store.repair()
        assert not store.verify().problems


def newer_frame(data):
    """The frame as a version that is not known here, with a right checksum."""
    data = bytearray(data)
    struct.pack_into("<H", data, 4, VERSION + 1)
    state = xxhash.xxh3_64(bytes(data[:CHECKED]))
    state.update(bytes(data[HEAD.size :]))
    struct.pack_into("<Q", data, CHECKED, state.intdigest())
    return bytes(data)


def test_a_frame_of_a_newer_format_is_left_alone(filled):
    path, shape = filled
    parted = [*FIRST[:36], 1, 2, 3]
    offset = {"plain": 32, "recurrent": 20}[shape]
    with opened(path, shape) as (store, space):
        chunk = chunk_at(store, space, FIRST, 35)
        put(store, "chunks", layout.u64(chunk), newer_frame(value(store, chunk)))
        before = content(store)
        for _ in range(2):
            check_hit(shape, FIRST, space.resume([*FIRST, 1]), offset, Reason.NEWER_FORMAT)
        receipt = space.snapshot(parted, make(shape, parted))
        assert not receipt.stored
        assert f"format {VERSION + 1}" in receipt.reason
        audit = store.verify()
        assert [(p.what, p.where) for p in audit.problems] == [("newer", f"chunk {chunk}")]
        assert not audit.damaged
        store.repair()
        after = content(store)
        assert not after["quarantine"]
        assert {k: after[k] for k in ("nodes", "chunks")} == {
            k: before[k] for k in ("nodes", "chunks")
        }


def newer_node(node):
    """The record of a node in a version that is not known here."""
    data = bytearray(node.pack())
    struct.pack_into("<H", data, 8, records.VERSION + 1)
    return records.sealed(node.key, bytes(data[8:]))


def test_a_node_of_a_newer_format_keeps_all_that_it_may_own(filled):
    path, shape = filled
    with opened(path, shape) as (store, space):
        node = path_of(store, space, FIRST)[1]
        assert node.start == 8
        put(store, "nodes", node.key, newer_node(node))
        store.flush()
        before = content(store)
        check_hit(
            shape,
            FIRST,
            space.resume([*FIRST, 1]),
            {"plain": 8, "recurrent": 0}[shape],
            Reason.NEWER_FORMAT,
        )
        receipt = space.snapshot(FIRST, make(shape, FIRST))
        assert not receipt.stored
        assert "of a newer kvkeep" in receipt.reason
        assert space.trace([*FIRST, 1]).blocked is Reason.NEWER_FORMAT
        assert not store.verify().damaged
        store.repair()
        after = content(store)
        assert {k: after[k] for k in ("nodes", "chunks")} == {
            k: before[k] for k in ("nodes", "chunks")
        }
        assert not store.verify().damaged
        assert store.evict(to=0).nodes
        assert layout.u64(node.chunk_ids()[0]) in content(store)["chunks"]


@pytest.mark.parametrize("place", [0, 8, 30, -1])
def test_a_damaged_node_ends_the_path_and_is_repaired(filled, place):
    path, shape = filled
    with opened(path, shape) as (store, space):
        first, second = path_of(store, space, FIRST)[:2]
        data = bytearray(content(store)["nodes"][second.key])
    flip_in_file(path, bytes(data), place % len(data))
    reached = {"plain": 8, "recurrent": 0}[shape]
    with opened(path, shape) as (store, space):
        hit = space.resume([*FIRST, 1])
        assert hit.decision.matched == first.stop == 8
        check_hit(shape, FIRST, hit, reached, Reason.CORRUPT)
        check_hit(shape, SECOND, space.resume([*SECOND, 1]), 40, Reason.FULL)
        assert space.trace([*FIRST, 1]).blocked is Reason.CORRUPT
        assert space.trace([*SECOND, 1]).blocked is None
        store.flush()
        whole = content(store, {"events"})
        for origin in ("prompt", "interval", "output"):
            receipt = space.snapshot(FIRST, make(shape, FIRST), origin)
            assert not receipt.stored
            assert "damaged" in receipt.reason
            assert "`kvkeep verify --repair`" in receipt.reason
        store.flush()
        assert content(store, {"events", "meta"}) == {k: whole[k] for k in whole if k != "meta"}
        before = content(store)
        found = [p for p in store.verify().problems if p.damage]
        assert content(store) == before
        assert f"node {second.key[16:].hex()}" in [p.where for p in found]
        assert {p.what for p in found} <= {"damaged", "unreachable"}
        store.repair()
        assert not store.verify().problems
        check_hit(shape, SECOND, space.resume([*SECOND, 1]), 40, Reason.FULL)
        assert space.snapshot(FIRST, make(shape, FIRST)).stored
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 40, Reason.FULL)
        assert not store.verify().problems


def test_a_node_in_the_place_of_another_is_never_served(tmp_path):
    path, shape = tmp_path / "store", "plain"
    one, two = [1, 1, 5, 5, 5, 5], [2, 2, 5, 5, 5, 5]
    with opened(path, shape) as (store, space):
        for tokens in (one[:2], two[:2], one, two):
            assert space.snapshot(tokens, make(shape, tokens)).stored
        left, right = (path_of(store, space, tokens)[1] for tokens in (one, two))
        assert (left.start, right.start) == (2, 2)
        put(store, "nodes", left.key, content(store)["nodes"][right.key])
        check_hit(shape, one, space.resume([*one, 9]), 2, Reason.CORRUPT)
        found = store.verify()
        assert f"node {left.key[16:].hex()}" in [p.where for p in found.problems if p.damage]
        store.repair()
        assert not store.verify().problems
        check_hit(shape, two, space.resume([*two, 9]), 6, Reason.FULL)


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_damaged_recipe_is_found_repaired_and_healed(filled, how):
    path, shape = filled
    with opened(path, shape) as (store, space):
        recipe = path_of(store, space, FIRST)[0].recipes[0]
        data = bytearray(content(store)["recipes"][recipe])
        data[len(data) // 2] ^= 1
        with store.env.begin(write=True) as txn:
            txn.delete("recipes", recipe)
            if how == "flipped":
                txn.put("recipes", recipe, bytes(data))
        assert space.resume([*FIRST, 1]).caches is None
        audit = store.verify()
        assert audit.damaged
        assert {p.where for p in audit.problems} == {f"recipe {recipe.hex()}"}
        assert space.snapshot(FIRST, make(shape, FIRST)).stored
        assert not store.verify().problems
        check_hit(shape, SECOND, space.resume([*SECOND, 1]), 40, Reason.FULL)


def test_a_repair_without_the_recipe_frees_what_it_described(filled):
    path, shape = filled
    with opened(path, shape) as (store, space):
        recipe = path_of(store, space, FIRST)[0].recipes[0]
        with store.env.begin(write=True) as txn:
            txn.delete("recipes", recipe)
        store.repair()
        assert not store.verify().problems
        assert not content(store)["chunks"]
        assert space.snapshot(FIRST, make(shape, FIRST)).stored
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 40, Reason.FULL)
        assert not store.verify().problems


@pytest.mark.parametrize("what", ["uses", "lru", "used"])
def test_wrong_bookkeeping_is_found_and_repaired(tmp_path, what):
    path, shape = tmp_path / "store", "plain"
    fill(path, shape)
    with opened(path, shape) as (store, space):
        store.flush()
        with store.env.begin(write=True) as txn:
            if what == "used":
                txn.put("meta", b"used", layout.u64(12345))
            else:
                txn.delete(what, next(iter(list(txn.keys(what)))))
        audit = store.verify()
        assert audit.damaged
        assert {p.what for p in audit.problems} == {"count"}
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 40, Reason.FULL)
        store.repair()
        assert not store.verify().problems
        store.evict(to=0)
        assert store.used_bytes == 0
        assert not content(store)["chunks"]


@pytest.mark.parametrize("number", [None, 0, 2, (1 << 64) - 1])
def test_a_wrong_counter_of_ids_never_mixes_two_prompts(tmp_path, number):
    """A new node under the id of an old one would inherit what hangs below that."""
    path, shape = tmp_path / "store", "plain"
    old, new = [1] * 20, [2] * 20
    with opened(path, shape) as (store, space):
        for tokens in (old, [*old, *[5] * 10]):
            assert space.snapshot(tokens, make(shape, tokens)).stored
        if number is None:
            with store.env.begin(write=True) as txn:
                txn.delete("meta", b"next_id")
        else:
            put(store, "meta", b"next_id", layout.u64(number))
        assert store.verify().damaged or number == (1 << 64) - 1
        assert space.snapshot(new, make(shape, new)).stored
        for tokens, offset in (([*new, *[5] * 10], 20), ([*old, *[5] * 10], 30)):
            hit = space.resume([*tokens, 9])
            assert hit.offset == offset
            assert not problem(shape, tokens[:offset], hit.caches)
        assert not store.verify().problems


def test_a_wrong_counter_of_ids_is_repaired(tmp_path):
    path, shape = tmp_path / "store", "plain"
    fill(path, shape)
    with opened(path, shape) as (store, _):
        put(store, "meta", b"next_id", layout.u64(1))
        assert [(p.what, p.where) for p in store.verify().problems] == [("count", "meta")]
        store.repair()
        assert not store.verify().problems


@pytest.mark.parametrize("how", [lambda data: data[:-3], lambda data: b"\xc1", None])
def test_a_damaged_description_of_a_space_is_written_anew(tmp_path, how):
    path, shape = tmp_path / "store", "plain"
    fill(path, shape)
    with opened(path, shape) as (store, space):
        data = content(store)["spaces"][space.id]
        with store.env.begin(write=True) as txn:
            if how is None:
                txn.delete("spaces", space.id)
            else:
                txn.put("spaces", space.id, how(data))
        if how is not None:
            assert [p.where for p in store.verify().problems] == [f"space {space.id.hex()}"]
            assert not store.spaces()[0].fields
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 40, Reason.FULL)
    with opened(path, shape) as (store, space):
        assert space.snapshot(FIRST, make(shape, FIRST)).stored
        assert [info.id for info in store.spaces()] == [space.id.hex()]
        assert not store.verify().problems
        put(store, "spaces", space.id, b"\xc1")
        store.repair()
        assert not store.verify().problems


def test_a_store_that_may_only_be_read_serves_around_damage_and_changes_nothing(filled):
    path, shape = filled
    with opened(path, shape) as (store, space):
        chunk = chunk_at(store, space, FIRST, 35)
        data = bytearray(value(store, chunk))
        data[-5] ^= 1
        put(store, "chunks", layout.u64(chunk), bytes(data))
    offset = {"plain": 32, "recurrent": 20}[shape]
    with opened(path, shape, read_only=True) as (store, space):
        before = content(store)
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), offset, Reason.CORRUPT)
        assert space.resume([*FIRST, 1]).offset == offset
        receipt = space.snapshot(FIRST, make(shape, FIRST))
        assert not receipt.stored
        assert "reading only" in receipt.reason
        with pytest.raises(kvkeep.errors.StoreReadOnly):
            store.repair()
        with pytest.raises(kvkeep.errors.StoreReadOnly):
            store.evict(to=0)
        assert [p.where for p in store.verify().problems] == [f"chunk {chunk}"]
        assert content(store) == before


def test_what_another_process_repaired_is_not_shunned_for_its_number(tmp_path):
    path, shape = tmp_path / "store", "plain"
    with opened(path, shape) as (store, space):
        for _ in range(2):  # the second one has the last number of all
            assert space.snapshot(FIRST, make(shape, FIRST)).stored
            *_, chunk = content(store)["chunks"]
            put(store, "chunks", chunk, b"no frame")
            check_hit(shape, FIRST, space.resume([*FIRST, 1]), 32, Reason.CORRUPT)
        assert repair(store.env).damaged  # as `kvkeep verify --repair` does, beside this process
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 32, Reason.ROWS_MISSING)
        assert space.snapshot(FIRST, make(shape, FIRST)).stored
        assert layout.u64(chunk_at(store, space, FIRST, 35)) == chunk
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 40, Reason.FULL)


def test_more_damage_than_one_lookup_steps_over_is_a_miss(tmp_path, monkeypatch):
    path, shape = tmp_path / "store", "recurrent"
    fill(path, shape)
    monkeypatch.setattr("kvkeep.prefixstore.lookup.ATTEMPTS", 1)
    with opened(path, shape) as (store, space):
        chunk = state_at(store, space, FIRST, 40)
        put(store, "chunks", layout.u64(chunk), value(store, chunk)[:-1])
        check_hit(shape, FIRST, space.resume([*FIRST, 1]), 0, Reason.STORE_FAILED)
        assert space.resume([*FIRST, 1]).offset == 20


def test_rows_are_compared_and_not_only_offsets():
    """The checks above would notice one wrong bit."""
    caches = make("recurrent", FIRST)
    assert not shapes.problem("recurrent", FIRST, caches)
    for leaf, bits in ((0, 1), (1, 1)):
        wrong = make("recurrent", FIRST)
        flipped = np.array(shapes.bits_of(shapes.arrays_of(wrong[leaf])[0]))
        flipped.flat[3] ^= bits
        array = shapes.mx.array(flipped)
        if leaf == 0:
            wrong[0].keys = array.view(shapes.mx.bfloat16)
        else:
            wrong[1].cache[1] = array
        assert shapes.problem("recurrent", FIRST, wrong)
    assert replace(kvkeep.Decision(1, 1, 2, Reason.FULL), offset=2).offset == 2
