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

import weakref
from collections.abc import Sequence
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


def newest(caches: Sequence[Any]) -> list[Any]:
    """``caches``, each that was tracked and converted replaced by what it became.

    With a draft model mlx-lm converts in lists of its own, and leaves the caller's list with
    the caches as they were before.
    """
    return [_newest(cache) for cache in caches]


def _newest(cache: Any) -> Any:
    recorder = getattr(cache, "to_quantized", None)
    if isinstance(recorder, _Recorder) and recorder.converted is not None:
        return recorder.converted
    return cache


class _Recorder:
    """Stands in for one cache's ``to_quantized``; a deep copy of the cache gets its own.

    Holds the cache weakly: in a cycle its buffers would outlive it until the next collection.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = weakref.ref(cache)
        self.converted: Any = None

    def __call__(self, group_size: int = 64, bits: int = 4) -> Any:
        cache = self._cache()
        if cache is None:
            raise ReferenceError("The tracked cache is gone; track its copy as well")
        converted = type(cache).to_quantized(cache, group_size=group_size, bits=bits)
        setattr(converted, RECORD, cache.offset)
        self.converted = converted
        return converted

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        return _Recorder(memo[id(self._cache())])
