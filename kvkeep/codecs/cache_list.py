"""``list``: a holder of other caches, of any kinds.

A model may give one layer several caches: recurrent state beside keys and values, or two
plain caches for two attentions. The holder has nothing of its own; its kind is spelled with
the inner kinds, ``list(arrays,kv)``, and lists may hold lists.

Hazards
    mlx-lm keeps the inner caches in a tuple or, after a load, in a list; both are read, and a
    tuple is built. Its ``trim`` returns the count of the last child only. An empty list has no
    offset and no kind, and is refused.

Resume
    Where all inner caches can.

>>> from mlx_lm.models.cache import ArraysCache, CacheList, KVCache
>>> inner = CODEC.children(CacheList(ArraysCache(size=2), KVCache()))
>>> [type(cache).__name__ for cache in inner]
['ArraysCache', 'KVCache']
>>> CODEC.assemble(inner, {})[1] is inner[1]
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.codecs.base import Composite, Scalar, is_a
from kvkeep.errors import MalformedCache


class CacheLists(Composite):
    """``mlx_lm.models.cache.CacheList``."""

    kind = "list"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``CacheList``."""
        return is_a(cache, "mlx_lm.models.cache", "CacheList")

    def children(self, cache: Any) -> tuple[Any, ...]:
        """The inner caches, in order. Raises ``MalformedCache`` where there are none."""
        if not isinstance(cache.caches, tuple | list) or not cache.caches:
            raise MalformedCache("CacheList holds no caches")
        return tuple(cache.caches)

    def assemble(self, children: Sequence[Any], params: Mapping[str, Scalar]) -> Any:
        """A ``CacheList`` of ``children``. Raises ``MalformedCache`` where there are none."""
        if not children:
            raise MalformedCache("A CacheList needs at least one cache")
        return _cache_class()(*children)


def _cache_class() -> Any:
    from mlx_lm.models.cache import CacheList

    return CacheList


CODEC = CacheLists()
