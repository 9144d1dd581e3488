"""``kv-quant``: quantized keys and values.

Shapes
    Three row tensors for the keys and three for the values: ``*.packed`` is ``uint32
    [1, H, T, D * bits / 32]``, ``*.scales`` and ``*.biases`` are ``[1, H, T, D / group_size]``
    in the dtype of the source. Groups run along D, so a slice over positions is byte-safe.

    A cache whose planes are read densely (``kvkeep.caches.quantized``) has the parameter ``read``:
    attention sums otherwise, so what it wrote later are other rows.

Hazards
    Rows are never quantized again. A cache that was converted from full precision at position
    *b* holds rows that were computed by reading full precision; a run that converts elsewhere
    writes other rows. *b* is the precision boundary, and mlx-lm does not keep it. Whoever
    converts records it in the attribute ``minimum_resumable_offset``: 0 for a cache that was
    quantized from its first token. A record that is missing, no integer, or beyond ``offset``
    is unknown history, which fails closed: the boundary is ``offset`` itself.

Resume
    At every position from the boundary to ``offset``. A rebuilt cache carries the boundary on.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import QuantizedKVCache
>>> cache = QuantizedKVCache(group_size=32, bits=4)
>>> _ = cache.update_and_fetch(mx.ones((1, 2, 5, 32)), mx.ones((1, 2, 5, 32)))
>>> CODEC.describe(cache).floor
5
>>> cache.minimum_resumable_offset = 0
>>> facts = CODEC.describe(cache)
>>> facts.floor, facts.boundary, facts.params
(0, 0, {'bits': 4, 'group_size': 32})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvkeep.codecs.base import (
    RECORD,
    Codec,
    Description,
    Meta,
    Placement,
    Reach,
    Scalar,
    Segment,
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

DENSE = "dense"
"""The parameter ``read`` of rows that attention reads in full precision."""


class KVQuant(Codec):
    """``mlx_lm.models.cache.QuantizedKVCache``, and ours that is read densely."""

    kind = "kv-quant"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``QuantizedKVCache``, or one of ours with a dense read."""
        return _is_plain(cache) or is_a(cache, "kvkeep.caches.quantized", "DenseQuantizedKVCache")

    def describe(self, cache: Any) -> Description:
        """Rows ``[0, offset)``; the floor is the boundary."""
        offset = committed(cache)
        dense = not _is_plain(cache)
        bits = whole(cache, "packed_bits" if dense else "bits")
        group_size = whole(cache, "group_size")
        planes = packed_planes(cache)
        check_planes(cache, tuple(planes.values()), offset)
        check_packed(cache, planes, bits, group_size)
        boundary = recorded_boundary(cache, offset)
        return Description(
            kind=self.kind,
            version=self.version,
            params={
                "bits": bits,
                "group_size": group_size,
                **({"read": DENSE} if dense else {}),
            },
            offset=offset,
            floor=boundary,
            reach=Reach(),
            boundary=boundary,
            rows=tuple(row_spec(name, plane) for name, plane in planes.items()),
            held=(Segment(0, 0, offset),),
        )

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """The six row tensors with their capacity."""
        return packed_planes(cache)

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
        """The cache at ``p``, which records its boundary.

        Raises ``MalformedCache`` below the boundary.
        """
        recorded = boundary_at(boundary, p)
        bits, group_size = entry(params, "bits"), entry(params, "group_size")
        if params.get("read") == DENSE:
            cache = _dense_class()(bits, group_size)
        else:
            cache = _cache_class()(group_size, bits)
        cache.keys, cache.values = packed_sides(planes)
        cache.offset = p
        setattr(cache, RECORD, recorded)
        return cache


def _is_plain(cache: object) -> bool:
    return is_a(cache, "mlx_lm.models.cache", "QuantizedKVCache")


def _dense_class() -> Any:
    from kvkeep.caches.quantized import DenseQuantizedKVCache

    return DenseQuantizedKVCache


def _cache_class() -> Any:
    from mlx_lm.models.cache import QuantizedKVCache

    return QuantizedKVCache


CODEC = KVQuant()
