"""Every model of mlx-lm resumes bit for bit, wherever that is possible, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep import Reason
from kvkeep.errors import EmptyCache
from tests.conformance import models
from tests.conformance.configs import (
    CONFIGS,
    EMPTY_CACHES,
    METAL_ONLY,
    NOT_CAUSAL,
    SINCE,
    SOUND_SINCE,
    TEXT,
    UNRUNNABLE,
    VOCAB,
)
from tests.conformance.live import (
    AHEAD,
    CUT_PLAN,
    EDGES,
    FORWARDS,
    SNAPSHOTS,
    forward,
    run,
    tokens_of,
)
from tests.conformance.table import SPELLED_ELSEWHERE, document, row

NOT_HERE = {} if mx.metal.is_available() else METAL_ONLY
FAILING = sorted({*UNRUNNABLE, *NOT_HERE} - models.before(SINCE))
CRASHING = models.before(SOUND_SINCE)
RUNNABLE = [name for name in models.names() if name not in {*FAILING, *CRASHING}]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"

EVERYWHERE = range(1, SNAPSHOTS[-1] + 1)


@pytest.fixture(scope="module", params=RUNNABLE)
def case(request, tmp_path_factory):
    """A model's name, its live run, and a store that holds the snapshots of that run."""
    folder = tmp_path_factory.mktemp("store")
    model, tokens = models.build(request.param), tokens_of(request.param)
    with kvkeep.open(folder, max_bytes="1GB") as store:
        space = open_space(store, request.param, model)

        def keep(offset, caches):
            receipt = space.snapshot(tokens[:offset], caches)
            assert receipt.stored, receipt

        live = run(model, tokens, at=keep)
    return request.param, live, folder


def open_space(store, name, model):
    return store.space(identity={"model": name}, layout=make_prompt_cache(model))


def test_every_legal_offset_continues_bit_for_bit(case):
    name, live, folder = case
    resumed = compared = 0
    with kvkeep.open(folder) as store:
        space = open_space(store, name, live.model)
        for wanted in EVERYWHERE:
            hit = space.resume(live.tokens[: wanted + 1])
            assert hit.offset == max(p for p in range(wanted + 1) if p == 0 or live.legal(p))
            assert len(hit.rest) == wanted + 1 - hit.offset
            if hit.offset == wanted:
                assert len(hit.caches) == len(make_prompt_cache(live.model))
                compared += continues(live, wanted, hit.caches)
                resumed += wanted
    legal = [p for p in EVERYWHERE if live.legal(p)]
    assert resumed == sum(legal) > 0
    assert compared >= AHEAD * len(legal)


def continues(live, p, caches):
    """Assert that ``caches`` at ``p`` go on like the live ones; how many forwards were compared."""
    if p in EDGES and (p in SNAPSHOTS or live.plain):
        i = EDGES.index(p)
        plan, expected = FORWARDS[i : i + AHEAD], None
    else:
        plan, expected = CUT_PLAN, live.cut(p)
    for count in plan:
        tokens = live.tokens[p : p + count]
        logits, chosen = forward(live.model, caches, tokens)
        wanted = live.answers[p] if expected is None else forward(live.model, expected, tokens)
        assert np.array_equal(logits, wanted[0]), f"logits differ from {p} on"
        assert np.array_equal(chosen, wanted[1])
        p += count
    return len(plan)


def test_the_comparison_would_see_a_lost_cache(case):
    _, live, _ = case
    for p in SNAPSHOTS:
        tokens = live.tokens[p : EDGES[EDGES.index(p) + 1]]
        without, _ = forward(live.model, make_prompt_cache(live.model), tokens)
        assert not np.array_equal(without, live.answers[p][0])


def test_every_illegal_offset_is_refused_with_its_reason(case):
    name, live, folder = case
    illegal = [p for p in EVERYWHERE if not live.legal(p)]
    assert bool(illegal) == (not live.plain)
    with kvkeep.open(folder) as store:
        space = open_space(store, name, live.model)
        for p in illegal:
            decision = space.explain([*live.tokens[:p].tolist(), 1000, 1001])
            assert decision.matched == p
            assert decision.offset < p
            reasons = {limit.reason for limit in decision.limits}
            expected = {Reason.NO_STATE_AT_OFFSET} if live.stateful else set()
            if not all(rows.cover(p) for rows in live.rows if rows is not None):
                expected.add(Reason.ROWS_MISSING)
            assert decision.reason in reasons == expected


