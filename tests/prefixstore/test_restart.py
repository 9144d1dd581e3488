"""After a restart: every legal offset continues bit for bit, every other one is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvkeep
from kvkeep import Reason
from tests import architectures
from tests.prefixstore import first_process as first

FIRST_PYTHON = os.environ.get("KVKEEP_FIRST_PYTHON", sys.executable)
"""Who writes the store: another interpreter may have another mlx-lm."""

EVERYWHERE = set(range(1, 89))
SNAPSHOTS = {48, 60, 88}

LEGAL = {
    "llama": EVERYWHERE,
    "deepseek_v3": EVERYWHERE,
    "qwen3_next": SNAPSHOTS,
    "falcon_h1": SNAPSHOTS,
    "mamba2": SNAPSHOTS,
    # Rings of 24: rows [9, 60) and [64, 88) were ever held at a snapshot.
    "gemma3_text": set(range(33, 61)) | {88},
    # Chunks of 24: rows [8, 60) and [63, 88).
    "llama4": set(range(32, 61)) | {87, 88},
    "llama-quantized": set(range(first.QUANTIZED_AT, 89)),
    "llama-quantized-unknown": SNAPSHOTS,
}

REASON = {
    "qwen3_next": Reason.NO_STATE_AT_OFFSET,
    "falcon_h1": Reason.NO_STATE_AT_OFFSET,
    "mamba2": Reason.NO_STATE_AT_OFFSET,
    "gemma3_text": Reason.ROWS_MISSING,
    "llama4": Reason.ROWS_MISSING,
    "llama-quantized": Reason.BELOW_FLOOR,
    "llama-quantized-unknown": Reason.BELOW_FLOOR,
}


@pytest.fixture(scope="module", params=sorted(LEGAL))
def before(request, tmp_path_factory):
    """A store that another process filled, and what that process computed."""
    folder = tmp_path_factory.mktemp("restart")
    done = subprocess.run(
        [FIRST_PYTHON, "-m", first.__name__, request.param, folder / "store", folder / "out.npz"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model = architectures.build(first.VARIANTS[request.param])
    return request.param, model, folder / "store", np.load(folder / "out.npz")


def test_every_legal_offset_continues_bit_for_bit(before):
    variant, model, path, record = before
    tokens, resumed, compared = record["tokens"], 0, 0
    with kvkeep.open(path) as store:
        space = first.open_space(store, variant, model)
        for wanted in sorted(EVERYWHERE):
            hit = space.resume(tokens[: wanted + 1])
            legal = max((p for p in LEGAL[variant] if p <= wanted), default=0)
            assert hit.offset == legal, hit.decision
            assert hit.rest == tokens[hit.offset : wanted + 1].tolist()
            if hit.caches is None:
                continue
            resumed += hit.offset
            if hit.offset == wanted and wanted >= first.PROMPT:
                compared += compare(variant, model, record, hit)
    assert resumed > 0
    assert compared >= 3 * first.AHEAD


def compare(variant, model, record, hit):
    """Continue token by token and compare every logit; how many positions were compared."""
    start = hit.offset
    ahead, expected = first.AHEAD, record["logits"][start - first.PROMPT :]
    if variant == "gemma3_text" and start not in SNAPSHOTS:
        ahead, expected = 8, record[f"temporal{start}"]
    for i, position in enumerate(range(start, start + ahead)):
        token = record["tokens"][position : position + 1]
        got = first.bits(first.step(model, hit.caches, token))
        assert np.array_equal(got, expected[i]), f"{variant}: logits differ at {position}"
    return ahead


def test_every_illegal_offset_is_refused_with_its_reason(before):
    variant, model, path, record = before
    refused = 0
    with kvkeep.open(path) as store:
        space = first.open_space(store, variant, model)
        for wanted in sorted(EVERYWHERE - LEGAL[variant]):
            decision = space.explain([*record["tokens"][:wanted].tolist(), 1000, 1001])
            assert decision.matched == wanted
            assert decision.offset < wanted
            assert decision.reason is REASON[variant]
            assert decision.limits
            refused += 1
    assert refused == len(EVERYWHERE - LEGAL[variant])


def test_a_prompt_that_parts_resumes_where_it_parts(before):
    variant, model, path, record = before
    with kvkeep.open(path) as store:
        space = first.open_space(store, variant, model)
        hit = space.resume([*record["tokens"][:60].tolist(), 1000, 1001])
    assert (hit.offset, hit.decision.matched, hit.decision.reason) == (60, 60, Reason.FULL)
    assert hit.rest == [1000, 1001]
    assert len(hit.caches) == len(first.make_prompt_cache(model))


def test_a_resumed_cache_stores_only_what_is_new(before):
    variant, model, path, record = before
    tokens = record["tokens"]
    with kvkeep.open(path) as store:
        space = first.open_space(store, variant, model)
        hit = space.resume(tokens[:89])
        assert hit.offset == 88
        first.step(model, hit.caches, tokens[88:96])
        receipt = space.snapshot(tokens[:96], hit.caches)
        assert receipt.stored
        again = space.snapshot(tokens[:96], hit.caches)
        assert (again.stored, again.bytes_written, again.tokens_new) == (True, 0, 0)
        assert receipt.tokens_new == 8
        assert receipt.tokens_known == 88
        assert not store.verify().problems
    mx.eval([c.state for c in hit.caches])
