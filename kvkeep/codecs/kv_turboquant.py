"""``kv-turboquant``: keys of few bits, and rotated values of fewer.

Shapes
    ``k.indices`` is ``uint32 [1, H, T, Dk * k_bits / 32]``, a flat little-endian bit stream;
    ``k.scales`` and ``k.zeros`` are ``float16 [1, H, T, Dk / 32]``. ``v.packed`` is ``uint32
    [1, H, T, Dv * v_bits / 32]``, ``v.scales`` is ``float16 [1, H, T, Dv / 32]``. Groups run
    along D, so a slice over positions is byte-safe.

Hazards
    Rows are never encoded again. They are encoded from the first token on, so the precision
    boundary is 0, and the cache says so in its attribute ``minimum_resumable_offset``. A record
    that is no integer in ``[0, offset]`` is unknown history: the boundary is ``offset`` itself.

    The dtype that rows are decoded to and a deferred rotation are no bytes of a row, but other
    numbers of the next token: they are parameters.

Resume
    At every position from the boundary to ``offset``.

>>> import mlx.core as mx
>>> from kvkeep.caches.turboquant import TurboQuantKVCache
>>> cache = TurboQuantKVCache(k_bits=8, v_bits=3)
>>> _ = cache.update_and_fetch(mx.ones((1, 2, 5, 128)), mx.ones((1, 2, 5, 128)))
>>> facts = CODEC.describe(cache)
>>> facts.offset, facts.floor, facts.bytes_per_token
(5, 0, 400)
>>> facts.params["k_bits"], facts.params["v_bits"], facts.params["k_dtype"]
(8, 3, 'float32')
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
    is_a,
    recorded_boundary,
    row_spec,
    whole,
)
from kvkeep.errors import MalformedCache

if TYPE_CHECKING:
    import mlx.core as mx

_GROUP = 32
_PARTS = {"keys": ("indices", "scales", "zeros"), "values": ("packed", "scales")}
_DTYPES = ("bfloat16", "float16", "float32")


class KVTurboQuant(Codec):
    """``kvkeep.caches.turboquant.TurboQuantKVCache``."""

    kind = "kv-turboquant"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``TurboQuantKVCache``."""
        return is_a(cache, "kvkeep.caches.turboquant", "TurboQuantKVCache")

    def describe(self, cache: Any) -> Description:
        """Rows ``[0, offset)``; the floor is the boundary."""
        offset = committed(cache)
        params: dict[str, Scalar] = {"deferred_rotation": cache.deferred_rotation is True}
        for side, parts in _PARTS.items():
            params.update(_side(cache, side, parts))
        planes = self.planes(cache)
        check_planes(cache, tuple(planes.values()), offset)
        _check_rows(planes, params)
        boundary = recorded_boundary(cache, offset)
        return Description(
            kind=self.kind,
            version=self.version,
            params=params,
            offset=offset,
            floor=boundary,
            reach=Reach(),
            boundary=boundary,
            rows=tuple(row_spec(name, plane) for name, plane in planes.items()),
            held=(Segment(0, 0, offset),),
        )

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """The five row tensors with their capacity."""
        return {
            f"{side[0]}.{part}": plane
            for side, parts in _PARTS.items()
            for part, plane in zip(parts, getattr(cache, side), strict=True)
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
        """A ``TurboQuantKVCache`` at ``p`` that records its boundary.

        Raises ``MalformedCache`` below the boundary, and for a dtype that no row has.
        """
        import mlx.core as mx

        if boundary is not None and boundary > p:
            raise MalformedCache(f"Rows encoded from {boundary} on cannot resume at {p}")
        cache = _cache_class()(
            entry(params, "k_bits"),
            entry(params, "v_bits"),
            deferred_rotation=params.get("deferred_rotation") is True,
        )
        for side, parts in _PARTS.items():
            setattr(cache, side, tuple(planes[f"{side[0]}.{part}"] for part in parts))
            name = f"{side[0]}_dtype"
            if params.get(name) not in _DTYPES:
                raise MalformedCache(f"{name} is {params.get(name)!r}, not one of {_DTYPES}")
            setattr(cache, name, getattr(mx, str(params[name])))
        cache.offset = p
        setattr(cache, RECORD, p if boundary is None else boundary)
        return cache


def _side(cache: Any, side: str, parts: tuple[str, ...]) -> dict[str, Scalar]:
    """The parameters of the keys or of the values."""
    held = getattr(cache, side)
    if not isinstance(held, tuple | list) or len(held) != len(parts):
        raise MalformedCache(f"TurboQuantKVCache.{side} is not {', '.join(parts)}")
    dtype = getattr(cache, f"{side[0]}_dtype")
    name = str(dtype).rpartition(".")[2]
    if name not in _DTYPES:
        raise MalformedCache(f"TurboQuantKVCache.{side[0]}_dtype is {dtype}, not of {_DTYPES}")
    groups = held[1].shape[-1] if getattr(held[1], "ndim", 0) else 0
    return {
        f"{side[0]}_bits": whole(cache, f"{side[0]}_bits"),
        f"{side[0]}_head_size": groups * _GROUP,
        f"{side[0]}_dtype": name,
    }


def _check_rows(planes: Mapping[str, mx.array], params: Mapping[str, Scalar]) -> None:
    """Refuse planes whose widths or dtypes are not those of the parameters."""
    for name, plane in planes.items():
        side, _, part = name.partition(".")
        bits, size = entry(params, f"{side}_bits"), entry(params, f"{side}_head_size")
        packed = part in ("indices", "packed")
        wanted = (size * bits // 32, "uint32") if packed else (size // _GROUP, "float16")
        found = (plane.shape[3], dtype_name(plane))
        if found != wanted:
            raise MalformedCache(
                f"TurboQuantKVCache holds {name} of {found[0]} {found[1]} per row, where a head "
                f"of {size} at {bits} bits has {wanted[0]} {wanted[1]}"
            )


def _cache_class() -> Any:
    from kvkeep.caches.turboquant import TurboQuantKVCache

    return TurboQuantKVCache


CODEC = KVTurboQuant()
