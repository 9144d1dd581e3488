"""The TurboQuant cache: what it holds, what it reads, and that mlx-lm runs with it."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import KVCache, trim_prompt_cache

from kvkeep.caches import contract, turboquant
from kvkeep.caches.turboquant import TurboQuantKVCache
from kvkeep.caches.turboquant_codes import K_BITS, V_BITS
from kvkeep.errors import BadScheme, EmptyCache
from tests.caches.small import answer, model_of, prompt_of
from tests.codecs.contract import Rows, same_bits

ROWS = Rows(heads=2, k_width=128, v_width=64)


@pytest.fixture
def no_spare_buffers():
    """MLX hands out freed buffers again, larger ones too, which would count as more memory."""
    gc.collect()
    mx.clear_cache()


def filled(*counts, **options):
    cache = TurboQuantKVCache(**options)
    for count in counts:
        cache.update_and_fetch(*ROWS.at(cache.offset, cache.offset + count))
    return cache


def held(cache):
    return [plane[:, :, : cache.offset] for plane in (*cache.keys, *cache.values)]


def test_it_is_what_the_contract_asks_for():
    cache = filled(5)
    assert isinstance(cache, contract.Cache)
    assert isinstance(cache, contract.OwnsRead)
    assert (cache.kind, cache.offset, cache.minimum_resumable_offset) == ("kv-turboquant", 5, 0)
    assert cache.max_append() is None
    assert (cache.size(), cache.empty(), TurboQuantKVCache().empty()) == (5, False, True)
    assert not hasattr(cache, "bits")
    assert not hasattr(cache, "merge")


def test_a_token_takes_the_published_bytes():
    cache, plain = TurboQuantKVCache(), KVCache()
    assert cache.bytes_per_token() == cache.nbytes == 0
    rows = mx.ones((1, 3, 256, 128), mx.bfloat16)
    cache.update_and_fetch(rows, rows)
    plain.update_and_fetch(rows, rows)
    assert cache.bytes_per_token() == 3 * 200
    assert cache.nbytes == 256 * 3 * 200
    assert plain.nbytes == 256 * 3 * 512


@pytest.mark.parametrize("counts", [(300,), (1,) * 40 + (260,), (256, 44), (255, 1, 1, 43)])
def test_rows_do_not_depend_on_how_they_came(counts):
    once, split = filled(300), filled(*counts)
    assert split.offset == 300
    assert same_bits(held(once), held(split)) == 300 * 2 * 48
    assert same_bits(once.keys_and_values(), split.keys_and_values()) == 2 * 300 * (128 + 64)


def test_an_append_encodes_the_new_tokens_only(monkeypatch):
    seen = []

    def count(name):
        real = getattr(turboquant, name)

        def counted(x, bits):
            seen.append((name, x.shape[2]))
            return real(x, bits)

        monkeypatch.setattr(turboquant, name, counted)

    count("encode_keys")
    count("encode_values")
    filled(300, 1, 1, 7)
    assert seen == [(n, t) for t in (300, 1, 1, 7) for n in ("encode_keys", "encode_values")]


@pytest.mark.usefixtures("no_spare_buffers")
def test_an_append_writes_in_place():
    cache = filled(300)
    mx.eval(cache.state)
    planes = [plane.shape for plane in (*cache.keys, *cache.values)]
    assert planes[0][2] == 512
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    new = ROWS.at(300, 301)
    cache._append(*new)
    mx.eval(cache.state)
    assert [plane.shape for plane in (*cache.keys, *cache.values)] == planes
    assert mx.get_peak_memory() - before < cache.nbytes / 4


def test_a_trim_forgets_and_the_next_append_overwrites():
    cache = filled(300)
    assert cache.trim(100) == 100
    cache.update_and_fetch(*ROWS.at(200, 230))
    assert same_bits(held(cache), held(filled(230))) > 0
    assert cache.trim(1000) == 230
    assert (cache.offset, cache.is_trimmable()) == (0, True)
    cache.update_and_fetch(*ROWS.at(0, 3))
    assert same_bits(held(cache), held(filled(3))) > 0


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_rows_come_back_in_the_dtype_they_had(dtype):
    cache = TurboQuantKVCache()
    rows = ROWS.at(0, 4)[0].astype(dtype)
    assert [x.dtype for x in cache.update_and_fetch(rows, rows)] == [dtype, dtype]


def test_state_makes_the_same_cache():
    cache = filled(20, k_bits=4, v_bits=5, deferred_rotation=True)
    again = TurboQuantKVCache.from_state(copy.copy(cache.state))
    assert vars(again).keys() == vars(cache).keys()
    assert same_bits(again.keys_and_values(), cache.keys_and_values()) > 0
    for name in ("offset", "k_bits", "v_bits", "k_dtype", "deferred_rotation"):
        assert getattr(again, name) == getattr(cache, name)
    blank = TurboQuantKVCache.from_state(TurboQuantKVCache(2, 2).state)
    assert (blank.empty(), blank.k_bits, blank.offset) == (True, 2, 0)


def queries(length, seed=1):
    numbers = np.random.default_rng(seed)
    return mx.array(numbers.standard_normal((1, 4, length, 64), np.float32)).astype(mx.bfloat16)


SQUARE = Rows(heads=2, k_width=64, v_width=64)


def read(cache, start, stop, **extra):
    append = cache.append_decode if stop - start == 1 else cache.append_window
    return append(*SQUARE.at(start, stop), **extra)


def test_a_read_is_what_mlx_lm_reads_and_outlives_what_follows():
    reader, fetcher = TurboQuantKVCache(), TurboQuantKVCache()
    attended = []
    for start, stop in ((0, 40), (40, 41), (41, 49)):
        mask = fetcher.make_mask(stop - start)
        k, v = fetcher.update_and_fetch(*SQUARE.at(start, stop))
        q = queries(stop - start)
        wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
        attended.append((read(reader, start, stop), q, wanted))
    reader.trim(45)
    reader.update_and_fetch(*SQUARE.at(100, 120))
    assert sum(same_bits(r.attend(q, 0.125), w) for r, q, w in attended * 2) > 10_000


def test_append_decode_takes_one_position():
    cache = TurboQuantKVCache()
    with pytest.raises(ValueError, match="one position per row, not 2"):
        cache.append_decode(*SQUARE.at(0, 2))
    assert cache.empty()


def test_a_deferred_rotation_is_the_same_sum(monkeypatch):
    unrotated = []
    real = turboquant.unrotate

    def counted(y):
        unrotated.append(y.shape)
        return real(y)

    monkeypatch.setattr(turboquant, "unrotate", counted)
    plain, deferred = TurboQuantKVCache(), TurboQuantKVCache(deferred_rotation=True)
    sinks = mx.array([0.5, -1.0, 2.0, 0.0], mx.bfloat16)
    for start, stop in ((0, 40), (40, 41)):
        q = queries(stop - start)
        pair = [
            read(cache, start, stop).attend(q, 0.125, sinks=sinks) for cache in (plain, deferred)
        ]
        wanted, found = (x.astype(mx.float32) for x in pair)
        assert float(mx.abs(wanted).max()) > 0.3
        # Both sums are rounded to bfloat16, one of them before it is unrotated.
        assert float(mx.abs(wanted - found).max()) < 0.02
        assert pair[0].dtype == pair[1].dtype
    assert unrotated == [(1, 4, 40, 64), (1, 4, 1, 64)]
    assert same_bits(plain.keys_and_values(), deferred.keys_and_values()) > 0


@pytest.mark.parametrize("k_bits", [0, 1, 3, 6, 7, 16, -8, 8.5, True, None, "8"])
def test_another_width_of_keys_is_refused(k_bits):
    with pytest.raises(BadScheme, match=r"keys of .* bits: valid are 2, 4, 5, 8"):
        TurboQuantKVCache(k_bits, 3)


@pytest.mark.parametrize("v_bits", [0, 1, 6, 7, 16, -8, True, None])
def test_another_width_of_values_is_refused(v_bits):
    with pytest.raises(ValueError, match=r"values of .* bits: valid are 2, 3, 4, 5, 8"):
        TurboQuantKVCache(8, v_bits)


@pytest.mark.parametrize("width", [16, 32, 80, 96, 192, 1024])
@pytest.mark.usefixtures("no_spare_buffers")
def test_another_head_size_is_refused_before_anything_is_allocated(width):
    good, bad = mx.ones((1, 2, 3, 64)), mx.ones((1, 2, 3, width))
    mx.eval(good, bad)
    for keys, values, side in ((bad, good, "keys"), (good, bad, "values")):
        cache = TurboQuantKVCache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with pytest.raises(BadScheme, match=rf"{side} of head size {width}: .* 64, 128, 256, 512"):
            cache.update_and_fetch(keys, values)
        assert mx.get_peak_memory() <= before
        assert (cache.empty(), cache.offset) == (True, 0)


def test_an_empty_cache_has_no_rows():
    with pytest.raises(EmptyCache, match="covers no token"):
        TurboQuantKVCache().keys_and_values()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_mlx_lm_generates_with_it(name):
    model, prompt = model_of(name), prompt_of(50)
    caches = [TurboQuantKVCache(8, 8) for _ in model.layers]
    steps = generate_step(prompt, model, max_tokens=12, prompt_cache=caches, prefill_step_size=16)
    told = [int(token) for token, _ in steps]
    assert told == answer(model, [TurboQuantKVCache(8, 8) for _ in model.layers], prompt, 12)
    assert [cache.offset for cache in caches] == [62] * len(caches)
    assert len(set(told)) > 2
    plain = answer(model, [KVCache() for _ in model.layers], prompt, 12)
    assert told[0] == plain[0]


@pytest.mark.parametrize("v_bits", V_BITS)
@pytest.mark.parametrize("k_bits", K_BITS)
def test_every_width_runs_in_a_model(k_bits, v_bits):
    model, prompt = model_of("llama"), prompt_of(20)
    caches = [TurboQuantKVCache(k_bits, v_bits) for _ in model.layers]
    logits = model(prompt[None], cache=caches)
    assert bool(mx.isfinite(logits).all())
    assert trim_prompt_cache(caches, 5) == 5
    assert model(prompt[None, 15:], cache=caches).shape == (1, 5, logits.shape[-1])


def test_a_draft_is_taken_back():
    model, prompt = model_of("llama"), prompt_of(30)
    caches = [TurboQuantKVCache(8, 8) for _ in range(2 * len(model.layers))]
    steps = speculative_generate_step(
        prompt, model, model, max_tokens=10, num_draft_tokens=3, prompt_cache=caches
    )
    told = [int(token) for token, _, _ in steps]
    assert told == answer(model, [TurboQuantKVCache(8, 8) for _ in model.layers], prompt, 10)
