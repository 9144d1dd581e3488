"""What the hot paths do, counted: a number that does not depend on how busy the machine is.

A bound here was met with some room when it was written. Where a change needs more, the
benchmarks say whether it is worth it.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest

import kvkeep
from benchmarks.rows import LONG, Shape, check, empty, extend, tokens
from kvkeep.persistence import frame
from kvkeep.persistence.environment import Environment, Transaction

TINY = Shape(1, 1, 1)
EDGES = 50


@pytest.fixture
def store(tmp_path):
    with kvkeep.open(tmp_path / "store", max_bytes="2GB", disk_reserve=1) as store:
        yield store


def tiny(count):
    (cache,) = empty(TINY)
    rows = mx.zeros((1, 1, count, 1), mx.bfloat16)
    cache.update_and_fetch(rows, rows)
    return [cache]


@contextmanager
def python_calls():
    """The Python functions that this thread calls inside the block, counted when it ends."""
    counted = Counter()

    def note(called, event, _):
        if event == "call":
            counted[called.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        yield counted
    finally:
        sys.setprofile(None)


@pytest.fixture
def records(monkeypatch):
    """How often records of each database are read and written, in any thread."""
    counted = Counter()
    for name in ("get", "put"):
        original = getattr(Transaction, name)

        def counting(self, database, *args, _name=name, _original=original, **options):
            counted[_name, database] += 1
            return _original(self, database, *args, **options)

        monkeypatch.setattr(Transaction, name, counting)
    return counted


@pytest.fixture
def commits(monkeypatch):
    """The write transactions that are begun."""
    begun = []
    original = Environment.begin

    def counting(self, write=False):
        if write:
            begun.append(write)
        return original(self, write)

    monkeypatch.setattr(Environment, "begin", counting)
    return begun


def conversation(space, number, length, turns):
    """Store ``turns`` turns of ``length`` tokens in all; the whole prompt."""
    prompt = tokens(length, number)
    for turn in range(1, turns + 1):
        count = turn * length // turns
        assert space.snapshot(prompt[:count], tiny(count)).wait()
    return np.append(prompt, 1)


def test_a_lookup_reads_one_record_for_each_edge_whatever_else_is_stored(store, records):
    space = store.space(identity={}, layout=empty(TINY))
    prompt = conversation(space, 0, 1000, EDGES)
    found = []
    for others in (0, 200):
        for number in range(1, others):
            conversation(space, number, 20, 1)
        store.flush()
        records.clear()
        assert space.explain(prompt).offset == len(prompt) - 1
        found.append(dict(records))
    assert found[0] == found[1]
    assert found[0]["get", "nodes"] == EDGES + 1
    assert sum(found[0].values()) <= EDGES + 12


def test_a_lookup_does_nothing_in_python_for_each_token(store):
    space = store.space(identity={}, layout=empty(TINY))
    calls = []
    for number, length in enumerate((1000, 100_000)):
        prompt = conversation(space, number, length, 4)
        store.flush()
        space.explain(prompt)
        with python_calls() as counted:
            assert space.explain(prompt).offset == length
        calls.append(counted.total())
    assert calls[0] > 0
    # More chunks lie on the longer path; a few calls for each are all that may be added.
    assert calls[1] <= calls[0] + 80
    assert calls[0] <= 420


def test_a_turn_costs_its_own_tokens_whatever_came_before(store, records, commits):
    space = store.space(identity={}, layout=empty(LONG))
    turn, found = 256, []
    for seed, before in enumerate((512, 8192)):
        prompt, caches = tokens(before + turn, seed), empty(LONG)
        extend(caches, LONG, before, seed)
        assert space.snapshot(prompt[:before], caches).wait()
        extend(caches, LONG, before + turn, seed)
        records.clear()
        commits.clear()
        with python_calls() as counted:
            receipt = space.snapshot(prompt, caches)
        assert receipt.wait()
        found.append((receipt.bytes_written, counted.total(), len(commits), records.total()))
    rows = LONG.nbytes(turn)
    (bytes_short, calls_short, commits_short, records_short), long = found
    assert rows <= bytes_short <= 1.01 * rows
    assert long[0] <= bytes_short + 4096
    assert long[1] <= calls_short + 100 <= 3300
    assert long[2] == commits_short == 1
    assert long[3] <= records_short + 5 <= 65


def test_a_restore_reads_and_checks_every_byte_once(store, records, monkeypatch):
    checked = []
    checksum = frame._checksum

    def counting(data):
        checked.append(data.nbytes)
        return checksum(data)

    monkeypatch.setattr(frame, "_checksum", counting)
    space = store.space(identity={}, layout=empty(LONG))
    caches, count = empty(LONG), 4096
    extend(caches, LONG, count, 0)
    prompt = tokens(count, 0)
    assert space.snapshot(prompt, caches).wait()
    del caches
    mx.clear_cache()
    stored = store.used_bytes
    records.clear()
    checked.clear()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    hit = space.resume(np.append(prompt, 1))
    assert hit.offset == count
    compared = check(hit.caches, LONG, 0, count, 0)
    assert compared == LONG.nbytes(count)
    chunks = records["get", "chunks"]
    assert chunks >= compared // (16 << 20)
    assert chunks <= compared // (4 << 20) + 2
    assert compared <= sum(checked) <= 1.02 * stored
    assert mx.get_peak_memory() - held <= 1.1 * compared


def test_the_counter_sees_work_for_each_token():
    with python_calls() as counted:
        for _ in range(500):
            tiny_step()
    assert counted["tiny_step"] == 500


def tiny_step():
    """One call."""
