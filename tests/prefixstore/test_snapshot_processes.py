"""Snapshots of several processes at once, after a fork, and before a kill."""

from __future__ import annotations

import signal

import pytest

import kvkeep
from tests.prefixstore.contents import content, coverage
from tests.prefixstore.processes import start, together
from tests.prefixstore.shapes import make, problem, space_of

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6] * 5

pytestmark = pytest.mark.usefixtures("small")

SCRIPT = """
import os, signal, sys
from tests.faults import light
light.install()
import kvkeep
from kvkeep.prefixstore import recipe, writer
from tests.prefixstore.shapes import make
recipe.CHUNK_BYTES = 1
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6] * 5
def opened(**options):
    return kvkeep.open(sys.argv[1], max_bytes="1GB", disk_reserve=1, **options)
def space_of(store, shape):
    return store.space(identity={"shape": shape}, layout=make(shape, ()))
"""


TOGETHER = """
print("ready", flush=True)
sys.stdin.readline()
with opened() as store:
    space = space_of(store, "plain")
    for length in range(int(sys.argv[2]), 41, 3):
        space.snapshot(TOKENS[:length], make("plain", TOKENS[:length]))
    store.flush()
"""


def test_two_processes_leave_one_copy(tmp_path):
    together(*(start(SCRIPT + TOGETHER, tmp_path / "store", first) for first in (4, 5)))
    with kvkeep.open(tmp_path / "store", disk_reserve=1) as store:
        covered = coverage(store)
        assert len(covered) == 40
        assert (covered == 1).all()
        space = space_of(store, "plain")
        points = store.inspect(space, TOKENS).points
        assert {p.offset for p in points} == {*range(4, 41, 3)} | {*range(5, 41, 3)}
        hit = space.resume([*TOKENS, 7])
        assert not problem("plain", TOKENS, hit.caches)
        assert not store.verify().problems


FORKED = """
store = opened()
space = space_of(store, "plain")
assert space.snapshot(TOKENS, make("plain", TOKENS)).stored
assert space.resume([*TOKENS, 1]).offset == 40
child = os.fork()
if not child:
    try:
        for use in (
            lambda: space.explain(TOKENS),
            lambda: space.resume(TOKENS),
            lambda: space.snapshot(TOKENS, make("plain", ())),
            store.flush, store.verify, store.spaces,
            lambda: store.evict(to=0),
        ):
            try:
                use()
            except kvkeep.errors.StoreClosed:
                continue
            except kvkeep.errors.EmptyCache:
                continue
            os._exit(3)
        store.close()
        with opened() as own:
            if space_of(own, "plain").explain([*TOKENS, 1]).offset != 40:
                os._exit(4)
            if own.evict(to=0).tokens != 40:
                os._exit(5)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(6)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert space.explain([*TOKENS, 1]).offset == 0
assert space.snapshot(TOKENS, make("plain", TOKENS)).stored
assert not store.verify().problems
store.close()
"""


def test_a_forked_child_must_open_the_store_again(tmp_path):
    process = start(SCRIPT + FORKED, tmp_path / "store")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


KILLED = """
from kvkeep.prefixstore.ledger import Ledger
writer.ONE_TRANSACTION = 0
left, put = int(sys.argv[2]), Ledger.put_chunk
def counted(self, frame):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return put(self, frame)
with opened() as store:
    space = space_of(store, "recurrent")
    Ledger.put_chunk = counted
    assert not space.snapshot(TOKENS * 3, make("recurrent", TOKENS * 3)).stored
"""
CHUNKS = 7
"""[40, 48), [48, 64) … of 120 tokens, and a state: the last two are put while publishing."""


@pytest.mark.parametrize("at", [1, 2, CHUNKS - 1, CHUNKS])
def test_a_kill_within_a_large_write_leaves_nothing_of_it(tmp_path, at):
    path = tmp_path / "store"
    with kvkeep.open(path, max_bytes="1GB", disk_reserve=1) as store:
        assert space_of(store, "recurrent").snapshot(TOKENS, make("recurrent", TOKENS)).stored
        store.flush()
        before = content(store, ["nodes", "chunks"])
    process = start(SCRIPT + KILLED, path, at)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-signal.SIGKILL, "")
    with kvkeep.open(path, read_only=True) as store:
        seen = content(store)
        committed = min(at - 1, CHUNKS - 2)
        assert len(seen["pending"]) == (committed + 1 if committed else 0)
        assert len(seen["chunks"]) == len(before["chunks"]) + committed
        assert seen["nodes"] == before["nodes"]
        assert not store.verify().problems
        assert space_of(store, "recurrent").explain([*TOKENS * 3, 1]).matched == 40
    with kvkeep.open(path, disk_reserve=1) as store:
        assert content(store, ["nodes", "chunks"]) == before
        assert not content(store, ["pending"])["pending"]
        assert not store.verify().problems
        space = space_of(store, "recurrent")
        receipt = space.snapshot(TOKENS * 3, make("recurrent", TOKENS * 3))
        assert receipt.stored
        assert len(content(store)["chunks"]) == len(before["chunks"]) + CHUNKS
        hit = space.resume([*TOKENS * 3, 1])
        assert not problem("recurrent", TOKENS * 3, hit.caches)
