"""``kv-chunked``: the newest positions, from ``start_position`` on (llama4).

Shapes
    ``k`` is ``[1, H, T, Dk]``, ``v`` is ``[1, H, T, Dv]``. Slot *i* holds position
    ``start_position + i``.

Hazards
    Before every forward the model cuts the front down to the newest ``chunk_size`` positions
    and numbers the keys from ``start_position`` of its first layer, so all chunked layers must
    agree on it. A trim lowers ``offset`` only: once the front was cut, fewer than
    ``chunk_size`` positions may remain, and the next query misses keys. That is refused.

Resume
    Exactly at a snapshot: from the recorded ``start_position``. Elsewhere at every *p* whose
    newest ``chunk_size`` positions are held; that is what the model's own cut leaves at *p*.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import ChunkedKVCache
>>> cache = ChunkedKVCache(chunk_size=8)
>>> _ = cache.update_and_fetch(mx.ones((1, 1, 20, 4)), mx.ones((1, 1, 20, 4)))
>>> cache.maybe_trim_front()
>>> _ = cache.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
>>> facts = CODEC.describe(cache)
>>> facts.held, facts.floor
((Segment(position=12, slot=0, length=11),), 20)
>>> CODEC.needs(facts.params, None, 21)
((13, 21),)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvkeep.caches import chunk
from kvkeep.codecs.base import (
    Codec,
    Description,
    Meta,
    Placement,
    Reach,
    Scalar,
    Segment,
    State,
    check_planes,
    committed,
    entry,
    grown,
    is_a,
    row_spec,
    whole,
)

if TYPE_CHECKING:
    import mlx.core as mx


class KVChunked(Codec):
    """``mlx_lm.models.cache.ChunkedKVCache``."""

    kind = "kv-chunked"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``ChunkedKVCache``."""
        return is_a(cache, "mlx_lm.models.cache", "ChunkedKVCache")

    def describe(self, cache: Any) -> Description:
        """Rows ``[start_position, offset)``; the floor is the first whose window is whole."""
        offset = committed(cache)
        chunk_size, start = whole(cache, "chunk_size"), whole(cache, "start_position")
        chunk.check("ChunkedKVCache", offset, start, chunk_size)
        check_planes(cache, (cache.keys, cache.values), offset - start)
        return Description(
            kind=self.kind,
            version=self.version,
            params={"chunk_size": chunk_size},
            offset=offset,
            floor=chunk.floor(start, chunk_size),
            reach=Reach(window=chunk_size),
            rows=(row_spec("k", cache.keys), row_spec("v", cache.values)),
            held=(Segment(start, 0, offset - start),),
        )

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """``k`` and ``v`` with their capacity."""
        return {"k": cache.keys, "v": cache.values}

    def state(self, cache: Any) -> State:
        """The first position held; no tensors."""
        return State({"start_position": cache.start_position})

    def place(self, params: Mapping[str, Scalar], meta: Meta | None, p: int) -> Placement:
        """Positions from the recorded start, or the newest ``chunk_size`` without ``meta``.

        Raises ``MalformedCache`` where ``meta`` starts behind ``p``.
        """
        start = chunk.started(entry(params, "chunk_size"), meta, p)
        return Placement(grown(p - start), (Segment(start, 0, p - start),))

    def build(
        self,
        params: Mapping[str, Scalar],
        meta: Meta | None,
        p: int,
        planes: Mapping[str, mx.array],
        tensors: Mapping[str, mx.array],
        boundary: int | None,
    ) -> Any:
        """A ``ChunkedKVCache`` at ``p``."""
        cache = _cache_class()(entry(params, "chunk_size"))
        cache.keys, cache.values, cache.offset = planes["k"], planes["v"], p
        cache.start_position = chunk.started(entry(params, "chunk_size"), meta, p)
        return cache


def _cache_class() -> Any:
    from mlx_lm.models.cache import ChunkedKVCache

    return ChunkedKVCache


CODEC = KVChunked()
