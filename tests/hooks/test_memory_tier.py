"""Live caches in memory: what comes out is right bit for bit, aliases nothing, and is counted."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from kvkeep.hooks.live_caches import clone, nbytes, own
from kvkeep.hooks.memory_tier import Entry, MemoryTier
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.recipe import read_caches
from kvkeep.prefixstore.tokens import as_tokens, common_prefix
from tests.prefixstore import shapes

SHAPES = sorted(set(shapes.SHAPES) - {"delayed"})
CHECKED: list[int] = []
STORED = Receipt().settle(True, 1, "stored")


def entry(shape, tokens, prefill=None, receipt=None, home="h", **more):
    caches = own(shapes.make(shape, tokens, prefill))
    return Entry(
        home,
        as_tokens(tokens),
        caches,
        read_caches(caches, len(tokens)),
        receipt=receipt,
        **more,
    )


def right(shape, held, prefill, asked):
    """How far a cache over ``held`` can be resumed for ``asked``, told the slow way."""
    limit = min(common_prefix(as_tokens(held), as_tokens(asked)), len(asked) - 1)
    if len(held) <= limit:
        return len(held)
    if shape in shapes.STATEFUL:
        return 0
    if shape not in shapes.RINGS | {"ring", "kept"}:
        return limit
    window = shapes.WINDOW
    slots = prefill if len(held) == prefill else min(len(held), window)
    slots = max(slots, min(len(held), window))
    lost = len(held) - slots
    return limit if lost <= 0 or limit - window >= lost else 0


@settings(max_examples=150, deadline=None)
@given(data=st.data(), shape=st.sampled_from(SHAPES))
def test_each_lookup_reaches_as_far_as_the_rows_allow_and_no_byte_is_wrong(data, shape):
    tier = MemoryTier(max_size=50, max_bytes=1 << 40)
    kept = []
    base = [5, 1, 4, 1, 3, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    for _ in range(data.draw(st.integers(1, 4))):
        cut = data.draw(st.integers(1, len(base)))
        tail = data.draw(st.lists(st.integers(10, 12), max_size=4))
        tokens = base[:cut] + tail
        prefill = data.draw(st.integers(1, len(tokens)))
        receipt = data.draw(st.sampled_from([None, STORED]))
        new = entry(shape, tokens, prefill, receipt)
        tier.insert(new)
        kept.append((tokens, prefill))
    asked = base[: data.draw(st.integers(2, len(base)))] + data.draw(
        st.lists(st.integers(10, 13), max_size=3)
    )
    offset, found = tier.best("h", as_tokens(asked))
    assert offset == max(
        (right(shape, e.tokens.tolist(), _prefill(kept, e), asked) for e in tier._entries),
        default=0,
    )
    if found is None:
        return
    CHECKED.append(offset)
    taken = tier.take(found, offset)
    assert shapes.problem(shape, asked[:offset], taken.caches) == ""
    again, twin = tier.best("h", as_tokens(asked))
    if twin is found:
        shapes.append(taken.caches, asked[: offset + 1])
        assert again == offset
        assert shapes.problem(shape, asked[:offset], tier.take(twin, offset).caches) == ""


def test_many_of_them_were_hits():
    assert len(CHECKED) > 30


def _prefill(kept, entry):
    """How many tokens of an entry were fed at once; a later insertion replaced an equal one."""
    return next(p for tokens, p in reversed(kept) if tokens == entry.tokens.tolist())


def test_a_long_entry_that_cannot_be_cut_does_not_hide_a_shorter_one():
    tier = MemoryTier(10, 1 << 40)
    tokens = list(range(30))
    tier.insert(entry("recurrent", tokens[:10]))
    tier.insert(entry("recurrent", tokens))
    assert len(tier) == 2
    offset, found = tier.best("h", as_tokens([*tokens[:20], 99]))
    assert offset == 10
    assert shapes.problem("recurrent", tokens[:10], tier.take(found, offset).caches) == ""


def test_what_a_longer_entry_covers_is_not_held_twice():
    tier = MemoryTier(10, 1 << 40)
    tokens = list(range(30))
    tier.insert(entry("plain", tokens[:10]))
    tier.insert(entry("plain", tokens))
    assert len(tier) == 1
    tier.insert(entry("plain", tokens[:20]))
    assert (len(tier), tier.best("h", as_tokens([*tokens, 99]))[0]) == (1, 30)


def test_an_entry_above_the_cap_is_refused_before_anything_goes():
    small, large = entry("plain", range(8)), entry("plain", range(100, 400))
    tier = MemoryTier(10, small.nbytes)
    assert tier.insert(small)
    assert not tier.insert(large)
    assert len(tier) == 1


def test_the_caps_hold_and_the_least_recently_used_goes_first():
    tier = MemoryTier(max_size=3, max_bytes=1 << 40)
    conversations = [[i, *range(20)] for i in range(5)]
    for tokens in conversations[:3]:
        tier.insert(entry("plain", tokens))
    offset, found = tier.best("h", as_tokens([*conversations[0], 99]))
    tier.take(found, offset)
    for tokens in conversations[3:]:
        tier.insert(entry("plain", tokens))
    kept = [tier.best("h", as_tokens([*t, 99]))[0] for t in conversations]
    assert kept == [21, 0, 0, 21, 21]
    one = tier.nbytes // 3
    tier.trim_to(n_sequences=10, n_bytes=2 * one)
    assert len(tier) == 2
    assert tier.nbytes <= 2 * one
    tier.trim_to(n_sequences=10, n_bytes=-5)
    assert (len(tier), tier.nbytes) == (0, 0)


def test_spaces_do_not_mix_and_any_type_is_counted():
    tier = MemoryTier(10, 1 << 40)
    tier.insert(entry("plain", range(9), home="a", cache_type="tool"))
    assert tier.best("b", as_tokens(range(9)))[0] == 0
    stats = tier.stats_by_type()
    assert stats["tool"]["n_sequences"] == 1
    assert stats["tool"]["n_bytes"] == tier.nbytes > 0
    assert stats["system"] == {"n_sequences": 0, "n_bytes": 0}


def kv(tokens, heads=8, width=64):
    cache = KVCache()
    cache.update_and_fetch(*(mx.random.normal((1, heads, tokens, width)) for _ in range(2)))
    mx.eval(cache.state)
    return cache


def grow(caches):
    for cache in caches:
        one = mx.ones((1, 8, 1, 64))
        mx.eval(cache.update_and_fetch(one, one))


@pytest.mark.parametrize(
    ("asked", "receipt", "left", "grown"),
    [
        (1001, STORED, 0, 0.0),  # handed over: nothing is held twice
        (800, STORED, 0, 0.0),
        (300, STORED, 1, 0.5),  # a copy of the rows that are reused; the long entry stays
        (1001, None, 1, 1.0),  # nothing below would have it: two readers share until one writes
    ],
)
def test_reuse_does_not_double_memory(asked, receipt, left, grown):
    gc.collect()
    tokens = list(range(1000))
    tier = MemoryTier(10, 1 << 40)
    before = mx.get_active_memory()
    caches = own([kv(1000), kv(1000)])
    new = Entry("h", as_tokens(tokens), caches, read_caches(caches, 1000), receipt=receipt)
    tier.insert(new)
    held = mx.get_active_memory() - before
    assert 8 << 20 <= nbytes(caches) <= held <= nbytes(caches) + 4096
    del new, caches
    offset, found = tier.best("h", as_tokens([*tokens[: asked - 1], 7777]))
    taken = tier.take(found, offset)
    del found
    grow(taken.caches)
    assert (offset, len(tier)) == (asked - 1, left)
    assert mx.get_active_memory() - before <= held * (1 + grown) + (1 << 16)


def test_a_row_out_of_a_batch_does_not_keep_the_batch():
    from mlx_lm.models.cache import ArraysCache

    gc.collect()
    before = mx.get_active_memory()
    batch = ArraysCache(1)
    batch[0] = mx.zeros((8, 1 << 18))
    mx.eval(batch[0])
    row = own([batch.extract(3)])
    del batch
    assert mx.get_active_memory() - before == nbytes(row) == 4 << 18


def test_a_clone_writes_where_the_other_does_not_see_it():
    first = [kv(10)]
    seen = first[0].keys[..., :10, :].sum().item()
    second = clone(first)
    second[0].offset = 5
    grow(second)
    assert first[0].keys[..., :10, :].sum().item() == seen
