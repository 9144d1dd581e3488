"""The simulation against a slow one that keeps every block by itself."""

from __future__ import annotations

import gzip
import json
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.prefixstore.eviction import POLICIES, UnknownPolicy, policy_named
from kvkeep.prefixstore.eviction.base import Use
from kvkeep.prefixstore.simulate.replay import SECOND, replay
from kvkeep.prefixstore.simulate.traces import Request, TraceUnreadable, read_trace

TRACES = Path(__file__).parents[1] / "data" / "traces"


class Edge(NamedTuple):
    start: int
    rank: int
    hits: int
    id: int


class Slow:
    """Edges by the ids that lead to their end. Evicts block by block.

    A use of a part of an edge counts for all of it, until a prompt that parts there cuts it.
    What one request evicts of an edge is remembered by its first block, as the store does.
    """

    def __init__(self, policy, capacity, block_tokens, block_bytes):
        self.policy, self.capacity = policy, capacity
        self.tokens, self.bytes = block_tokens, block_bytes
        self.kept, self.gone, self.floor, self.evicted, self.ids = {}, set(), 0, 0, count(1)

    def blocks(self):
        return sum(len(path) - edge.start for path, edge in self.kept.items())

    def on(self, ids):
        return [path for path, edge in self.kept.items() if shared(ids, path) > edge.start]

    def request(self, ids, when):
        matched = max((shared(ids, path) for path in self.kept), default=0)
        on = self.on(ids)
        self.touch(on, when, 1)
        new, cut = len(ids) - matched, {}
        returned = int(ids[: matched + 1] in self.gone)
        while self.capacity is not None and new and self.blocks() + new > self.capacity:
            if not self.evict(on, cut):
                new = None
        self.gone.update(cut.values())
        if new:
            for path in on:
                if self.kept[path].start < matched < len(path):
                    self.kept[path[:matched]] = self.kept[path]._replace(id=next(self.ids))
                    self.kept[path] = self.kept[path]._replace(start=matched)
            self.kept[ids] = Edge(matched, 0, returned, next(self.ids))
        if new is not None:
            self.touch(self.on(ids), when, 0)
        return matched, new

    def evict(self, spare, cut):
        parents = {path[: edge.start] for path, edge in self.kept.items()}
        free = [p for p in self.kept if p not in parents and p not in spare]
        if not free:
            return False
        victim = min(free, key=lambda p: (self.kept[p].rank, -self.kept[p].start, self.kept[p].id))
        edge = self.kept.pop(victim)
        self.floor = max(self.floor, edge.rank)
        cut[edge.id] = victim
        self.evicted += 1
        if edge.start < len(victim) - 1:
            self.kept[victim[:-1]] = edge
        return True

    def touch(self, paths, when, hit):
        self.floor, least = self.floor or (when if paths else 0), 0
        for path in sorted(paths, key=len, reverse=True):
            edge = self.kept[path]
            n = len(path) - edge.start
            use = Use(when, edge.hits + hit, n * self.tokens, n * self.bytes)
            least = max(self.policy.rank(use, self.floor), least, edge.rank)
            self.kept[path] = edge._replace(rank=least, hits=edge.hits + hit)


def shared(left, right):
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def slowly(requests, policy, block_tokens, block_bytes, capacity):
    """What ``replay`` should find for one policy: resumed, written, evicted, refused, kept."""
    slow, now, resumed, written, refused = (
        Slow(policy, capacity, block_tokens, block_bytes),
        0,
        0,
        0,
        0,
    )
    for number, request in enumerate(requests, 1):
        now = max(now + 1, request.when if request.when is not None else number * SECOND)
        matched, new = slow.request(tuple(request.blocks.tolist()), now)
        resumed += min(matched * block_tokens, request.tokens - 1)
        written += new or 0
        refused += new is None
    return resumed, written, slow.evicted, refused, slow.blocks()


