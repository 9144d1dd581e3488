"""``kv-concat``: keys and values whose length is the offset.

Shapes
    ``k`` is ``[1, Hk, T, Dk]``, ``v`` is ``[1, Hv, T, Dv]``. Slot *i* holds position *i*.

Hazards
    The next update appends to the arrays and sets ``offset`` to their new length. A trim only
    lowers ``offset``: the stale rows stay, and the next update would commit them again. Rows
    from ``offset`` on are never read, so a cache that is rebuilt after a trim is right where
    the live one is not.

Resume
    At every position up to ``offset``. The arrays of a rebuilt cache are exactly ``p`` long;
    there is no room to leave, because every update copies the cache anyway.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import ConcatenateKVCache
>>> cache = ConcatenateKVCache()
>>> _ = cache.update_and_fetch(mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 8)))
>>> cache.trim(2)
2
>>> CODEC.describe(cache).held
(Segment(position=0, slot=0, length=3),)
>>> CODEC.place({}, None, 3).capacity
3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvkeep.codecs.base import (
    Codec,
    Description,
    Meta,
    Placement,
    Reach,
    Scalar,
    Segment,
    check_planes,
    committed,
    is_a,
    row_spec,
)

if TYPE_CHECKING:
    import mlx.core as mx


class KVConcat(Codec):
    """``mlx_lm.models.cache.ConcatenateKVCache``."""

    kind = "kv-concat"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``ConcatenateKVCache``."""
        return is_a(cache, "mlx_lm.models.cache", "ConcatenateKVCache")

    def describe(self, cache: Any) -> Description:
        """Rows ``[0, offset)``, also after a trim; floor 0."""
        offset = committed(cache)
        check_planes(cache, (cache.keys, cache.values), offset)
        return Description(
            kind=self.kind,
            version=self.version,
            params={},
            offset=offset,
            floor=0,
            reach=Reach(),
            rows=(row_spec("k", cache.keys), row_spec("v", cache.values)),
            held=(Segment(0, 0, offset),),
        )

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """``k`` and ``v``, with stale rows after a trim."""
        return {"k": cache.keys, "v": cache.values}

    def place(self, params: Mapping[str, Scalar], meta: Meta | None, p: int) -> Placement:
        """Positions ``[0, p)`` and not one slot more."""
        return Placement(p, (Segment(0, 0, p),))

    def build(
        self,
        params: Mapping[str, Scalar],
        meta: Meta | None,
        p: int,
        planes: Mapping[str, mx.array],
        tensors: Mapping[str, mx.array],
        boundary: int | None,
    ) -> Any:
        """A ``ConcatenateKVCache`` at ``p``."""
        cache = _cache_class()()
        cache.keys, cache.values, cache.offset = planes["k"], planes["v"], p
        return cache


def _cache_class() -> Any:
    from mlx_lm.models.cache import ConcatenateKVCache

    return ConcatenateKVCache


CODEC = KVConcat()
