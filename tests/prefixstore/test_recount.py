"""What `verify` says of frames that nodes share or miss, and the memory that it takes for it."""

from __future__ import annotations

import tracemalloc
from contextlib import contextmanager
from dataclasses import replace

import pytest

import kvkeep
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.records import detach
from kvkeep.prefixstore.recount import readable
from tests.prefixstore.shapes import make

PROMPTS = 12
SMALL, LARGE = 300, 1500


@contextmanager
def filled(path, prompts):
    """A store of so many prompts, and so nodes, of four tokens."""
    with kvkeep.open(path, max_bytes="1GB", durability="process") as store:
        space = store.space(identity={"shape": "plain"}, layout=make("plain", ()))
        for number in range(prompts):
            space.snapshot([number, 1, 2, 3], make("plain", [number, 1, 2, 3]))
        store.flush()
        yield store


def nodes_of(store):
    with store.env.begin() as txn:
        return [detach(node) for _, node in readable(txn)]


@pytest.mark.parametrize("gone", [[0], [PROMPTS - 1], [3, 4, 8], range(PROMPTS)])
def test_every_frame_that_is_missing_is_named_with_its_owner(tmp_path, gone):
    with filled(tmp_path / "s", PROMPTS) as store:
        owners = {node.chunk_ids()[0]: node for node in nodes_of(store)}
        ids = sorted(owners)
        assert len(ids) == PROMPTS
        with store.env.begin(write=True) as txn:
            for number in gone:
                txn.delete("chunks", layout.u64(ids[number]))
        problems = store.verify().problems
    assert [(p.what, p.where) for p in problems] == [("missing", f"chunk {ids[n]}") for n in gone]
    for problem, number in zip(problems, gone, strict=True):
        assert problem.detail == f"tokens 0-4 of node {owners[ids[number]].id:x} refers to it"


def test_a_frame_that_two_nodes_refer_to_is_named_with_both(tmp_path):
    with filled(tmp_path / "s", PROMPTS) as store:
        first, *_, last = nodes_of(store)
        with store.env.begin(write=True) as txn:
            shared = replace(last, refs=first.refs)
            txn.put("nodes", last.key, shared.pack())
        found = {p.what: p for p in store.verify().problems if p.damage and p.what != "count"}
    assert set(found) == {"chunk owned twice"}
    twice = found["chunk owned twice"]
    assert twice.where == f"node {last.key[16:].hex()}"
    assert twice.detail == f"also by tokens 0-4 of node {first.id:x}"


def test_verifying_takes_little_memory_for_a_node(tmp_path):
    taken = {}
    for prompts in (SMALL, LARGE):
        with filled(tmp_path / str(prompts), prompts) as store:
            tracemalloc.start()
            try:
                before = tracemalloc.get_traced_memory()[0]
                audit = store.verify()
                taken[prompts] = tracemalloc.get_traced_memory()[1] - before
            finally:
                tracemalloc.stop()
            assert (audit.nodes, audit.chunks, audit.problems) == (prompts, prompts, [])
    assert (taken[LARGE] - taken[SMALL]) / (LARGE - SMALL) < 250
