"""Every model of mlx-lm runs with quantized caches, and resumes with them bit for bit."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, make_prompt_cache

import kvkeep
from kvkeep.caches import make
from kvkeep.errors import BadScheme
from kvkeep.hooks.prefill import convert
from tests.conformance import wide
from tests.conformance.live import forward, tokens_of
from tests.conformance.test_every_model import RUNNABLE

START = 13
SCHEME = f"affine:4:32@{START}"

FORWARDS = (6, 4, 5, 1, 6, 1)
"""The third converts, at 15; windows are of 12 positions."""

EDGES = tuple(accumulate(FORWARDS))
BEFORE, CONVERTED, AFTER = EDGES[1:4]
SNAPSHOTS = (BEFORE, AFTER)

REFUSED = {
    "deepseek_v41": "Layer 0 (LayerCache): affine:4:32@13 is not known for this kind",
    "mamba": "changes no layer of this model, whose caches are arrays",
    "mamba2": "changes no layer of this model, whose caches are arrays",
    "rwkv7": "changes no layer of this model, whose caches are arrays",
}
"""Models that the scheme does not fit, and what is said of them."""

STAYS = {
    "deepseek_v32": "selects by keys of its own, which it takes out of their cache",
    "glm_moe_dsa": "selects by keys of its own, which it takes out of their cache",
    "minimax_m3_vl": "selects by keys of its own, which it takes out of their cache",
}
"""Models of which a cache with rows stays as it is."""


_LATENT = "reconstructs keys and values from latent rows"
_OWN = "computes scores or casts rows itself"
_LENT = "lends its rows to other layers, without their cache"

DENSE = {
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "kimi_k25", "kimi_k3"), _LATENT),
    **dict.fromkeys(("kimi_linear", "kimi_vl", "longcat_flash", "longcat_flash_ngram"), _LATENT),
    "mistral4": _LATENT,
    **dict.fromkeys(("gemma2", "phi", "phi3small", "phixtral", "plamo", "plamo2"), _OWN),
    **dict.fromkeys(("stablelm", "minimax_m3_vl"), _OWN),
    **dict.fromkeys(("afm7", "gemma4", "gemma4_text", "iquestloopcoder"), _LENT),
    "gpt_oss": "has attention sinks",
}
"""Models whose attention does not multiply planes, and why; their rows are read densely."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One for all: each model has spaces of its own."""
    with kvkeep.open(tmp_path_factory.mktemp("store"), max_bytes="1GB") as opened:
        yield opened


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_the_scheme_does_not_fit_is_said(name):
    with pytest.raises(BadScheme) as caught:
        make(wide.build(name), SCHEME)
    assert REFUSED[name] in caught.value.problem


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name not in REFUSED])
def test_runs_and_resumes(name, store):
    model, tokens = wide.build(name), tokens_of(name)
    caches = make(model, SCHEME)
    delayed = [cache for cache in parts(caches) if hasattr(cache, "converted")]
    assert delayed
    assert any(type(cache) is KVCache for cache in parts(caches)) == (name in STAYS)
    full = [cache for cache in delayed if type(cache.caches[0]) is KVCache]
    assert any(cache.dense for cache in full) == (name in DENSE)
    answers = []
    space = store.space(identity={"model": name}, layout=caches, kv_scheme=SCHEME)
    for stop, count in zip(EDGES, FORWARDS, strict=True):
        logits, _ = forward(model, caches, tokens[stop - count : stop])
        answers.append(logits)
        assert all(cache.converted == (stop >= CONVERTED) for cache in delayed)
        if stop in SNAPSHOTS:
            receipt = space.snapshot(tokens[:stop], caches)
            assert receipt.stored, receipt
    for cache in delayed:
        held = cache.caches[0]
        assert getattr(held, "boundary", held.minimum_resumable_offset) == CONVERTED
    compared = 0
    for p in SNAPSHOTS:
        hit = space.resume(tokens[: p + 1])
        assert hit.offset == p
        for i in range(EDGES.index(p) + 1, len(FORWARDS)):
            logits, _ = forward(model, hit.caches, tokens[EDGES[i - 1] : EDGES[i]])
            assert np.array_equal(logits, answers[i]), f"from {p}, forward {i}"
            compared += 1
    assert compared == 4 + 2
    # Between the two, the converted rows are below their floor.
    decision = space.explain([*tokens[: BEFORE + 2].tolist(), 1000])
    assert (decision.matched, decision.offset) == (BEFORE + 2, BEFORE)
    if name not in DENSE and all(is_full(cache) for cache in caches):
        equal_to_mlx_lm(model, tokens, answers)


