"""``kv``: keys and values of a plain cache, in the order of their positions.

Shapes
    ``k`` is ``[1, H, T, Dk]``, ``v`` is ``[1, H, T, Dv]``. The widths may differ (latent
    attention), ``Dv`` may be 0 (an indexer keeps keys only), and so may the dtypes.
    Slot *i* holds position *i*.

Hazards
    The arrays grow in steps of 256, and a trim only lowers ``offset``: slots from ``offset`` on
    hold garbage or stale rows. They are never read.

Resume
    At every position up to ``offset``. A rebuilt cache has room up to the next multiple of 256,
    so that the next token is written in place.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import KVCache
>>> cache = KVCache()
>>> _ = cache.update_and_fetch(mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 4)))
>>> facts = CODEC.describe(cache)
>>> facts.offset, facts.floor, facts.bytes_per_token
(5, 0, 96)
>>> facts.held
(Segment(position=0, slot=0, length=5),)
>>> CODEC.needs(facts.params, None, 3), CODEC.place(facts.params, None, 3).capacity
(((0, 3),), 256)
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
    grown,
    is_a,
    row_spec,
)

if TYPE_CHECKING:
    import mlx.core as mx


class KV(Codec):
    """``mlx_lm.models.cache.KVCache``."""

    kind = "kv"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``KVCache``."""
        return is_a(cache, "mlx_lm.models.cache", "KVCache")

    def describe(self, cache: Any) -> Description:
        """Rows ``[0, offset)``, floor 0."""
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
        """``k`` and ``v`` with their capacity."""
        return {"k": cache.keys, "v": cache.values}

    def place(self, params: Mapping[str, Scalar], meta: Meta | None, p: int) -> Placement:
        """Positions ``[0, p)`` in the slots ``[0, p)``."""
        return Placement(grown(p), (Segment(0, 0, p),))

    def build(
        self,
        params: Mapping[str, Scalar],
        meta: Meta | None,
        p: int,
        planes: Mapping[str, mx.array],
        tensors: Mapping[str, mx.array],
        boundary: int | None,
    ) -> Any:
        """A ``KVCache`` at ``p``."""
        cache = _cache_class()()
        cache.keys, cache.values, cache.offset = planes["k"], planes["v"], p
        return cache


def _cache_class() -> Any:
    from mlx_lm.models.cache import KVCache

    return KVCache


CODEC = KV()
