"""A model's caches after a prompt, one or a batch of them, and what they hold."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    make_prompt_cache,
)

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)
WINDOW = (7, 8, 2, 9, 4)


def bits(array):
    return np.array(array.view(mx.uint8))


def run(model, caches, *rows):
    logits = model(mx.array(rows), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def primed(model, tokens=PROMPT):
    caches = make_prompt_cache(model)
    run(model, caches, tokens)
    return caches


def held(cache):
    """What the cache holds, as bits: recurrent slots, or rows up to the offset."""
    if isinstance(cache, ArraysCache):
        return [bits(slot) for slot in cache.cache]
    keys, values = cache.keys_and_values()
    return [bits(x) for _, x in tree_flatten([keys, values])]


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def recurrent(caches):
    return [cache for cache in caches if isinstance(cache, ArraysCache)]


def batched(model, *prompts):
    """The caches of a batch, row by row from prompts of different lengths."""
    singles = [primed(model, prompt) for prompt in prompts]
    return [type(caches[0]).merge(caches) for caches in zip(*singles, strict=True)]


PROMPTS = (PROMPT, PROMPT[:4], (8, 8, 1, 2, 3, 4))


WINDOWS = ((7, 8, 2, 9), (1, 2, 3, 4), (9, 9, 1, 1))


def shadows(model):
    return [sorted(vars(module)) for module in model.modules()]
