"""What is simulated is what runs: the same requests evict the same edges of a real store."""

from __future__ import annotations

import random

import numpy as np
import pytest

import kvkeep
from kvkeep.prefixstore.evict import give_up, leaves
from kvkeep.prefixstore.eviction import policy_named
from kvkeep.prefixstore.eviction.order import victims
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.records import unpack
from kvkeep.prefixstore.simulate.trie import Trie
from tests.prefixstore.clock import SECOND
from tests.prefixstore.shapes import make

pytestmark = pytest.mark.usefixtures("raw")

BLOCK = 16


def tokens_of(blocks):
    """Different tokens for different blocks, also at their beginning."""
    return [1000 * block + i for block in blocks for i in range(BLOCK)]


def prompts(seed):
    """Conversations that grow, part and come back, one block of system prompt in common."""
    rng = random.Random(seed)
    conversations = [[0]]
    for number in range(1, 60):
        turn = rng.choice(conversations)
        if rng.random() < 0.25:
            turn = turn[: rng.randint(1, len(turn))]
        turn = turn + [10 * number + i for i in range(rng.randint(1, 3))]
        conversations.append(turn)
        yield rng.choice(conversations) if rng.random() < 0.3 else turn


@pytest.mark.parametrize("name", ["lru", "probation"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_store_evicts_what_the_simulation_evicts(tmp_path, monkeypatch, clock, name, seed):
    monkeypatch.setattr("kvkeep.prefixstore.recipe.CHUNK_BYTES", 1)
    trie = Trie(policy_named(name), 1 << 30)
    rng = random.Random(seed)
    compared = hits = 0
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1, eviction=name) as store:
        assert store.eviction == name
        space = store.space(identity={}, layout=make("plain", ()))
        for blocks in prompts(seed):
            clock.now += rng.randint(1, 20) * SECOND
            tokens = tokens_of(blocks)
            hit = space.resume([*tokens, 1])
            store.flush()
            assert space.snapshot(tokens, make("plain", tokens)).stored
            matched, _ = trie.request(np.array(blocks, np.int64), clock.now)
            assert hit.offset == matched * BLOCK
            hits += hit.offset
            for _ in range(rng.choice([0, 0, 1, 2])):
                gone, expected = evict_one(store), drop_one(trie)
                assert gone == expected
                compared += gone is not None
        assert not store.verify().problems
    assert compared > 20
    assert hits > 50 * BLOCK


OTHER = 1_000_000
"""Blocks from here on are those of the second model, which has half the layers."""


class TwoModels(Trie):
    """A simulation in which the blocks of the second model have bytes of their own."""

    def _touch(self, path, when, **options):
        self.block_bytes = self.both[bool(path) and int(path[0].run[0]) >= OTHER]
        super()._touch(path, when, **options)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_by_size_a_store_of_two_models_evicts_what_the_simulation_evicts(
    tmp_path, monkeypatch, clock, seed
):
    monkeypatch.setattr("kvkeep.prefixstore.recipe.CHUNK_BYTES", 1)
    trie = TwoModels(policy_named("size"), 1 << 30, BLOCK)
    rng = random.Random(seed)
    went = []
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1, eviction="size") as store:
        spaces = [store.space(identity={"layers": n}, layout=make("plain", ())[:n]) for n in (2, 1)]
        trie.both = [block_bytes(store, space, n) for n, space in zip((2, 1), spaces, strict=True)]
        assert trie.both[0] > trie.both[1] + 1000
        for blocks in prompts(seed):
            clock.now += rng.randint(1, 20) * SECOND
            other = rng.random() < 0.5
            if other:
                blocks = [OTHER + block for block in blocks]
            tokens = tokens_of(blocks)
            hit = spaces[other].resume([*tokens, 1])
            store.flush()
            caches = make("plain", tokens)[: 2 - other]
            assert spaces[other].snapshot(tokens, caches).stored
            matched, _ = trie.request(np.array(blocks, np.int64), clock.now)
            assert hit.offset == matched * BLOCK
            for _ in range(rng.choice([0, 0, 1, 2])):
                gone, expected = evict_one(store), drop_one(trie)
                assert gone == expected
                went += [gone[1] >= OTHER] if gone else []
        assert not store.verify().problems
    assert len(went) > 20
    assert 0 < sum(went) < len(went) / 2, "the heavier model's blocks go first"


def block_bytes(store, space, layers):
    """Bytes of one block's rows; leaves nothing behind."""
    tokens = tokens_of([7])
    assert space.snapshot(tokens, make("plain", tokens)[:layers]).stored
    with store.env.begin(write=True) as txn:
        sizes = {int(n.refs["size"].sum()) for n in nodes(txn) if n.space == space.id}
        ledger = Ledger(txn)
        for node in leaves(ledger, ()):
            give_up(ledger, node)
        ledger.shelf.floor = 0
        ledger.settle()
    assert len(sizes) == 1
    return sizes.pop()


def nodes(txn):
    return [unpack(key, data) for key, data in txn.items("nodes")]


def evict_one(store):
    """The first and the last block of the edge that goes next, and where it begins."""
    with store.env.begin(write=True) as txn:
        ledger = Ledger(txn)
        order = leaves(ledger, ())
        node = next(order, None)
        if node is not None:
            give_up(ledger, node)
            next(order, None)
        ledger.settle()
    if node is None:
        return None
    return node.start // BLOCK, int(node.tokens[0]) // 1000, int(node.tokens[-1]) // 1000


def drop_one(trie):
    order = victims(trie.shelf, lambda _, mark: not mark.key.below, ())
    found = next(order, None)
    if found is None:
        return None
    edge = found[1].key
    trie._give_up(edge, len(edge.run))
    next(order, None)
    return edge.start, int(edge.run[0]), int(edge.run[-1])
