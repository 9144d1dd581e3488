"""A model run without kvkeep: what it answered, and which rows its caches held.

The rows are read here by other means than the codecs use, so that the caches that are built
from them are a reference: a run that was cut, in mlx-lm's own terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from kvkeep.hooks.prefill import vouch
from tests.conformance.configs import VOCAB, WINDOW
from tests.prefixstore.first_process import bits

FORWARDS = (1, 5, 6, 8, *[1] * 20, 7, *[1] * 6)
"""Tokens of each forward: a prompt in chunks, an answer, a second prompt and its answer."""

EDGES = (0, *accumulate(FORWARDS))

SNAPSHOTS = (1, 6, WINDOW, 20, 21, 2 * WINDOW, 47)
"""After one token; within a window; at a window's size; a wrapped ring as a prefill leaves it,
and as the next token cuts it; at twice the size; a ring that went on from a rotated one."""

AHEAD = 4
"""Forwards that are compared after a resume."""

CUT_PLAN = (1, 1, 3, 1)
"""Tokens of the forwards after a resume where no snapshot was taken."""


def tokens_of(name):
    numbers = np.random.default_rng([ord(c) for c in name])
    return numbers.integers(0, VOCAB, EDGES[-1])


def forward(model, caches, tokens):
    """The logits of every one of ``tokens``, as raw bits, and the tokens that they choose."""
    logits = model(mx.array(tokens)[None], cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    assert mx.all(mx.isfinite(logits[..., :VOCAB])).item()
    return bits(logits[0]), np.array(mx.argmax(logits[0], axis=-1))


def leaves(caches):
    """Caches that hold no others, in order."""
    for cache in caches:
        yield from leaves(cache.caches) if hasattr(cache, "caches") else [cache]


@dataclass
class Rows:
    """What one cache held at some moments: first position, keys, values. No window is ``None``."""

    window: int | None
    held: list[tuple[int, Any, Any]] = field(default_factory=list)

    def note(self, cache):
        """Add what ``cache`` holds now."""
        keys, values, start, stop = cache.keys, cache.values, 0, cache.offset
        if isinstance(cache, RotatingKVCache):
            keys, values = cache._temporal_order(keys), cache._temporal_order(values)
            start = stop - min(stop, keys.shape[2])
        elif isinstance(cache, ChunkedKVCache):
            start = cache.start_position
        keys, values = keys[:, :, : stop - start], values[:, :, : stop - start]
        mx.eval(keys, values)
        self.held.append((start, keys, values))

    def first(self, p):
        """The first position that a cache at ``p`` reads."""
        return 0 if self.window is None else max(0, p - self.window)

    def cover(self, p):
        """Whether everything that a cache at ``p`` reads was ever held."""
        held = {start + i for start, keys, _ in self.held for i in range(keys.shape[2])}
        return held.issuperset(range(self.first(p), p))

    def between(self, start, stop):
        """Keys and values of these positions."""
        parts = []
        while start < stop:
            a, keys, values = next(x for x in self.held if x[0] <= start < x[0] + x[1].shape[2])
            b = min(stop, a + keys.shape[2])
            parts.append([x[:, :, start - a : b - a] for x in (keys, values)])
            start = b
        return [mx.concatenate(side, axis=2) for side in zip(*parts, strict=True)]


def rows_of(cache):
    """An empty ``Rows`` for a cache with rows; ``None`` for one that is all state."""
    if isinstance(cache, RotatingKVCache):
        return Rows(cache.max_size)
    if isinstance(cache, ChunkedKVCache):
        return Rows(cache.chunk_size)
    return Rows(None) if isinstance(cache, KVCache) else None


@dataclass
class Live:
    """One run over ``tokens``: answers by the position they start at, and the rows by leaf."""

    model: Any
    tokens: Any
    caches: list[Any]
    answers: dict[int, Any] = field(default_factory=dict)
    rows: list[Rows | None] = field(default_factory=list)

    @property
    def stateful(self):
        return any(rows is None for rows in self.rows)

    @property
    def plain(self):
        """Whether every cache holds all rows in order, so that the run itself is a reference."""
        return all(rows is not None and rows.window is None for rows in self.rows)

    def legal(self, p):
        """Whether a resume at ``p`` is exact, by what the snapshots held."""
        if p in SNAPSHOTS:
            return True
        return not self.stateful and all(rows.cover(p) for rows in self.rows)

    def cut(self, p):
        """Caches at ``p`` as a run that ended there would have them."""
        caches = make_prompt_cache(self.model)
        for cache, rows in zip(leaves(caches), self.rows, strict=True):
            first = rows.first(p)
            cache.keys, cache.values = rows.between(first, p)
            cache.offset = p
            if isinstance(cache, RotatingKVCache):
                cache._idx = p - first
            elif isinstance(cache, ChunkedKVCache):
                cache.start_position = first
        return caches


def run(model, tokens, forwards=FORWARDS, at=lambda offset, caches: None):
    """Run ``model`` in ``forwards``; ``at`` is called where a snapshot is due."""
    caches = make_prompt_cache(model)
    vouch(caches)
    live = Live(model, tokens, caches, rows=[rows_of(cache) for cache in leaves(caches)])
    for start, stop in pairwise((0, *accumulate(forwards))):
        live.answers[start] = forward(model, caches, tokens[start:stop])
        if stop in SNAPSHOTS:
            for rows, cache in zip(live.rows, leaves(caches), strict=True):
                if rows is not None:
                    rows.note(cache)
            at(stop, caches)
    return live
