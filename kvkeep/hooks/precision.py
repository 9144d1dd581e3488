"""Precision tracking: mlx-lm converts caches in place and forgets where; here it is noted.

``kv_bits`` and ``quantized_kv_start`` make mlx-lm replace a cache by a quantized one after the
chunk that reaches the start. The rows before that chunk's end were read in full precision, and
a shorter run would have converted elsewhere: below the offset of the conversion nothing can be
resumed. Caches that are tracked write that offset on what they are converted to.

>>> from mlx_lm.models.cache import KVCache
>>> import mlx.core as mx
>>> caches = track([KVCache()])
>>> _ = caches[0].update_and_fetch(mx.ones((1, 1, 7, 32)), mx.ones((1, 1, 7, 32)))
>>> caches[0].to_quantized(group_size=32, bits=4).minimum_resumable_offset
7
"""

from __future__ import annotations

from typing import Any

from kvkeep.codecs.base import RECORD
from kvkeep.hooks.prefill import vouch


def track(caches: list[Any]) -> list[Any]:
    """``caches``, which will record the offset of any conversion that mlx-lm makes.

    Call it before the first forward, or on caches that were just resumed. Caches that are
    still empty are vouched for as well.
    """
    vouch(caches)
    for cache in caches:
        if hasattr(cache, "to_quantized"):
            cache.to_quantized = _Recorder(cache)
    return caches


class _Recorder:
    """Stands in for one cache's ``to_quantized``; a copy of the cache gets a copy of it."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __call__(self, group_size: int = 64, bits: int = 4) -> Any:
        cache = self._cache
        converted = type(cache).to_quantized(cache, group_size=group_size, bits=bits)
        setattr(converted, RECORD, cache.offset)
        return converted
