"""Decode steps that ``mx.compile`` traces once, because they take their positions as data.

A traced function sees every Python number as a constant: with the offset as an ``int`` each
token would be a trace of its own. Here the rotary offset of every row is an ``int32`` array, the
new keys and values are written at a position that is an array as well, and attention reads the
whole buffer under a mask, so that one trace serves until the buffer grows.

Ordinary caches leave their positions unset; inside a trace mlx-lm's model is given caches whose
``offset`` is that array, and needs no change.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import BatchKVCache, KVCache
>>> plain = KVCache()
>>> _ = plain.update_and_fetch(mx.zeros((1, 2, 5, 4)), mx.zeros((1, 2, 5, 4)))
>>> positions_of(plain)
array([5], dtype=int32)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvkeep.errors import BadScheme, EmptyCache

STEP = 256
"""Positions by which a full buffer grows; each growth is one more trace."""

ROUNDING = 8
"""Units in the last place of the largest logit that count as rounding in the first step."""
LEAST_ROUNDING = 1e-3


class Traced:
    """Keys and values inside a traced step: one position per row, written where an array says.

    ``keys`` and ``values`` are ``[B, H, capacity, D]``; ``positions`` ``int32 [B]`` is the
    rotary offset of each row, ``slot`` ``int32 [1]`` where all rows write, and ``first``
    ``int32 [B]`` the first slot of each row that is no padding. As in mlx-lm's own caches,
    ``offset`` counts the new position once it is written; what needs the old value after
    the write must take it before.
    """

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        slot: mx.array,
        first: mx.array,
    ) -> None:
        self.keys = keys
        self.values = values
        self.positions = positions
        self._slot = slot
        self._first = first

    @property
    def offset(self) -> mx.array:
        """``positions``, under the name that mlx-lm's models ask for."""
        return self.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write ``[B, H, 1, D]``; the whole buffers come back, to be read under the mask."""
        self.keys = mx.slice_update(self.keys, keys, self._slot, [2])
        self.values = mx.slice_update(self.values, values, self._slot, [2])
        self.positions = self.positions + 1
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The whole buffers, for layers that borrow them under the same mask."""
        return self.keys, self.values

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """``bool [B, 1, 1, capacity]``: what the new position of each row may see."""
        slots = mx.arange(self.keys.shape[2])[None]
        seen = (slots <= self._slot) & (slots >= self._first[:, None])
        if window_size is not None:
            seen = seen & (slots > self._slot - window_size)
        return seen[:, None, None]


class CompiledDecode:
    """One-token decode steps of ``model`` over ``caches``, traced once per buffer size.

    ``caches`` are those of mlx-lm, all ``KVCache`` or all ``BatchKVCache``, after a prefill. They
    stay what they are: after each step they hold the new position, and may be trimmed, stored
    or used without compilation. The weights are those of the first step.

    Some models tell a position by the number of keys that come back, and here that is the
    whole buffer; others read values in their step. The first step is therefore computed
    plainly as well, and a model whose logits differ by more than rounding is refused.

    Raises ``BadScheme``, naming the layer, for a cache of another class.
    """

    def __init__(self, model: Any, caches: Sequence[Any]) -> None:
        for layer, cache in enumerate(caches):
            if not _is(cache, "KVCache") and not _is(cache, "BatchKVCache"):
                raise BadScheme(
                    f"Layer {layer}: {type(cache).__name__} cannot be decoded by a compiled "
                    "step; KVCache and BatchKVCache can"
                )
        self.traces = 0
        self._caches = caches
        self._model = model
        self._step = mx.compile(self._run)
        self._checked = False

    def __call__(self, tokens: mx.array) -> mx.array:
        """The logits ``[B, 1, vocabulary]`` after ``tokens`` ``[B, 1]``; evaluated the first time.

        Raises ``EmptyCache`` before a prefill, and ``BadScheme`` at the first step for a model
        that cannot be decoded so; the caches stand where they stood then.
        """
        for layer, cache in enumerate(self._caches):
            if cache.keys is None:
                raise EmptyCache(f"Layer {layer}: {type(cache).__name__} covers no token")
            _make_room(cache)
        expected = None if self._checked else self._model(tokens, cache=_twins(self._caches))
        # Taken before the step: it moves the caches on.
        facts = [
            (
                cache.keys,
                cache.values,
                positions_of(cache),
                mx.array([_slot(cache)], dtype=mx.int32),
                _first(cache),
            )
            for cache in self._caches
        ]
        try:
            # A trace is made for a dtype too: sampled tokens are uint32, listed ones int32.
            logits, written = self._step(tokens.astype(mx.int32), facts)
            if expected is not None:
                self._check(logits, expected)
        except ValueError as error:
            if isinstance(error, BadScheme) or "transformations" not in str(error):
                raise
            # MLX's words for a value that is read while there is none yet.
            raise self._refusal("reads values in its step") from error
        for cache, (keys, values) in zip(self._caches, written, strict=True):
            cache.keys, cache.values = keys, values
            cache.offset = cache.offset + 1
            if _is(cache, "BatchKVCache"):
                cache._idx += 1
        result: mx.array = logits
        return result

    def _run(self, tokens: mx.array, facts: Sequence[tuple[mx.array, ...]]) -> Any:
        self.traces += 1
        traced = [Traced(*each) for each in facts]
        logits = self._model(tokens, cache=traced)
        return logits, [(cache.keys, cache.values) for cache in traced]

    def _check(self, found: mx.array, expected: mx.array) -> None:
        finite = mx.isfinite(expected)
        alike = mx.array_equal(finite, mx.isfinite(found))
        worst = mx.where(finite, mx.abs(found - expected), 0).max()
        largest = mx.where(finite, mx.abs(expected), 0).max()
        rounding = max(ROUNDING * mx.finfo(expected.dtype).eps, LEAST_ROUNDING)
        if not (alike & (worst <= rounding * largest)).item():
            raise self._refusal("gives other logits over a whole buffer")
        self._checked = True

    def _refusal(self, why: str) -> BadScheme:
        return BadScheme(
            f"{type(self._model).__module__} {why}; it cannot be decoded by a compiled step",
            remedy="Decode this model without compilation.",
        )


def positions_of(cache: Any) -> mx.array:
    """The position that the next token of each row takes, ``int32 [B]``."""
    offset = cache.offset
    if isinstance(offset, int):
        return mx.array([offset] * cache.keys.shape[0], dtype=mx.int32)
    return mx.array(offset).astype(mx.int32)


def _twins(caches: Sequence[Any]) -> list[Any]:
    """Caches with the same rows, behind arrays of their own: a step leaves ``caches`` alone."""
    twins = []
    for cache in caches:
        state = (x[...] if isinstance(x, mx.array) else x for x in cache.state)
        twins.append(type(cache).from_state(tuple(state)))
    return twins


def _slot(cache: Any) -> int:
    return int(cache._idx) if _is(cache, "BatchKVCache") else int(cache.offset)


def _first(cache: Any) -> mx.array:
    if _is(cache, "BatchKVCache"):
        return mx.array(cache.left_padding).astype(mx.int32)
    return mx.zeros((cache.keys.shape[0],), dtype=mx.int32)


def _make_room(cache: Any) -> None:
    if _slot(cache) < cache.keys.shape[2]:
        return
    for name in ("keys", "values"):
        held = getattr(cache, name)
        more = mx.zeros((*held.shape[:2], STEP, held.shape[3]), held.dtype)
        setattr(cache, name, mx.concatenate([held, more], axis=2))


def _is(cache: object, name: str) -> bool:
    from mlx_lm.models import cache as module

    return type(cache) is getattr(module, name)
