"""The process before the restart: runs a tiny model over caches of a scheme, and stores them.

    python -m tests.caches.first_process SCHEME STORE OUT

A prefill of 48 tokens in chunks of 16 and 12 more one by one, with snapshots at 48 and 60. ``OUT``
gets, for every offset, the logits with which the live caches go on once they are trimmed to it.
"""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np

import kvkeep
from kvkeep.caches import make
from kvkeep.hooks.live_caches import clone
from tests.caches.small import model_of, prompt_of
from tests.codecs.shuttle import bits

PROMPT, CHUNK, END = 48, 16, 60
PLAN = (1, 3)
"""The tokens of the forwards with which a run goes on."""

TOKENS = prompt_of(END + sum(PLAN), seed=3).tolist()


def forward(model, caches, start, count):
    """The logits of ``count`` tokens from ``start`` on, as bits."""
    logits = model(mx.array(TOKENS[start : start + count])[None], cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    return bits(logits[0])


def goes_on(model, caches, p):
    """The logits after offset ``p``."""
    out = []
    for count in PLAN:
        out.append(forward(model, caches, p, count))
        p += count
    return np.concatenate(out)


def open_space(store, model, scheme):
    return store.space(identity={"model": "llama"}, layout=make(model, scheme))


def main(scheme, path, out):
    model = model_of("llama")
    caches = make(model, scheme)
    with kvkeep.open(path) as store:
        space = open_space(store, model, scheme)
        for start in range(0, PROMPT, CHUNK):
            forward(model, caches, start, CHUNK)
        assert space.snapshot(TOKENS[:PROMPT], caches).stored
        for start in range(PROMPT, END):
            forward(model, caches, start, 1)
        assert space.snapshot(TOKENS[:END], caches).stored
    record = {}
    for p in range(1, END + 1):
        fork = clone(caches)
        assert {cache.trim(END - p) for cache in fork} == {END - p}
        record[str(p)] = goes_on(model, fork, p)
    np.savez(out, **record)


if __name__ == "__main__":
    main(*sys.argv[1:])
