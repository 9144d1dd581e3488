"""``kv-quant``: quantized keys and values.

Shapes
    Three row tensors for the keys and three for the values: ``*.packed`` is ``uint32
    [1, H, T, D * bits / 32]``, ``*.scales`` and ``*.biases`` are ``[1, H, T, D / group_size]``
    in the dtype of the source. Groups run along D, so a slice over positions is byte-safe.

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
    check_planes,
    committed,
    dtype_name,
    entry,
    grown,
    recorded_floor,
    row_spec,
    whole,
)
from kvkeep.errors import MalformedCache

if TYPE_CHECKING:
    import mlx.core as mx

_PARTS = ("packed", "scales", "biases")


class KVQuant(Codec):
    """``mlx_lm.models.cache.QuantizedKVCache``."""

    kind = "kv-quant"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``QuantizedKVCache``."""
        return type(cache) is _cache_class()

    def describe(self, cache: Any) -> Description:
        """Rows ``[0, offset)``; the floor is the boundary."""
        offset = committed(cache)
        bits, group_size = whole(cache, "bits"), whole(cache, "group_size")
        for side, parts in (("keys", cache.keys), ("values", cache.values)):
            if not isinstance(parts, tuple | list) or len(parts) != len(_PARTS):
                raise MalformedCache(f"QuantizedKVCache.{side} is not {', '.join(_PARTS)}")
        planes = self.planes(cache)
        check_planes(cache, tuple(planes.values()), offset)
        for side in ("k", "v"):
            dtypes = [dtype_name(planes[f"{side}.{part}"]) for part in _PARTS]
            if dtypes[0] != "uint32" or dtypes[1] != dtypes[2]:
                raise MalformedCache(
                    f"QuantizedKVCache holds {dtypes[0]} words, {dtypes[1]} scales and "
                    f"{dtypes[2]} biases; words are uint32, and the others alike"
                )
            packed, scales, biases = (planes[f"{side}.{part}"].shape[3] for part in _PARTS)
            if scales != biases or packed * 32 != scales * group_size * bits:
                raise MalformedCache(
                    f"QuantizedKVCache holds {packed} packed words, {scales} scales and {biases} "
                    f"biases per row, which is not {bits} bits in groups of {group_size}"
                )
        recorded = recorded_floor(cache, offset)
        boundary = offset if recorded is None else recorded
        return Description(
            kind=self.kind,
            version=self.version,
            params={"bits": bits, "group_size": group_size},
            offset=offset,
            floor=boundary,
            reach=Reach(),
            boundary=boundary,
            rows=tuple(row_spec(name, plane) for name, plane in planes.items()),
            held=(Segment(0, 0, offset),),
        )

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """The six row tensors with their capacity."""
        return {
            f"{side}.{part}": plane
            for side, parts in (("k", cache.keys), ("v", cache.values))
            for part, plane in zip(_PARTS, parts, strict=True)
        }

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
        """A ``QuantizedKVCache`` at ``p`` that records its boundary.

        Raises ``MalformedCache`` below the boundary.
        """
        if boundary is not None and boundary > p:
            raise MalformedCache(f"Rows converted at {boundary} cannot resume at {p}")
        cache = _cache_class()(entry(params, "group_size"), entry(params, "bits"))
        cache.keys = tuple(planes[f"k.{part}"] for part in _PARTS)
        cache.values = tuple(planes[f"v.{part}"] for part in _PARTS)
        cache.offset = p
        setattr(cache, RECORD, p if boundary is None else boundary)
        return cache


def _cache_class() -> Any:
    from mlx_lm.models.cache import QuantizedKVCache

    return QuantizedKVCache


CODEC = KVQuant()
