"""``kv-rotating-quant``: a sliding window of quantized keys and values.

Shapes
    Three row tensors for the keys and three for the values, as in ``kv-quant``: ``*.packed``
    is ``uint32 [1, H, T, D * bits / 32]``, ``*.scales`` and ``*.biases`` are
    ``[1, H, T, D / group_size]``. Slots hold positions as in ``kv-rotating``.

Hazards
    Those of both: the order of the slots is part of the bits, a trim is right only while
    ``offset < max_size``, and rows are never quantized again. A ring that was converted at
    position *b* holds rows that were computed by reading full precision.

Resume
    Exactly at a snapshot: as laid out. Elsewhere at every *p* from the boundary on whose first
    ``keep`` and newest ``max_size - keep`` positions are held, in temporal order.

>>> import mlx.core as mx
>>> from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache
>>> cache = RotatingQuantizedKVCache(max_size=8, keep=2, bits=4, group_size=32)
>>> for _ in range(11):
...     _ = cache.update_and_fetch(mx.ones((1, 1, 1, 32)), mx.ones((1, 1, 1, 32)))
>>> facts = CODEC.describe(cache)
>>> [tuple(segment) for segment in facts.held], facts.floor, facts.boundary
([(0, 0, 2), (5, 5, 3), (8, 2, 3)], 11, 0)
>>> dict(facts.params)
{'bits': 4, 'group_size': 32, 'max_size': 8, 'keep': 2}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvkeep.caches import ring
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
from kvkeep.errors import MalformedCache

if TYPE_CHECKING:
    import mlx.core as mx


class KVRotatingQuant(Codec):
    """``kvkeep.caches.rotating_quant.RotatingQuantizedKVCache``."""

    kind = "kv-rotating-quant"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``RotatingQuantizedKVCache``."""
        return is_a(cache, "kvkeep.caches.rotating_quant", "RotatingQuantizedKVCache")

    def describe(self, cache: Any) -> Description:
        """The positions still held; the floor is that of the ring, or the boundary above it."""
        offset = committed(cache)
        bits, group_size = whole(cache, "packed_bits"), whole(cache, "group_size")
        max_size, keep = whole(cache, "max_size"), whole(cache, "keep")
        if keep >= max_size:
            raise MalformedCache(f"{type(cache).__name__} keeps {keep} of {max_size} positions")
        planes = packed_planes(cache)
        check_planes(cache, tuple(planes.values()), 0)
        check_packed(cache, planes, bits, group_size)
        slots = cache.keys[0].shape[2]
        held = ring.layout(offset, slots, whole(cache, "_idx"), max_size, keep)
        boundary = recorded_boundary(cache, offset, "boundary")
        return Description(
            kind=self.kind,
            version=self.version,
            params={
                "bits": bits,
                "group_size": group_size,
                "max_size": max_size,
                "keep": keep,
            },
            offset=offset,
            floor=max(boundary, ring.floor(offset, slots, max_size)),
            reach=Reach(window=max_size, keep=keep),
            boundary=boundary,
            rows=tuple(row_spec(name, plane) for name, plane in planes.items()),
            held=tuple(Segment(*part) for part in held),
        )

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """The six row tensors as they lie."""
        return packed_planes(cache)

    def state(self, cache: Any) -> State:
        """The physical length and the write index; no tensors."""
        return State({"slots": cache.keys[0].shape[2], "index": cache._idx})

    def place(self, params: Mapping[str, Scalar], meta: Meta | None, p: int) -> Placement:
        """The ring as laid out, or in temporal order without ``meta``.

        Raises ``MalformedCache`` where ``meta`` is not that of a ring at ``p``.
        """
        max_size, keep = entry(params, "max_size"), entry(params, "keep")
        slots, index = ring.laid_out(max_size, meta, p)
        parts = ring.layout(p, slots, index, max_size, keep)
        return Placement(
            slots if p >= max_size else min(max_size, grown(p)),
            tuple(Segment(*part) for part in parts),
        )

    def build(
        self,
        params: Mapping[str, Scalar],
        meta: Meta | None,
        p: int,
        planes: Mapping[str, mx.array],
        tensors: Mapping[str, mx.array],
        boundary: int | None,
    ) -> Any:
        """A ``RotatingQuantizedKVCache`` at ``p`` that records its boundary.

        Raises ``MalformedCache`` below the boundary.
        """
        recorded = boundary_at(boundary, p)
        names = ("max_size", "keep", "bits", "group_size")
        cache = _cache_class()(*(entry(params, name) for name in names))
        cache.keys, cache.values = packed_sides(planes)
        cache.offset, cache.boundary = p, recorded
        _, cache._idx = ring.laid_out(cache.max_size, meta, p)
        return cache


def _cache_class() -> Any:
    from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache

    return RotatingQuantizedKVCache


CODEC = KVRotatingQuant()
