"""States are thinned by their rule, apart from rows, and nothing dead stays behind."""

from __future__ import annotations

import numpy as np
import pytest

import kvkeep
from kvkeep import Reason
from kvkeep.prefixstore.evict import thin as thin_one
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.records import unpack
from kvkeep.prefixstore.states import States, state_of
from kvkeep.prefixstore.tokens import as_tokens
from kvkeep.prefixstore.trie import walk
from tests.prefixstore.shapes import make, problem

TOKENS = list(range(640))
SHAPE = "recurrent"


pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def store(tmp_path):
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as opened:
        yield opened


def space_of(store, shape=SHAPE):
    return store.space(identity={"shape": shape}, layout=make(shape, ()))


def keep(space, stop, origin="prompt", tokens=TOKENS, shape=SHAPE):
    receipt = space.snapshot(tokens[:stop], make(shape, tokens[:stop]), origin=origin)
    assert receipt.stored, receipt


def points(store, space, tokens=TOKENS):
    return [p.offset for p in store.inspect(space, tokens).points]


def halvings(store, space, tokens=TOKENS):
    """Halvings by offset, from the records."""
    store.flush()
    found = {}
    with store.env.begin() as txn:
        for key, data in txn.items("nodes", prefix=space.id):
            for point in unpack(key, data).points:
                found[point.offset] = state_of(txn, point.state).halvings
    return found


def thin(store, count=1):
    """Thin so many states; the offsets that went, in order."""
    gone = []
    for _ in range(count):
        with store.env.begin(write=True) as txn:
            ledger = Ledger(txn)
            chunk, mark = next(ledger.states.ascending())
            assert thin_one(ledger, chunk, ())
            ledger.states.floor = max(ledger.states.floor, mark.score)
            ledger.settle()
        gone.append(mark.offset)
    return gone


def test_halvings_follow_what_a_point_is_and_where(store):
    space = space_of(store)
    for stop in range(32, 353, 32):
        keep(space, stop, "interval")
    keep(space, 370, "prompt")
    keep(space, 380, "output")
    assert halvings(store, space) == {
        32: 4,
        64: 3,
        96: 4,
        128: 2,
        160: 4,
        192: 3,
        224: 4,
        256: 2,
        288: 4,
        320: 3,
        352: 0,  # strictly below the prompt's end, where an exact replay resumes
        370: 0,
        380: 0,
    }
    keep(space, 400, "prompt")
    assert halvings(store, space)[352] == 4
    assert space.resume(TOKENS[:70]).offset == 64
    assert halvings(store, space)[64] == 1
    keep(space, 420, "output")
    found = halvings(store, space)
    assert (found[64], found[370], found[380], found[400]) == (1, 1, 0, 0)


def test_intervals_go_every_second_first_and_the_last_three_last(store):
    space = space_of(store)
    for stop in range(32, 353, 32):
        keep(space, stop, "interval")
    keep(space, 370, "prompt")
    keep(space, 380, "output")
    gone = thin(store, 12)
    assert set(gone[-2:]) <= {352, 370, 380}
    odd, twos, fours = (
        [gone.index(x) for x in stops]
        for stops in ((32, 96, 160, 224, 288), (64, 192, 320), (128, 256))
    )
    assert np.mean(odd) < np.mean(twos) < np.mean(fours) < gone.index(352 if 352 in gone else 370)
    assert not store.verify().problems


def test_an_exact_replay_hits_as_long_as_anything_of_its_conversation_is_kept(store):
    space = space_of(store)
    for stop in range(32, 353, 32):
        keep(space, stop, "interval")
    keep(space, 370, "prompt")
    keep(space, 380, "output")
    for _ in range(10):
        hit = space.resume(TOKENS[:370])
        assert 0 < hit.offset <= 352
        assert not problem(SHAPE, TOKENS[: hit.offset], hit.caches)
        thin(store)
    assert space.resume(TOKENS[:370]).offset == 352
    assert points(store, space) == [352, 370, 380]


