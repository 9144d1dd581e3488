"""``prefill`` leaves the very bits that mlx-lm's own generation leaves."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from kvkeep.caches import make
from kvkeep.errors import Refused
from kvkeep.hooks.prefill import prefill
from tests import architectures

PROMPT = [(7 * i * i + 3 * i) % architectures.VOCAB for i in range(90)]
NAMES = ("llama", "gemma3_text", "falcon_h1", "qwen3_next")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose heads are wide enough to be quantized in groups of 32."""
    monkeypatch.setitem(
        architectures.CONFIGS, "llama", {**architectures.CONFIGS["llama"], "head_dim": 64}
    )
    return architectures.build("llama")


def bits(array: mx.array) -> np.ndarray[Any, Any]:
    """The array as integers, so that equality is equality of bits."""
    return np.array(array.view(mx.uint8)) if array.dtype == mx.bfloat16 else np.array(array)


def arrays(caches: list[Any], stop: int) -> list[mx.array]:
    """Every array of the caches; those with a token axis cut at ``stop``.

    Slices are new arrays: a cache changes its own in place at the next token.
    """
    out: list[mx.array] = []
    for cache in caches:
        if isinstance(cache, CacheList):
            out += arrays(cache.caches, stop)
        elif isinstance(cache, ArraysCache):
            out += [x[...] for x in cache.cache if x is not None]
        elif isinstance(cache, QuantizedKVCache):
            out += [x[..., :stop, :] for x in (*cache.keys, *cache.values)]
        elif isinstance(cache, RotatingKVCache):
            out += [cache.keys[..., :, :], cache.values[..., :, :]]
        else:
            out += [cache.keys[..., :stop, :], cache.values[..., :stop, :]]
    return out


def assert_same_bits(ours: list[Any], theirs: list[Any], stop: int) -> None:
    mine, other = arrays(ours, stop), arrays(theirs, stop)
    compared = 0
    for a, b in zip(mine, other, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))
        compared += a.nbytes
    assert compared > 1000


def generated(
    model: Any, prompt: list[int], stops: list[int], **how: Any
) -> tuple[list[Any], list[Any]]:
    """Caches after mlx-lm read ``prompt[:-1]``, seen from its own progress callback."""
    caches = make_prompt_cache(model)
    seen: list[Any] = []

    def progress(done: int, total: int) -> None:
        stops.append(done)
        if done == total - 1:
            seen.append(arrays(caches, done))
            mx.eval(seen[-1])

    next(
        generate_step(
            mx.array(prompt),
            model,
            max_tokens=1,
            prompt_cache=caches,
            prompt_progress_callback=progress,
            **how,
        )
    )
    return caches, seen[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [2048, 89, 32, 7])
