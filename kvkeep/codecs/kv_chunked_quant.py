"""``kv-chunked-quant``: the newest positions of a chunked attention, quantized (llama4).

Shapes
    Three row tensors for the keys and three for the values, as in ``kv-quant``. Slot *i* holds
    position ``start_position + i``, as in ``kv-chunked``.

Hazards
    Those of both: all chunked layers of a model must agree on ``start_position``, a trim
    behind a cut front leaves too few positions and is refused, and rows that were converted at
    position *b* were computed by reading full precision.

Resume
    Exactly at a snapshot: from the recorded ``start_position``. Elsewhere at every *p* from
    the boundary on whose newest ``chunk_size`` positions are held.

>>> import mlx.core as mx
>>> from kvkeep.caches.chunked_quant import ChunkedQuantizedKVCache
>>> cache = ChunkedQuantizedKVCache(chunk_size=8, bits=4, group_size=32)
>>> _ = cache.update_and_fetch(mx.ones((1, 1, 20, 32)), mx.ones((1, 1, 20, 32)))
>>> cache.maybe_trim_front()
>>> facts = CODEC.describe(cache)
>>> facts.held, facts.floor, facts.boundary
((Segment(position=12, slot=0, length=8),), 20, 0)
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
    boundary_at,
    check_packed,
    check_planes,
    committed,
    entry,
    grown,
    is_a,
    packed_planes,
    packed_sides,
    recorded_boundary,
    row_spec,
    whole,
)

if TYPE_CHECKING:
    import mlx.core as mx


class KVChunkedQuant(Codec):
    """``kvkeep.caches.chunked_quant.ChunkedQuantizedKVCache``."""

    kind = "kv-chunked-quant"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``ChunkedQuantizedKVCache``."""
        return is_a(cache, "kvkeep.caches.chunked_quant", "ChunkedQuantizedKVCache")

    def describe(self, cache: Any) -> Description:
        """Rows ``[start_position, offset)``; the floor is that of the window or the boundary."""
        offset = committed(cache)
        bits, group_size = whole(cache, "packed_bits"), whole(cache, "group_size")
        chunk_size, start = whole(cache, "chunk_size"), whole(cache, "start_position")
        chunk.check(type(cache).__name__, offset, start, chunk_size)
        planes = packed_planes(cache)
        check_planes(cache, tuple(planes.values()), offset - start)
        check_packed(cache, planes, bits, group_size)
        boundary = recorded_boundary(cache, offset, "boundary")
        return Description(
            kind=self.kind,
            version=self.version,
            params={"bits": bits, "group_size": group_size, "chunk_size": chunk_size},
            offset=offset,
            floor=max(boundary, chunk.floor(start, chunk_size)),
            reach=Reach(window=chunk_size),
            boundary=boundary,
            rows=tuple(row_spec(name, plane) for name, plane in planes.items()),
            held=(Segment(start, 0, offset - start),),
        )

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """The six row tensors with their capacity."""
        return packed_planes(cache)

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
        """A ``ChunkedQuantizedKVCache`` at ``p`` that records its boundary.

        Raises ``MalformedCache`` below the boundary.
        """
        recorded = boundary_at(boundary, p)
        names = ("chunk_size", "bits", "group_size")
        cache = _cache_class()(*(entry(params, name) for name in names))
        cache.keys, cache.values = packed_sides(planes)
        cache.offset, cache.boundary = p, recorded
        cache.start_position = chunk.started(entry(params, "chunk_size"), meta, p)
        return cache


def _cache_class() -> Any:
    from kvkeep.caches.chunked_quant import ChunkedQuantizedKVCache

    return ChunkedQuantizedKVCache


CODEC = KVChunkedQuant()
