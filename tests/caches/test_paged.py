"""The paged cache: gathered bits, occupied blocks, shared prefixes, and runs of mlx-lm."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache

from kvkeep.caches import contract
from kvkeep.caches.paged import Block, PagedKVCache, held_bytes
from kvkeep.errors import BadScheme, EmptyCache
from kvkeep.hooks.live_caches import clone, nbytes
from tests.caches.small import answer, model_of, prompt_of
from tests.codecs.contract import Rows, flat, same_bits
from tests.codecs.shuttle import bits

ROWS = Rows(heads=2, k_width=64, v_width=64)


@pytest.fixture
def no_spare_buffers():
    """MLX hands out freed buffers again, larger ones too, which would count as more memory."""
    gc.collect()
    mx.clear_cache()


def filled(size, *counts, **options):
    cache = PagedKVCache(size, **options)
    for count in counts:
        cache.update_and_fetch(*ROWS.at(cache.offset, cache.offset + count))
    return cache


def plain(*counts):
    cache = KVCache()
    for count in counts:
        cache.update_and_fetch(*ROWS.at(cache.offset, cache.offset + count))
    return cache


def evaluated(*caches):
    mx.eval([x for cache in caches for x in flat(vars(cache)) if isinstance(x, mx.array)])


def test_it_is_what_the_contract_asks_for():
    cache = filled(4, 5)
    assert isinstance(cache, contract.Cache)
    assert isinstance(cache, contract.OwnsRead)
    assert (cache.kind, cache.offset, cache.minimum_resumable_offset) == ("kv-paged", 5, 0)
    assert cache.max_append() is None
    assert (cache.size(), cache.empty(), PagedKVCache().empty()) == (5, False, True)
    assert cache.bytes_per_token() == 2 * (64 + 64) * 2
    assert PagedKVCache().bytes_per_token() == PagedKVCache().nbytes == 0
    assert not hasattr(cache, "bits")
    assert not hasattr(cache, "merge")


@pytest.mark.parametrize("size", [1, 3, 4, 256])
def test_every_read_has_the_bits_of_a_plain_cache(size):
    cache, other, compared = PagedKVCache(size), KVCache(), 0
    for count in (5, 1, 1, 1, 4, 13, 1, 300, 1, 1):
        rows = ROWS.at(other.offset, other.offset + count)
        compared += same_bits(cache.update_and_fetch(*rows), other.update_and_fetch(*rows))
        assert len(cache.table) == -(-cache.offset // size)
    assert compared > 10**5
    for count in (3, 1, 200, 57):
        cache.trim(count)
        other.trim(count)
        assert len(cache.table) == -(-cache.offset // size)
        assert same_bits(cache.keys_and_values(), other.keys_and_values()) > 0
        rows = ROWS.at(500, 502)
        assert same_bits(cache.update_and_fetch(*rows), other.update_and_fetch(*rows)) > 0


@pytest.mark.usefixtures("no_spare_buffers")
def test_only_occupied_blocks_are_held():
    cache = filled(16, 100)
    assert cache.nbytes == 7 * 16 * cache.bytes_per_token()
    evaluated(cache)
    before = mx.get_active_memory()
    assert cache.trim(68) == 68
    assert (cache.offset, len(cache.table)) == (32, 2)
    assert before - mx.get_active_memory() >= 5 * 16 * cache.bytes_per_token()
    assert cache.trim(1000) == 32
    assert (cache.offset, cache.table, cache.empty()) == (0, (), True)
    with pytest.raises(EmptyCache, match="covers no token"):
        cache.keys_and_values()


@pytest.mark.usefixtures("no_spare_buffers")
def test_a_block_does_not_keep_the_chunk_that_it_came_with():
    wide = mx.random.normal((1, 1, 640, 256))
    mx.eval(wide)
    before = mx.get_active_memory()
    cache = PagedKVCache(64)
    cache.update_and_fetch(wide[..., :64], wide[..., 64:128])
    evaluated(cache)
    del wide
    cache.trim(576)
    left = mx.get_active_memory() - (before - 640 * 256 * 4)
    assert cache.nbytes <= left < 2 * cache.nbytes
    assert cache.nbytes == 64 * 128 * 4


@pytest.mark.usefixtures("no_spare_buffers")
def test_an_append_copies_no_block():
    cache = filled(256, 600)
    evaluated(cache)
    before, table = mx.get_active_memory(), cache.table
    ids = [id(block) for block in table]
    del table
    mx.reset_peak_memory()
    cache._append(*ROWS.at(600, 601))
    evaluated(cache)
    assert [id(block) for block in cache.table[:2]] == ids[:2]
    assert mx.get_peak_memory() - before < cache.table[0].nbytes / 4


@pytest.mark.parametrize("at", [1, 3, 4, 7, 8, 11])
def test_requests_share_a_prefix_and_never_see_each_other(at):
    first = filled(4, 11)
    evaluated(first)
    kept = [bits(x) for x in first.keys_and_values()]
    second, third = first.fork(at), first.fork(at)
    assert second.table == first.table[: -(-at // 4)]
    assert held_bytes([first, second, third]) == first.nbytes
    for cache, start in ((second, 100), (third, 200), (first, 300)):
        for count in (1, 1, 6):
            cache.update_and_fetch(*ROWS.at(start, start + count))
            start += count
    for cache, held, start in ((second, at, 100), (third, at, 200), (first, 11, 300)):
        k, v = ROWS.at(0, held)
        more = [ROWS.at(start + i, start + i + n) for i, n in ((0, 1), (1, 1), (2, 6))]
        wanted = [
            mx.concatenate([x, *(rows[side] for rows in more)], axis=2)
            for side, x in enumerate((k, v))
        ]
        assert same_bits(cache.keys_and_values(), wanted) == 2 * (held + 8) * 128
    assert all(
        (a[:, :, :at] == b[:, :, :at]).all()
        for a, b in zip(kept, (bits(x) for x in second.keys_and_values()), strict=True)
    )
    shared = at // 4
    for cache in (second, third):
        assert [a is b for a, b in zip(cache.table, first.table, strict=False)][:shared] == [
            True
        ] * shared
        assert cache.table[shared] is not first.table[shared]
    # Each has its own tail; the full blocks of the prefix are there once.
    alone = sum(cache.nbytes for cache in (first, second, third))
    assert held_bytes([first, second, third]) == alone - 2 * shared * first.table[0].nbytes


@pytest.mark.usefixtures("no_spare_buffers")
def test_a_shared_prefix_takes_its_memory_once():
    first = filled(64, 640)
    evaluated(first)
    before = mx.get_active_memory()
    others = [first.fork() for _ in range(5)]
    for cache in others:
        cache.update_and_fetch(*ROWS.at(700, 701))
    evaluated(*others)
    assert 5 <= (mx.get_active_memory() - before) / first.table[0].nbytes < 7
    # The blocks live as long as someone lists them.
    del first
    assert same_bits(others[0].keys_and_values(), others[4].keys_and_values()) == 2 * 641 * 128


@pytest.mark.usefixtures("no_spare_buffers")
def test_only_the_half_filled_block_is_copied_on_a_write():
    first = filled(256, 300)
    second = first.fork()
    evaluated(first)
    before = mx.get_active_memory()
    second.update_and_fetch(*ROWS.at(300, 301))
    evaluated(second)
    assert 1 <= (mx.get_active_memory() - before) / first.table[0].nbytes < 2


@pytest.mark.parametrize("positions", [-1, 12])
def test_a_fork_of_what_is_not_held_is_refused(positions):
    with pytest.raises(ValueError, match=f"fork at {positions} of a cache that holds 11"):
        filled(4, 11).fork(positions)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda c: clone([c])[0]])
def test_a_copy_is_a_request_of_its_own(duplicate):
    first = filled(4, 6)
    second = duplicate(first)
    first.update_and_fetch(*ROWS.at(100, 103))
    second.update_and_fetch(*ROWS.at(200, 203))
    assert isinstance(second.table[0], Block)
    assert same_bits(first.keys_and_values()[0][:, :, 6:], ROWS.at(100, 103)[0]) > 0
    assert same_bits(second.keys_and_values()[0][:, :, 6:], ROWS.at(200, 203)[0]) > 0
    assert nbytes([first]) == first.nbytes


def test_state_makes_the_same_cache():
    cache = filled(4, 11, read="direct")
    again = PagedKVCache.from_state(cache.state)
    assert vars(again).keys() == vars(cache).keys()
    assert same_bits(again.keys_and_values(), cache.keys_and_values()) > 0
    assert (again.offset, again.block_size, again.read) == (11, 4, "direct")
    blank = PagedKVCache.from_state(PagedKVCache(8).state)
    assert (blank.empty(), blank.block_size, blank.offset) == (True, 8, 0)


def queries(length, heads=4):
    mx.random.seed(length)
    return mx.random.normal((1, heads, length, 64)).astype(mx.bfloat16)


def read(cache, start, stop):
    append = cache.append_decode if stop - start == 1 else cache.append_window
    return append(*ROWS.at(start, stop))


SPANS = ((0, 40), (40, 41), (41, 42), (42, 49))


def test_a_gathered_read_is_mlx_lm_s_own_and_outlives_what_follows():
    cache, other, attended = PagedKVCache(16), KVCache(), []
    for start, stop in SPANS:
        mask = other.make_mask(stop - start, return_array=False, window_size=None)
        k, v = other.update_and_fetch(*ROWS.at(start, stop))
        q = queries(stop - start)
        wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
        attended.append((read(cache, start, stop), q, wanted))
    cache.trim(45)
    cache.update_and_fetch(*ROWS.at(100, 120))
    assert sum(same_bits(r.attend(q, 0.125), w) for r, q, w in attended * 2) > 10_000


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("size", [1, 7, 16, 256])
def test_a_direct_read_is_the_same_attention_block_by_block(size, sinks, dtype):
    direct, gathered = PagedKVCache(size, read="direct"), PagedKVCache(size)
    reads = []
    for start, stop in SPANS:
        rows = [x.astype(dtype) for x in ROWS.at(start, stop)]
        one = stop - start == 1
        pair = [
            c.append_decode(*rows) if one else c.append_window(*rows) for c in (direct, gathered)
        ]
        reads.append((pair, queries(stop - start).astype(dtype)))
    direct.trim(49)
    sinks = sinks if sinks is None else sinks.astype(dtype)
    compared = 0
    for (ours, theirs), q in reads:
        a, b = (r.attend(q, 0.125, sinks=sinks).astype(mx.float32) for r in (ours, theirs))
        assert float(mx.abs(a - b).max()) <= (1e-5 if dtype == mx.float32 else 2e-2)
        assert float(mx.abs(b).max()) > 0.1
        compared += a.size
    assert compared == 49 * 4 * 64
    assert [type(ours).__name__ for (ours, _), _ in reads].count("DirectRead") == 2


def test_append_decode_takes_one_position():
    cache = PagedKVCache()
    with pytest.raises(ValueError, match="one position per row, not 2"):
        cache.append_decode(*ROWS.at(0, 2))
    assert cache.empty()


@pytest.mark.parametrize("size", [0, -1, 2.0, "256", None, True])
def test_a_block_size_that_is_not_positive_is_refused(size):
    with pytest.raises(BadScheme, match=f"Blocks of {size!r} positions: valid are 1 and above"):
        PagedKVCache(size)


def test_an_unknown_read_is_refused():
    with pytest.raises(BadScheme, match="'sideways'; valid are gathered, direct"):
        PagedKVCache(read="sideways")


@pytest.mark.parametrize("size", [1, 16, 256])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_mlx_lm_generates_bit_for_bit_as_with_its_own(name, size):
    model, prompt, runs = model_of(name), prompt_of(50), []
    for caches in ([PagedKVCache(size) for _ in model.layers], make_prompt_cache(model)):
        steps = generate_step(
            prompt, model, max_tokens=12, prompt_cache=caches, prefill_step_size=16
        )
        runs.append([(int(token), bits(logprobs)) for token, logprobs in steps])
        assert [cache.offset for cache in caches] == [62] * len(caches)
    ours, theirs = runs
    assert len({token for token, _ in ours}) > 2
    for (token, logprobs), (other, wanted) in zip(ours, theirs, strict=True):
        assert token == other
        assert (logprobs == wanted).all()


def test_a_draft_is_taken_back():
    model, prompt = model_of("llama"), prompt_of(30)
    caches = [PagedKVCache(4) for _ in range(2 * len(model.layers))]
    steps = speculative_generate_step(
        prompt, model, model, max_tokens=10, num_draft_tokens=3, prompt_cache=caches
    )
    told = [int(token) for token, _, _ in steps]
    assert told == answer(model, [KVCache() for _ in model.layers], prompt, 10)
    assert trim_prompt_cache(caches, 5) == 5