def test_the_caches_have_the_bits_of_generate_step(name: str, step: int) -> None:
    model = architectures.build(name)
    stops: list[int] = []
    _, theirs = generated(model, [*PROMPT, 5], stops, prefill_step_size=step)

    ours = make_prompt_cache(model)
    seen: list[tuple[int, int]] = []
    prefill(model, PROMPT, ours, step=step, progress=lambda *now: seen.append(now))

    compared = 0
    for a, b in zip(arrays(ours, len(PROMPT)), theirs, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
        compared += a.nbytes
    assert compared > 1000
    assert [done for done, _ in seen] == stops[:-1]
    assert {total for _, total in seen} == {len(PROMPT)}


@pytest.mark.parametrize(("start", "floor"), [(0, 32), (1, 32), (32, 32), (33, 64), (64, 64)])
def test_conversion_happens_where_generate_step_converts_and_records_its_offset(
    wide: Any, start: int, floor: int
) -> None:
    how = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
    theirs, _ = generated(wide, [*PROMPT, 5], [], prefill_step_size=32, **how)
    ours = make_prompt_cache(wide)
    prefill(wide, PROMPT, ours, step=32, **how)
    assert all(isinstance(cache, QuantizedKVCache) for cache in ours)
    assert {cache.minimum_resumable_offset for cache in ours} == {floor}
    assert {cache.offset for cache in ours} == {len(PROMPT)}
    assert_same_bits(ours, theirs, len(PROMPT))


def test_nothing_is_converted_before_its_start(wide: Any) -> None:
    caches = make_prompt_cache(wide)
    prefill(wide, PROMPT, caches, step=32, kv_bits=8, quantized_kv_start=len(PROMPT) + 1)
    assert not any(isinstance(cache, QuantizedKVCache) for cache in caches)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_read_in_two_calls_is_the_prompt_read_in_one(name: str) -> None:
    model = architectures.build(name)
    one, two = make_prompt_cache(model), make_prompt_cache(model)
    prefill(model, PROMPT, one, step=30)
    prefill(model, PROMPT[:60], two, step=30)
    prefill(model, PROMPT[60:], two, step=30)
    assert_same_bits(one, two, len(PROMPT))


def test_a_cut_is_a_place_to_stop_and_moves_no_conversion(wide: Any) -> None:
    how = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 40, "step": 32}
    whole, cut = make_prompt_cache(wide), make_prompt_cache(wide)
    seen: list[int] = []
    kinds: list[str] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        kinds.append(type(cut[0]).__name__)

    prefill(wide, PROMPT, whole, **how)
    prefill(wide, PROMPT, cut, **how, progress=progress, cuts=[0, 45, 50, 64, len(PROMPT)])
    n = len(PROMPT)
    assert seen == [0, 32, 45, 50, *range(64, n, 32), n]
    assert kinds == ["KVCache"] * 4 + ["QuantizedKVCache"] * (len(seen) - 4)
    assert {cache.minimum_resumable_offset for cache in (*whole, *cut)} == {64}
    assert {cache.offset for cache in cut} == {n}


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_a_cut_moves_no_conversion_that_a_cache_makes_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of caches inside lists, and of a prompt whose first part was read before."""
    monkeypatch.setitem(
        architectures.CONFIGS, name, {**architectures.CONFIGS[name], "head_dim": 64}
    )
    model = architectures.build(name)
    floors = set()
    for cuts in ([], [45, 50], [33]):
        caches = make(model, "affine:4:32@50")
        prefill(model, PROMPT[:10], caches)
        prefill(model, PROMPT[10:], caches, step=32, cuts=cuts)
        delayed = [cache if hasattr(cache, "plan") else cache.caches[1] for cache in caches]
        floors.add(tuple(each.minimum_resumable_offset for each in delayed))
        assert {each.offset for each in delayed} == {len(PROMPT)}
    assert floors == {(74, 74)}


def test_a_second_conversion_leaves_a_converted_cache_alone(wide: Any) -> None:
    caches = make_prompt_cache(wide)
    how = {"kv_bits": 8, "kv_group_size": 32}
    prefill(wide, PROMPT[:40], caches, **how)
    first = list(caches)
    prefill(wide, PROMPT[40:], caches, **how)
    assert all(a is b for a, b in zip(first, caches, strict=True))
    assert {cache.minimum_resumable_offset for cache in caches} == {40}


def test_a_ring_cannot_be_quantized_and_says_so() -> None:
    model = architectures.build("gemma3_text")
    with pytest.raises(Refused, match="RotatingKVCache"):
        prefill(model, PROMPT, make_prompt_cache(model), kv_bits=4, kv_group_size=32)


def test_no_token_is_no_work_and_a_step_has_one() -> None:
    model = architectures.build("llama")
    caches = make_prompt_cache(model)
    prefill(model, [], caches)
    assert {cache.offset for cache in caches} == {0}
    with pytest.raises(ValueError, match="at least one token"):
        prefill(model, PROMPT, caches, step=0)


def test_empty_caches_are_vouched_for_and_used_ones_are_not() -> None:
    model = architectures.build("gemma3_text")
    fresh, used = make_prompt_cache(model), make_prompt_cache(model)
    model(mx.array(PROMPT[:40])[None], cache=used)
    prefill(model, PROMPT[:40], fresh)
    prefill(model, PROMPT[40:], used)
    assert {cache.minimum_resumable_offset for cache in fresh} == {0}
    assert not any(hasattr(cache, "minimum_resumable_offset") for cache in used)