def test_rows_do_not_depend_on_later_tokens(case):
    """What lets conversations share rows: another end of a chunk leaves the rows before it."""
    name, live, _ = case
    same = 15
    second = run(live.model, parted(live.tokens, same), forwards=FORWARDS[:4])
    assert not np.array_equal(live.answers[12][0], second.answers[12][0])
    compared, equal = 0, []
    for a, b in zip(live.rows, second.rows, strict=True):
        for x, y in zip(a.between(0, same), b.between(0, same), strict=True) if a else ():
            equal.append(mx.array_equal(x, y).item())
            compared += x.size
    assert bool(compared) == any(live.rows)
    assert all(equal) == (name not in NOT_CAUSAL)


def parted(tokens, at):
    """Other tokens from ``at`` on."""
    other = tokens.copy()
    other[at:] = (other[at:] + 1) % VOCAB
    return other


def test_the_page_says_so(case):
    name, live, _ = case
    if name not in METAL_ONLY:
        assert row(name, live) in PAGE.read_text().splitlines(), f"write {PAGE.name} again"


def test_the_page_is_up_to_date():
    page = PAGE.read_text()
    rows = [line for line in page.splitlines() if re.fullmatch(r"(\| [^|]+ ){5}\|", line)][1:]
    listed = [re.match(r"\| `([^`]+)`", line)[1] for line in rows]
    here = [name for name in listed if name not in models.before(SINCE)]
    assert here == [name for name in models.names() if name not in {*UNRUNNABLE, *METAL_ONLY}]
    if not models.before(SINCE):
        assert page == document(re.search(r"mlx-lm (\S+)", page)[1], rows)


@pytest.mark.parametrize("name", FAILING)
def test_what_is_said_not_to_run_does_not(name):
    with pytest.raises((RuntimeError, ValueError, SystemExit)):
        run(models.build(name), tokens_of(name))


def test_nothing_is_said_of_models_that_are_gone():
    said = (CONFIGS, TEXT, UNRUNNABLE, METAL_ONLY, NOT_CAUSAL, EMPTY_CACHES, SPELLED_ELSEWHERE)
    named = {name for table in (*said, SINCE, SOUND_SINCE) for name in table}
    assert named - models.before(SINCE) <= set(models.names())


@pytest.mark.parametrize("name", sorted({*NOT_CAUSAL} - CRASHING))
def test_whole_chunks_do_not_depend_on_later_tokens(name, tmp_path):
    """In exact mode a prompt that parts inside a chunk is answered as without a store."""
    model, step, chunks = models.build(name), 8, range(0, 24, 8)
    first, caches = tokens_of(name)[:24], make_prompt_cache(model)
    second, cold = parted(first, 13), make_prompt_cache(model)
    answers = [forward(model, cold, second[p : p + step])[0] for p in chunks]
    for p in chunks:
        forward(model, caches, first[p : p + step])
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=cold, exact=True, prefill_step=step)
        space.snapshot(first, caches)
        hit = space.resume(second)
    assert hit.offset == 8
    for p in chunks[1:]:
        assert np.array_equal(forward(model, hit.caches, second[p : p + step])[0], answers[p // 8])


EMPTY_IN = {
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        ],
    }
}


@pytest.mark.parametrize("name", sorted(EMPTY_CACHES))
def test_a_cache_that_stays_empty_is_refused(name, tmp_path):
    model = models.build(name, **EMPTY_IN[name])
    caches = make_prompt_cache(model)
    forward(model, caches, tokens_of(name)[:6])
    assert [cache.offset for cache in caches] == [6, 0, 6]
    with kvkeep.open(tmp_path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=caches)
        with pytest.raises(EmptyCache, match=r"^Layer 1 \(kv\): "):
            space.snapshot(tokens_of(name)[:6], caches)
        assert store.used_bytes == 0
