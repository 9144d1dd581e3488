"""Runs of mlx-lm over caches, and what they answered as bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from tests.codecs.shuttle import bits

PROMPT = np.random.default_rng(7).integers(0, 97, 40)


def generated(model, caches, *, prompt=PROMPT, tokens=12, step=16, **options):
    """The tokens that mlx-lm generates, and the log-probabilities of each step as bits."""
    steps = generate_step(
        mx.array(prompt),
        model,
        prompt_cache=caches,
        max_tokens=tokens,
        prefill_step_size=step,
        **options,
    )
    found = [(int(token), bits(logprobs)) for token, logprobs in steps]
    return [token for token, _ in found], [answer for _, answer in found]


def forward(model, caches, tokens):
    """The logits of every one of ``tokens``, as bits."""
    logits = model(mx.array(tokens)[None], cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    assert mx.all(mx.isfinite(logits)).item()
    return bits(logits[0])


def equal_steps(first, second):
    """Assert that both runs answered alike at every step; how many steps there were."""
    (tokens, answers), (others, wanted) = first, second
    assert tokens == others
    for step, (a, b) in enumerate(zip(answers, wanted, strict=True)):
        assert np.array_equal(a, b), f"step {step} differs"
    return len(tokens)