def test_rows_that_nothing_can_resume_any_more_go_with_the_last_state(store):
    space = space_of(store)
    keep(space, 100)
    keep(space, 200)
    branch = [*TOKENS[:150], *range(5000, 5050)]
    keep(space, 200, tokens=branch)
    assert covered(store, space, TOKENS) == covered(store, space, branch) == ((0, 200),)
    end = next(c for c, m in all_states(store) if m.offset == 200 and on_path(store, space, c))
    drop(store, end)
    assert covered(store, space, TOKENS) == ((0, 150),)
    assert covered(store, space, branch) == ((0, 200),)
    assert space.explain([*TOKENS[:200], 1]).offset == 100
    assert space.explain([*branch, 1]).offset == 200
    assert not store.verify().problems
    other = next(c for c, m in all_states(store) if m.offset == 200)
    drop(store, other)
    assert covered(store, space, TOKENS) == ((0, 100),)
    assert space.explain([*branch, 1]).offset == 100
    assert not store.verify().problems
    for chunk, _ in all_states(store):
        drop(store, chunk)
    assert store.used_bytes == 0
    with store.env.begin() as txn:
        assert txn.count("nodes") == txn.count("chunks") == txn.count("states") == 0


def covered(store, space, tokens):
    return store.inspect(space, tokens).rows[0].covered


def all_states(store):
    with store.env.begin() as txn:
        return list(States(txn, 0).ascending())


def drop(store, chunk):
    with store.env.begin(write=True) as txn:
        ledger = Ledger(txn)
        assert thin_one(ledger, chunk, ()) is not None
        ledger.settle()


def test_rows_below_a_branch_stay_for_the_other_branch(store):
    space = space_of(store)
    branch = [*TOKENS[:150], *range(5000, 5050)]
    keep(space, 200)
    keep(space, 200, tokens=branch)
    drop(store, next(c for c, _ in all_states(store) if on_path(store, space, c)))
    assert covered(store, space, TOKENS) == ((0, 150),)
    hit = space.resume([*branch, 1])
    assert hit.offset == 200
    assert not problem(SHAPE, branch, hit.caches)


def on_path(store, space, chunk):
    with store.env.begin() as txn:
        nodes = walk(txn, space.id, as_tokens(TOKENS)).nodes
        return any(p.state == chunk for node in nodes for p in node.points)


def test_states_keep_to_their_share_and_rows_to_the_rest(tmp_path):
    kept = {}
    for share in (0.1, 0.6):
        with kvkeep.open(
            tmp_path / str(share), max_bytes=400_000, disk_reserve=1, state_share=share
        ) as store:
            space = space_of(store)
            for number in range(12):
                tokens = [10_000 * number + i for i in range(256)]
                for stop in range(32, 257, 32):
                    origin = "interval" if stop < 256 else "prompt"
                    keep(space, stop, origin, tokens)
                    assert store.used_bytes <= 400_000
            with store.env.begin() as txn:
                ledger_bytes = sum(m.size for _, m in States(txn, 0).ascending())
                nodes = txn.count("nodes")
            kept[share] = (ledger_bytes / 400_000, nodes)
            assert not store.verify().problems
            last = [10_000 * 11 + i for i in range(256)]
            assert space.resume([*last, 1]).offset == 256
    assert kept[0.1][0] < 0.15 < kept[0.6][0]


def test_a_store_of_states_alone_uses_its_whole_budget(tmp_path):
    with kvkeep.open(tmp_path / "store", max_bytes=200_000, disk_reserve=1) as store:
        space = space_of(store, "arrays")
        for number in range(80):
            tokens = [10_000 * number + i for i in range(40)]
            keep(space, 40, tokens=tokens, shape="arrays")
            assert store.used_bytes <= 200_000
        assert store.used_bytes > 180_000
        assert space.explain([*tokens, 1]).offset == 40
        assert not store.verify().problems


def test_a_conversation_that_fills_the_budget_thins_its_own_intervals(tmp_path):
    with kvkeep.open(
        tmp_path / "store", max_bytes=330_000, disk_reserve=1, state_share=0.2
    ) as store:
        space = space_of(store)
        for stop in range(16, 641, 16):
            keep(space, stop, "interval" if stop < 640 else "prompt")
            assert space.explain([*TOKENS[:stop], 1]).offset == stop
        found = points(store, space)
        assert len(found) < 40
        assert found[-3:] == [608, 624, 640]
        assert space.explain([*TOKENS, 1]).reason is Reason.FULL
        assert store.used_bytes <= 330_000
        assert not store.verify().problems