def is_full(cache):
    """Whether mlx-lm treats the cache as we do: recurrent state, or rows of every position."""
    return type(cache) is ArraysCache or getattr(cache, "kind", "") == "delayed(kv,kv-quant)"


def equal_to_mlx_lm(model, tokens, answers):
    """Assert that mlx-lm's own caches, converted after each forward, answer the same."""
    caches = make_prompt_cache(model)
    for i, (stop, count) in enumerate(zip(EDGES, FORWARDS, strict=True)):
        logits, _ = forward(model, caches, tokens[stop - count : stop])
        assert np.array_equal(logits, answers[i]), f"forward {i}"
        convert(caches, 4, 32, START)
    assert {type(cache) for cache in caches} <= {ArraysCache, QuantizedKVCache}


def parts(caches):
    """Every cache of a layer, out of its list."""
    for cache in caches:
        yield from parts(cache.caches) if isinstance(cache, CacheList) else [cache]


OTHERS = ("affine:8:32", "turbo:8:3", "paged:5")
"""One of these for each model, in turn."""

AFFINE_ONLY = {
    "deepseek_v32": "puts its keys back into their cache, which has no such array",
    "glm_moe_dsa": "puts its keys back into their cache, which has no such array",
    "minimax_m3_vl": "puts its keys back into their cache, which has no such array",
    "recurrent_gemma": "has rows in windows only, which stay as they are",
}
"""Models that ``paged`` does not fit, and why."""


@pytest.mark.parametrize("name", sorted(AFFINE_ONLY))
def test_what_paged_does_not_fit_is_said(name):
    problem = "the model reaches into its caches|changes no layer of this model"
    with pytest.raises(BadScheme, match=problem):
        make(wide.build(name), "paged:5")


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        (name, "affine:8:32" if name in AFFINE_ONLY else OTHERS[i % len(OTHERS)])
        for i, name in enumerate(name for name in RUNNABLE if name not in REFUSED)
    ],
)
def test_other_schemes_run_and_resume(name, scheme, store):
    model, tokens = wide.build(name, head=64 if "turbo" in scheme else 32), tokens_of(name)
    caches = make(model, scheme)
    edges, answers = (15, 16, 21), {}
    plain = make(model, "bf16")
    assert {type(cache) for cache in parts(caches)} - {type(cache) for cache in parts(plain)}
    space = store.space(identity={"model": name}, layout=caches)
    start = 0
    for stop in edges:
        answers[start], _ = forward(model, caches, tokens[start:stop])
        if scheme.startswith("paged"):
            wanted, _ = forward(model, plain, tokens[start:stop])
            assert np.array_equal(answers[start], wanted)
        if stop < edges[-1]:
            assert space.snapshot(tokens[:stop], caches).stored
        start = stop
    compared = 0
    for p in edges[:-1]:
        hit = space.resume(tokens[: p + 1])
        assert hit.offset == p
        for start, stop in pairwise(edges):
            if start >= p:
                logits, _ = forward(model, hit.caches, tokens[start:stop])
                assert np.array_equal(logits, answers[start]), (p, start)
                compared += 1
    assert compared == 3