def compared(requests, block_tokens, capacity):
    """Compare all policies; the outcomes and the ceiling."""
    block_bytes = 3 * block_tokens
    policies = list(POLICIES.values())
    ceiling, outcomes = replay(requests, policies, block_tokens, block_bytes, capacity)
    best = slowly(requests, POLICIES["lru"], block_tokens, block_bytes, None)
    assert (ceiling.resumed_tokens, ceiling.written_blocks) == best[:2]
    for outcome in outcomes:
        expected = slowly(requests, POLICIES[outcome.policy], block_tokens, block_bytes, capacity)
        got = (
            outcome.resumed_tokens,
            outcome.written_blocks,
            outcome.evicted_blocks,
            outcome.refused,
            outcome.kept_blocks,
        )
        assert got == expected, outcome.policy
        assert outcome.kept_blocks <= capacity
        assert outcome.regret_tokens == ceiling.resumed_tokens - outcome.resumed_tokens
    return ceiling, {outcome.policy: outcome for outcome in outcomes}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=40),
    st.integers(1, 16),
    st.booleans(),
)
def test_a_replay_counts_what_a_slow_one_counts(prompts, capacity, clocked):
    requests = [
        Request(np.array(ids, np.int64), 10 * len(ids) - n % 3, n * n * 7 if clocked else None)
        for n, ids in enumerate(prompts)
    ]
    compared(requests, 10, capacity)


@pytest.mark.parametrize(
    ("name", "block", "capacity", "prompts", "ceiling", "lru", "probation", "size"),
    [
        ("hashed.jsonl", 512, 24, 177_755, 141_824, 94_208, 95_744, 92_672),
        ("runs.jsonl.gz", 64, 150, 139_897, 88_768, 88_256, 85_504, 81_920),
        ("text", 256, 12, 7_693, 3_840, 3_840, 3_840, 3_840),
    ],
)
def test_each_format(name, block, capacity, prompts, ceiling, lru, probation, size):
    trace = read_trace(TRACES / name)
    assert trace.block_tokens == block
    top, found = compared(list(trace.replayed(2)), block, capacity)
    assert top.requests == trace.requests
    assert (top.prompt_tokens, top.resumed_tokens) == (prompts, ceiling)
    resumed = tuple(found[name].resumed_tokens for name in ("lru", "probation", "size"))
    assert resumed == (lru, probation, size)


def test_prompts_of_the_formats_are_read_as_they_were_written():
    hashed = json.loads((TRACES / "hashed.jsonl").read_text().splitlines()[3])
    request = list(read_trace(TRACES / "hashed.jsonl").replayed())[3]
    assert request.blocks.tolist() == hashed["hash_ids"]
    assert (request.tokens, request.when) == (
        hashed["input_length"],
        hashed["timestamp"] * 1_000_000,
    )
    lines = gzip.decompress((TRACES / "runs.jsonl.gz").read_bytes()).splitlines()
    runs = json.loads(lines[1])
    request = list(read_trace(TRACES / "runs.jsonl.gz").replayed())[1]
    assert request.blocks.tolist() == [x for a, n in runs["rle"] for x in range(a, a + n)]
    text = json.loads((TRACES / "text" / "0.jsonl").read_text().splitlines()[2])
    request = list(read_trace(TRACES / "text").replayed())[2]
    assert len(request.blocks) == len(text["input"]) // 1024 > 3
    assert request.tokens == len(text["input"]) // 4


def test_sessions_take_turns_and_share_nothing():
    trace = read_trace(TRACES / "runs.jsonl.gz")
    order = [int(r.blocks[0]) >> 32 for r in trace.replayed(2)]
    lengths = [len(lines) for lines in trace.sessions.values()]
    first = min(lengths[:2])
    assert order[: 2 * first] == [0, 1] * first
    assert sorted(order) == [n for n, length in enumerate(lengths) for _ in range(length)]
    assert [int(r.blocks[0]) >> 32 for r in trace.replayed(1)] == sorted(order)


def test_larger_blocks_are_those_of_the_prefix():
    trace = read_trace(TRACES / "runs.jsonl.gz")
    for small, large in zip(trace.replayed(), trace.in_blocks_of(256).replayed(), strict=True):
        assert len(large.blocks) == len(small.blocks) // 4
        assert large.tokens == small.tokens
    with pytest.raises(TraceUnreadable):
        trace.in_blocks_of(100)


def test_policies_are_known_by_name():
    assert all(policy_named(name).name == name for name in POLICIES)
    with pytest.raises(UnknownPolicy, match="No eviction policy"):
        policy_named("fifo")
