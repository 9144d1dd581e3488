"""What is written follows the new tokens: every row once, whatever the length of the talk."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from benchmarks.turns import conversation
from kvkeep.hooks.prefill import prefill
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore.records import unpack
from tests import architectures
from tests.prefixstore.shapes import make

TURNS = 100
NAMES = ("llama", "gemma3_text", "qwen3_next")


def stored_rows(store):
    """For each family of rows: how often each position of each node is stored."""
    found = {}
    with store.env.begin() as txn:
        for key, data in txn.items("nodes"):
            node = unpack(key, data)
            for recipe, family, start, stop, *_ in node.refs.tolist():
                counts = found.setdefault((node.recipes[recipe], family), {})
                for position in range(start, stop):
                    at = (node.id, position)
                    counts[at] = counts.get(at, 0) + 1
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_turns_write_every_row_once(tmp_path, name):
    turns = list(conversation(name, tmp_path, TURNS, 5, 3))
    tokens = turns[-1].tokens
    assert len(turns) == TURNS
    assert [turn.tokens for turn in turns] == [7 + 7 * n for n in range(TURNS)]
    with kvkeep.open(tmp_path / "store", disk_reserve=1) as store:
        rows = stored_rows(store)
        assert rows
        for counts in rows.values():
            assert set(counts.values()) == {1}
            assert sorted(position for _, position in counts) == list(range(tokens))
        assert store.verify().problems == []
    written = [turn.kvkeep for turn in turns]
    assert max(written[1:]) <= 1.2 * min(written[1:]), "a turn costs the same, early or late"
    assert turns[-1].naive > 2 * turns[0].naive
    assert sum(written) < sum(turn.naive for turn in turns) / 4


@pytest.mark.parametrize("name", NAMES)
def test_a_branch_shares_everything_before_it(tmp_path, name):
    model = architectures.build(name)
    rng = np.random.default_rng(5)
    trunk, *ends = (rng.integers(0, architectures.VOCAB, n).tolist() for n in (96, 20, 20, 20))
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as store:
        space = store.space(identity={}, layout=make_prompt_cache(model))
        caches = make_prompt_cache(model)
        prefill(model, trunk, caches)
        first = space.snapshot(trunk, caches)
        assert (first.tokens_new, first.tokens_known) == (96, 0)
        receipts = []
        for end in ends:
            hit = space.resume([*trunk, *end])
            assert hit.offset == 96
            prefill(model, end, hit.caches)
            receipts.append(space.snapshot([*trunk, *end], hit.caches))
        assert [(r.tokens_new, r.tokens_known) for r in receipts] == [(20, 96)] * 3
        assert max(r.bytes_written for r in receipts) < first.bytes_written
        positions = [p for counts in stored_rows(store).values() for _, p in counts]
        families = len(stored_rows(store))
        assert len(positions) == families * (96 + 3 * 20)
        assert store.verify().problems == []


def test_a_ring_comes_back_at_any_offset_whose_window_was_ever_held(tmp_path):
    model = architectures.build("gemma3_text")
    rng = np.random.default_rng(6)
    tokens = rng.integers(0, architectures.VOCAB, 90).tolist()
    resumed = 0
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as store:
        space = store.space(identity={}, layout=make_prompt_cache(model))
        caches, done = make_prompt_cache(model), 0
        for stop in range(10, 91, 10):
            prefill(model, tokens[done:stop], caches)
            space.snapshot(tokens[:stop], caches).wait()
            done = stop
        for offset in range(1, 90):
            hit = space.resume([*tokens[:offset], architectures.VOCAB])
            assert hit.offset == offset, "rows of windows are kept by position"
            rings = [c for c in hit.caches if hasattr(c, "max_size")]
            assert rings
            mx.eval([c.state for c in hit.caches])
            resumed += all(c.offset == offset for c in hit.caches)
    assert resumed == 89


def test_a_turn_writes_no_record_again_that_lies_above_it(tmp_path, monkeypatch):
    written = []
    put = Transaction.put

    def counted(txn, database, key, value, **options):
        written.append((database, bytes(key), len(value)))
        put(txn, database, key, value, **options)

    monkeypatch.setattr(Transaction, "put", counted)
    prompt = list(range(3000))
    with kvkeep.open(tmp_path / "store", max_bytes="1GB", disk_reserve=1) as store:
        space = store.space(identity={}, layout=make("plain", ()))
        for turn in range(10):
            tokens = [*prompt, *range(turn * 5)]
            store.flush()
            written.clear()
            assert space.snapshot(tokens, make("plain", tokens)).stored
            nodes = [size for database, _, size in written if database == "nodes"]
            assert len(nodes) == 1
            if turn:
                assert nodes[0] < 1000, "the prompt's record, with all its tokens, stays"
        # A turn that parts from the path in the middle of an edge splits that one.
        written.clear()
        tokens = [*prompt, *range(12), 7, 7]
        assert space.snapshot(tokens, make("plain", tokens)).stored
        changed = {key for database, key, _ in written if database == "nodes"}
        assert len(changed) == 3
        assert store.verify().problems == []
