"""Tiny models with heads of 64, and what they say."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

VOCAB = 97
CONFIG = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@cache
def model_of(name):
    """An architecture of mlx-lm with random weights in bfloat16, the same in every process."""
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **CONFIG}))
    model.update(tree_map(lambda p: p.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    return model


def prompt_of(count, seed=0):
    """Token ids."""
    return mx.array(np.random.default_rng(seed).integers(0, VOCAB, count))


def answer(model, caches, prompt, count, chunk=16):
    """The greedy answer, by calls of the model alone: all but the last token in chunks."""
    for start in range(0, len(prompt) - 1, chunk):
        mx.eval(model(prompt[None, start : min(start + chunk, len(prompt) - 1)], cache=caches))
    told, token = [], prompt[-1:]
    for _ in range(count):
        token = mx.argmax(model(token[None], cache=caches)[:, -1], axis=-1)
        told.append(token.item())
    return told
