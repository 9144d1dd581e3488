"""The process before the restart: runs a tiny model, stores three moments, records its logits.

    python -m tests.prefixstore.first_process VARIANT STORE OUT

A prefill of 48 tokens in chunks of 16 and a decode of 72 single tokens. Snapshots at 48, 60
and 88. ``OUT`` gets the tokens and, for every decoded position, the logits as raw bits; and,
for rings that are resumed between snapshots, the logits of a live ring in temporal order.
"""

from __future__ import annotations

import copy
import sys
from itertools import pairwise

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

import kvkeep
from kvkeep.hooks.prefill import vouch
from tests import architectures

PROMPT, STEP, END, SNAPSHOTS, AHEAD = 48, 16, 120, (48, 60, 88), 32
QUANTIZED_AT = 20

VARIANTS = {
    **{name: name for name in architectures.CONFIGS},
    "llama-quantized": "llama",
    "llama-quantized-unknown": "llama",
}


def bits(array):
    """The array's raw bits: equal only where every bit is."""
    array = array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size])
    mx.eval(array)
    return np.array(array)


def tokens_of(name):
    return np.random.default_rng(len(name)).integers(0, architectures.VOCAB, END)


def step(model, caches, tokens):
    logits = model(mx.array(tokens)[None], cache=caches)[:, -1]
    mx.eval(logits, [c.state for c in caches])
    return logits


def quantize(caches, recorded):
    """What `kv_bits` does in mlx-lm, with the offset of the conversion noted or lost."""
    out = [c.to_quantized(group_size=32, bits=4) for c in caches]
    for cache in out:
        if recorded:
            cache.minimum_resumable_offset = cache.offset
    return out


def fork(caches):
    """A copy that shares no object with the live caches, rings in temporal order."""
    out = copy.deepcopy(caches)
    for ring in out:
        if isinstance(ring, RotatingKVCache):
            keep = -min(ring.max_size, ring.offset)
            ring.keys = ring._temporal_order(ring.keys)[..., keep:, :]
            ring.values = ring._temporal_order(ring.values)[..., keep:, :]
            ring._idx = ring.keys.shape[2]
    return out


def open_space(store, variant, model):
    return store.space(identity={"model": variant}, layout=make_prompt_cache(model))


def main(variant, path, out):
    model = architectures.build(VARIANTS[variant])
    tokens = tokens_of(variant)
    caches = make_prompt_cache(model)
    vouch(caches)
    logits, temporal = {}, {}
    with kvkeep.open(path, max_bytes="1GB") as store:
        space = open_space(store, variant, model)
        edges = [0, STEP, 2 * STEP, PROMPT]
        if "quantized" in variant:
            edges.insert(2, QUANTIZED_AT)
        for start, stop in pairwise(edges):
            step(model, caches, tokens[start:stop])
            if "quantized" in variant and stop == QUANTIZED_AT:
                caches = quantize(caches, recorded="unknown" not in variant)
        for position in range(PROMPT, END):
            if position in SNAPSHOTS:
                receipt = space.snapshot(tokens[:position], caches)
                assert receipt.stored, receipt
            elif position < max(SNAPSHOTS) and any(isinstance(c, RotatingKVCache) for c in caches):
                other = fork(caches)
                ahead = range(position, position + 8)
                temporal[position] = np.stack(
                    [bits(step(model, other, tokens[p : p + 1])) for p in ahead]
                )
            logits[position] = bits(step(model, caches, tokens[position : position + 1]))
    np.savez(
        out,
        tokens=tokens,
        logits=np.stack([logits[p] for p in range(PROMPT, END)]),
        **{f"temporal{p}": x for p, x in temporal.items()},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
