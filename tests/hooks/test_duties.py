"""The duties of a persistent replacement for ``LRUPromptCache``, each with its own test."""

from __future__ import annotations

import copy
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

import kvkeep
from kvkeep.hooks.precision import track
from kvkeep.hooks.prefill import prefill
from kvkeep.hooks.prompt_cache import PromptCache
from tests import architectures, model_folders

TOKENS = [(7 * i * i + 3 * i) % 90 for i in range(60)]
OTHER = [91, 92, 93]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("models")

    def make(name: str, seed: int = 0) -> Path:
        path = root / f"{name}-{seed}"
        return path if path.exists() else model_folders.write(name, path, seed)

    return make


@pytest.fixture
def serving(folder: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A server's provider and its prompt cache: ``serving("llama", max_size=0)``."""
    made: list[PromptCache] = []

    def serve(
        name: str,
        seed: int = 0,
        draft: int | None = None,
        path: Path | None = None,
        kv_bits: int | None = None,
        **options: Any,
    ) -> SimpleNamespace:
        path = path or folder(name, seed)
        drafted = folder(name, draft) if draft is not None else None
        model, tokenizer = load(str(path))
        provider = SimpleNamespace(
            model=model,
            tokenizer=tokenizer,
            draft_model=load(str(drafted))[0] if drafted else None,
            model_key=(str(path), None, str(drafted) if drafted else None),
            cli_args=SimpleNamespace(kv_bits=kv_bits, kv_group_size=32, quantized_kv_start=0),
        )
        options.setdefault("store", tmp_path / "store")
        cache = PromptCache(provider=provider, **options)
        made.append(cache)
        return SimpleNamespace(cache=cache, model=model, key=provider.model_key, provider=provider)

    yield serve
    for cache in made:
        cache.close()


def read(model: Any, tokens: list[int], caches: list[Any] | None = None) -> list[Any]:
    caches = caches if caches is not None else make_prompt_cache(model)
    prefill(model, tokens, caches, step=16)
    return caches


def next_logits(model: Any, caches: list[Any], rest: list[int]) -> Any:
    """What the model says after ``rest``; its bits."""
    out = model(mx.array(rest)[None], cache=caches)[0, -1]
    return np.array(out.astype(mx.float32))


def fields(caches: list[Any]) -> list[bytes]:
    """Every array below the offset, as bytes."""
    out = []
    for cache in caches:
        for inner in getattr(cache, "caches", [cache]):
            if isinstance(inner, ArraysCache):
                out += [bytes(np.array(x.view(mx.uint8))) for x in inner.cache if x is not None]
            else:
                stop = inner.keys.shape[2] if isinstance(inner, RotatingKVCache) else inner.offset
                out += [
                    bytes(np.array(x[..., :stop, :].view(mx.uint8)))
                    for x in (inner.keys, inner.values)
                ]
    assert sum(map(len, out)) > 1000
    return out


@pytest.mark.parametrize("tier", ["memory", "store"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1", "qwen3_next"])
def test_1_what_comes_back_is_fresh_and_leaves_a_token_to_read(
    serving: Callable[..., Any], name: str, tier: str
) -> None:
    s = serving(name, max_size=10 if tier == "memory" else 0)
    mine = read(s.model, TOKENS[:-1])
    next_logits(s.model, mine, TOKENS[-1:])
    expected = fields(mine)
    s.cache.insert_cache(s.key, TOKENS, mine)
    read(s.model, OTHER, mine)  # what was inserted goes on being used, and nobody sees it

    for _ in range(2):
        caches, rest = s.cache.fetch_nearest_cache(s.key, [*TOKENS, *OTHER])
        assert caches is not None
        assert rest == OTHER
        assert fields(caches) == expected
        read(s.model, OTHER, caches)
        assert s.cache.last.tier == ("memory" if tier == "memory" else "store") or _ == 1

    caches, rest = s.cache.fetch_nearest_cache(s.key, TOKENS)
    if name == "llama":
        assert caches is not None
        assert rest == TOKENS[-1:]
    else:  # a wrapped ring and a state end at N and cannot give one token back
        assert (caches, rest) == (None, TOKENS)
        s.cache.insert_cache(s.key, TOKENS[:-1], read(s.model, TOKENS[:-1]), cache_type="user")
        caches, rest = s.cache.fetch_nearest_cache(s.key, TOKENS)
        assert caches is not None
        assert rest == TOKENS[-1:]
    cold = read(s.model, TOKENS[:-1])
    ours = next_logits(s.model, caches, rest)
    assert np.array_equal(ours, next_logits(s.model, cold, TOKENS[-1:]))
    assert s.cache.fetch_nearest_cache(s.key, [5]) == (None, [5])
    assert s.cache.fetch_nearest_cache(s.key, []) == (None, [])


def test_2_every_layer_is_checked_and_a_mismatch_is_cut_or_refused(
    serving: Callable[..., Any],
) -> None:
    s = serving("llama")
    uneven = read(s.model, TOKENS)
    uneven[1].trim(1)
    s.cache.insert_cache(s.key, TOKENS, uneven)
    short = read(s.model, TOKENS[:-2])
    s.cache.insert_cache(s.key, TOKENS, short)
    assert s.cache.fetch_nearest_cache(s.key, [*TOKENS, 1]) == (None, [*TOKENS, 1])
    assert s.cache.metrics.data()["snapshots"]["refused"] == 2

    s.cache.insert_cache(s.key, TOKENS[:40], read(s.model, TOKENS))  # stands beyond its tokens
    for size in (10, 0):
        s.cache._memory.max_size = size
        caches, rest = s.cache.fetch_nearest_cache(s.key, [*TOKENS[:50], 1])
        assert caches is not None
        assert {c.offset for c in caches} == {40}
        assert rest == [*TOKENS[40:50], 1]
        s.cache.trim_to(n_sequences=0)


@pytest.mark.parametrize("kv_bits", [None, 4])
@pytest.mark.parametrize("max_size", [10, 0])
def test_2_a_draft_may_lag_and_the_list_may_be_stale(
    serving: Callable[..., Any], max_size: int, kv_bits: int | None
) -> None:
    s = serving("llama", draft=1, kv_bits=kv_bits, max_size=max_size)
    models = (s.model, s.provider.draft_model)
    options = {"kv_bits": kv_bits, "kv_group_size": 32, "quantized_kv_start": 0}
    lags = set()
    for count in range(1, 7):
        caches = track([cache for model in models for cache in make_prompt_cache(model)])
        steps = speculative_generate_step(
            mx.array(TOKENS[:30]), *models, max_tokens=count, prompt_cache=caches, **options
        )
        key = TOKENS[:30] + [int(token) for token, _, _ in steps]
        s.cache.insert_cache(s.key, key, caches)
        asked = [*key, 3, 1, 4]
        got, rest = s.cache.fetch_nearest_cache(s.key, asked)
        assert got is not None
        assert len(got) == 4
        at = len(asked) - len(rest)
        assert at >= len(key) - 1
        assert {c.offset for c in got} == {at}  # the draft has read what it lacked
        lags.add(len(key) - at)
        if kv_bits:
            assert {type(c).__name__ for c in got[:2]} == {"QuantizedKVCache"}
        again = speculative_generate_step(
            mx.array(list(rest)), *models, max_tokens=8, prompt_cache=got, **options
        )
        cold = [c for model in models for c in make_prompt_cache(model)]
        whole = speculative_generate_step(
            mx.array(asked), *models, max_tokens=8, prompt_cache=cold, **options
        )
        if not kv_bits:
            assert [int(t) for t, _, _ in again] == [int(t) for t, _, _ in whole]
    assert lags == {0, 1}
    assert not s.cache.metrics.failures


def test_3_all_candidates_are_searched_at_every_depth(serving: Callable[..., Any]) -> None:
    s = serving("gemma3_text", store=None)
    s.cache.insert_cache(s.key, TOKENS[:20], read(s.model, TOKENS[:20]))
    wrapped = read(s.model, TOKENS[:-1])
    next_logits(s.model, wrapped, TOKENS[-1:])
    s.cache.insert_cache(s.key, TOKENS, wrapped)  # cannot be cut to 30
    caches, rest = s.cache.fetch_nearest_cache(s.key, [*TOKENS[:30], *OTHER])
    assert caches is not None
    assert len(rest) == 13
    caches, rest = s.cache.fetch_nearest_cache(s.key, [*TOKENS[:9], *OTHER])
    assert caches is not None
    assert {c.offset for c in caches} == {9}

    s = serving("llama", store=None)
    s.cache.insert_cache(s.key, TOKENS, read(s.model, TOKENS))
    caches, rest = s.cache.fetch_nearest_cache(s.key, [TOKENS[0], *OTHER])
    assert caches is not None
    assert rest == OTHER


def test_4_another_content_under_the_same_name_is_a_miss(
    serving: Callable[..., Any], folder: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_folders.write("llama", tmp_path / "same", seed=0)
    s = serving("llama", path=path)
    s.cache.insert_cache(s.key, TOKENS, read(s.model, TOKENS))
    assert s.cache.fetch_nearest_cache(s.key, [*TOKENS, 1])[0] is not None
    for file in folder("llama", 1).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    s.provider.model = load(str(path))[0]  # the server loads what now lies under that name
    assert s.cache.fetch_nearest_cache(s.key, [*TOKENS, 1]) == (None, [*TOKENS, 1])
    assert s.cache.metrics.data()["reasons"]["space_changed"] == 1


def test_4_the_wrong_kind_for_this_server_is_a_miss(serving: Callable[..., Any]) -> None:
    plain, quantized = serving("llama"), serving("llama", kv_bits=4)
    caches = track(make_prompt_cache(plain.model))
    prefill(plain.model, TOKENS, caches, kv_bits=4, kv_group_size=32)
    for s, welcome in ((plain, False), (quantized, True)):
        s.cache.insert_cache(s.key, TOKENS, list(caches))
        found = s.cache.fetch_nearest_cache(s.key, [*TOKENS, 1])[0]
        assert (found is not None) is welcome
    assert plain.cache.fetch_nearest_cache(s.key, [*TOKENS, 1])[0] is None
    assert plain.cache.fetch_nearest_cache(None, [*TOKENS, 1])[0] is None


@pytest.mark.parametrize("max_size", [10, 0])
def test_5_an_image_is_one_thing(serving: Callable[..., Any], max_size: int) -> None:
    s = serving("llama", max_size=max_size)
    image = -1 - (1 << 59)
    key = [*TOKENS[:20], *[image] * 8, *TOKENS[28:]]
    s.cache.insert_cache(s.key, key, read(s.model, TOKENS))
    inside, rest = s.cache.fetch_nearest_cache(s.key, key[:25])
    assert inside is not None
    assert len(rest) == 5  # before the image, not in the middle of it
    behind, rest = s.cache.fetch_nearest_cache(s.key, key[:29])
    assert behind is not None
    assert len(rest) == 1
    other, rest = s.cache.fetch_nearest_cache(s.key, [*TOKENS[:20], *[image - 1] * 8, 1])
    assert other is not None
    assert len(rest) == 9


def test_6_arrays_stay_on_the_callers_thread(serving: Callable[..., Any]) -> None:
    s = serving("falcon_h1")
    expected: list[bytes] = []
    found: list[Any] = []

    def generation() -> None:
        mine = read(s.model, TOKENS)
        expected.extend(fields(mine))
        s.cache.insert_cache(s.key, TOKENS, mine)
        s.cache.trim_to(n_sequences=0)
        caches, _ = s.cache.fetch_nearest_cache(s.key, [*TOKENS, *OTHER])
        found.extend(fields(caches))
        found.append(next_logits(s.model, caches, OTHER).sum())
        s.cache.close()

    thread = threading.Thread(target=generation)
    thread.start()
    thread.join()
    assert found[:-1] == expected
    assert np.isfinite(found[-1])
    assert not s.cache.metrics.failures


def test_7_what_was_inserted_is_readable_while_the_writer_is_stuck(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = serving("falcon_h1")
    go, write = threading.Event(), s.cache.store._core.writer._write
    monkeypatch.setattr(
        s.cache.store._core.writer, "_write", lambda prepared: go.wait(60) and write(prepared)
    )
    try:
        for length in (20, 40):
            s.cache.insert_cache(s.key, TOKENS[:length], read(s.model, TOKENS[:length]))
        assert s.cache.gauges()["kvkeep_queue_snapshots"] == 2
        for length in (40, 20):
            caches, rest = s.cache.fetch_nearest_cache(s.key, [*TOKENS[:length], 1])
            assert caches is not None
            assert rest == [1]
        assert s.cache.metrics.data()["resumed_by_tier"] == {"memory": 60, "store": 0}
        threading.Timer(0.2, go.set).start()
        caches, rest = s.cache.fetch_nearest_cache(s.key, [*TOKENS[:40], 1])
        assert caches is not None  # handed over before: only the store has it, once written
        assert s.cache.last.tier == "store"
    finally:
        go.set()


@pytest.mark.parametrize("broken", ["resume", "snapshot", "both"])
def test_8_a_failing_store_is_a_miss_counted_and_logged_once(
    serving: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    s = serving("llama")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    for name in ("resume", "snapshot") if broken == "both" else (broken,):
        monkeypatch.setattr(kvkeep.Space, name, fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            s.cache.insert_cache(s.key, TOKENS, read(s.model, TOKENS))
            caches, rest = s.cache.fetch_nearest_cache(s.key, [*TOKENS, 1])
            assert caches is not None  # memory has it
            assert rest == [1]
            assert s.cache.fetch_nearest_cache(s.key, [5, 6]) == (None, [5, 6])
    assert set(s.cache.metrics.failures.values()) <= {3, 6}
    assert len(caplog.records) == len(s.cache.metrics.failures)


def test_8_nonsense_is_no_error(serving: Callable[..., Any]) -> None:
    s = serving("llama")
    s.cache.insert_cache(s.key, ["no", "tokens"], [object()])  # type: ignore[list-item]
    s.cache.insert_cache(s.key, TOKENS, [])
    s.cache.insert_cache(s.key, TOKENS, None)  # type: ignore[arg-type]
    s.cache.insert_cache(s.key, TOKENS, [KVCache()])
    assert s.cache.fetch_nearest_cache(s.key, ["no"]) == (None, ["no"])  # type: ignore[list-item]
    assert s.cache.fetch_nearest_cache(s.key, TOKENS) == (None, TOKENS)
    assert len(s.cache) == 0


class Strange:
    """A cache class that no codec knows."""

    def __init__(self, offset: int) -> None:
        self.held = mx.arange(offset)
        self.offset = offset


def test_9_bytes_are_counted_and_any_type_is_accepted(serving: Callable[..., Any]) -> None:
    s = serving("llama", store=None)
    s.cache.insert_cache(s.key, TOKENS, read(s.model, TOKENS), cache_type="tool")
    used = mx.get_active_memory()
    caches = read(s.model, TOKENS)
    one = mx.get_active_memory() - used
    del caches
    assert abs(s.cache.nbytes - one) < 0.2 * one
    assert s.cache.stats_by_type()["tool"]["n_sequences"] == 1

    s = serving("llama", store=None, max_bytes=s.cache.nbytes)
    s.cache.insert_cache(s.key, [1, *TOKENS], read(s.model, [1, *TOKENS]))
    assert len(s.cache) == 1
    many = TOKENS * 8
    s.cache.insert_cache(s.key, many, read(s.model, many))  # does not fit: nothing goes
    assert s.cache.fetch_nearest_cache(s.key, [1, *TOKENS, 2])[1] == [2]

    s.cache.insert_cache(s.key, TOKENS, [Strange(60)])
    found, rest = s.cache.fetch_nearest_cache(s.key, [*TOKENS, 4])
    assert found is not None
    assert (type(found[0]), found[0].held.size, rest) == (Strange, 60, [4])
    assert s.cache.fetch_nearest_cache(s.key, TOKENS)[0] is None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_10_ranks_agree_on_the_resumed_length(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    ports = [free_port(), free_port()]
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.hooks.rank", str(tmp_path / f"store{rank}")],
            cwd=Path(__file__).parents[2],
            env={"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts), "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0]["alone"] != said[1]["alone"]
    assert said[0]["together"] == said[1]["together"]
    assert [x > 0 for x in said[0]["together"]] == [True, True, False]


def test_11_the_generation_threads_end_is_a_flush(
    serving: Callable[..., Any], tmp_path: Path
) -> None:
    s = serving("llama")
    holder = SimpleNamespace(prompt_cache=PromptCache(store=tmp_path / "mine", provider=s.provider))

    def generation() -> None:
        holder.prompt_cache.insert_cache(s.key, TOKENS, read(s.model, TOKENS))
        del holder.prompt_cache

    thread = threading.Thread(target=generation)
    thread.start()
    thread.join()
    out = subprocess.run(
        [sys.executable, "-m", "kvkeep.cli", "ls", "--store", str(tmp_path / "mine"), "--json"],
        capture_output=True,
        check=True,
    )
    (found,) = json.loads(out.stdout)["conversations"]
    assert found["tokens"] == len(TOKENS)


def test_a_deep_copy_is_still_tracked() -> None:
    caches = track(make_prompt_cache(architectures.build("llama")))
    twin = copy.deepcopy(caches)
    for cache in twin:
        cache.update_and_fetch(mx.ones((1, 2, 5, 32)), mx.ones((1, 2, 5, 32)))
        assert cache.to_quantized(group_size=32, bits=4).minimum_resumable_offset == 5
