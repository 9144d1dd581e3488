"""Chunk-aligned mode: after a resume the forwards and the answer are those of a cold run."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep import Reason
from kvkeep.hooks.prefill import vouch
from tests import architectures
from tests.prefixstore.first_process import bits

STEP = 16


class Recorder:
    """A model that also writes down the shape of every forward it is asked for."""

    def __init__(self, model):
        self.model = model
        self.shapes = []

    def __call__(self, tokens, cache):
        self.shapes.append(tokens.shape)
        return self.model(tokens, cache=cache)


def answer(model, caches, tokens, stored=None):
    """Prefill in steps up to the last token, then five greedy tokens: shapes and raw logits."""
    model, logits, at = Recorder(model), [], len(tokens[0]) - len(tokens[1])
    prompt, rest = tokens
    while len(rest) > 1:
        n = min(STEP, len(rest) - 1)
        out = model(mx.array(rest[:n])[None], caches)
        mx.eval(out, [c.state for c in caches])
        at, rest = at + n, rest[n:]
        if stored is not None:
            stored(prompt[:at], caches)
    token = rest
    for _ in range(5):
        out = model(mx.array(token)[None], caches)[:, -1]
        logits.append(bits(out))
        token = [int(mx.argmax(out, axis=-1).item())]
    return model.shapes, np.stack(logits)


@pytest.mark.parametrize("name", sorted(architectures.CONFIGS))
def test_a_resumed_run_is_a_cold_run_from_there_on(name, tmp_path):
    model = architectures.build(name)
    rng = np.random.default_rng(1)
    first = rng.integers(0, architectures.VOCAB, 75).tolist()
    second = first[:70] + rng.integers(0, architectures.VOCAB, 20).tolist()
    resumed = 0
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = store.space(
            identity={"model": name},
            layout=make_prompt_cache(model),
            exact=True,
            prefill_step=STEP,
        )

        def keep(tokens, caches):
            space.snapshot(tokens, caches, origin="interval").wait()

        caches = make_prompt_cache(model)
        vouch(caches)
        answer(model, caches, (first, first), keep)
        for prompt in (first, second):
            cold = answer(model, make_prompt_cache(model), (prompt, prompt))
            hit = space.resume(prompt)
            warm = answer(model, hit.caches, (prompt, hit.rest))
            assert hit.offset == 64
            assert warm[0] == cold[0][hit.offset // STEP :]
            assert np.array_equal(warm[1], cold[1])
            resumed += hit.offset
        parted = space.explain([*first[:50], 0, 0])
    assert resumed == 128
    assert (parted.matched, parted.offset) == (50, 48)
    assert parted.reason is Reason.CHUNK_ALIGNED


def test_what_no_prefill_computed_is_not_stored(tmp_path):
    model = architectures.build("llama")
    caches = make_prompt_cache(model)
    tokens = list(range(40))
    mx.eval(model(mx.array(tokens)[None], cache=caches))
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = store.space(identity={}, layout=caches, exact=True, prefill_step=STEP)
        answered = space.snapshot(tokens, caches, origin="output")
        assert (answered.stored, answered.reason) == (False, "no whole prefill step to store")
        assert space.snapshot(tokens, caches, origin="output", prefilled=20).tokens_new == STEP
        assert space.explain([*tokens, 0]).offset == STEP
        plain = store.space(identity={}, layout=caches)
        decision = plain.explain([*tokens, 0])
        assert (decision.offset, decision.why) == (0, "space_changed:plan")
