"""``kv-rotating``: the first ``keep`` positions and the newest ones, in a ring.

Shapes
    ``k`` is ``[1, H, T, Dk]``, ``v`` is ``[1, H, T, Dv]``. ``slots`` is the length T of the
    arrays, ``index`` the slot behind the newest row. Which slot holds which position:

    ============  =====================  =================================================
    layout        sign                   slots
    ============  =====================  =================================================
    nothing lost  ``offset <= slots``    slot *i* holds position *i*, up to ``offset``
    temporal      ``index == slots``     ``keep`` first positions, then the newest in order
    rotated       ``index < slots``      as before, but the newest begin at ``index``, run to
                                         the end and go on behind the first ``keep``
    ============  =====================  =================================================

    A prefill of S tokens leaves up to ``max_size + S - 1`` slots; the next token cuts them to
    ``max_size``.

Hazards
    The order of the slots is part of the bits: attention sums in that order. So the ring comes
    back as it lay.

    A trim is right only while ``offset < max_size``; after that it leaves positions behind whose
    rows are gone. Where that shows, the cache is refused.

    A row that was taken out of a batch may have padding in the slots before its window. Nothing
    reads those again, but as rows of a position they would be wrong. So of more than
    ``max_size`` slots only the newest ``max_size`` count, unless the history is known: the
    attribute ``minimum_resumable_offset`` is set, 0 on a new cache that no batch ever holds,
    or ``keep`` is not 0, which no batch supports.

Resume
    Exactly at a snapshot: as laid out. Elsewhere at every *p* whose first ``keep`` and newest
    ``max_size - keep`` positions are held, in temporal order, as after a prefill up to *p*.
    A rebuilt cache has a known history.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import RotatingKVCache
>>> cache = RotatingKVCache(max_size=8, keep=2)
>>> for _ in range(11):
...     _ = cache.update_and_fetch(mx.ones((1, 1, 1, 4)), mx.ones((1, 1, 1, 4)))
>>> facts = CODEC.describe(cache)
>>> [tuple(segment) for segment in facts.held]
[(0, 0, 2), (5, 5, 3), (8, 2, 3)]
>>> CODEC.state(cache).meta, facts.floor
({'slots': 8, 'index': 5}, 11)
>>> CODEC.needs(facts.params, None, 20)
((0, 2), (14, 20))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvkeep.caches import ring
from kvkeep.codecs.base import (
    RECORD,
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
    recorded_floor,
    row_spec,
    whole,
)
from kvkeep.errors import MalformedCache

if TYPE_CHECKING:
    import mlx.core as mx


class KVRotating(Codec):
    """``mlx_lm.models.cache.RotatingKVCache``."""

    kind = "kv-rotating"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``RotatingKVCache``."""
        return is_a(cache, "mlx_lm.models.cache", "RotatingKVCache")

    def describe(self, cache: Any) -> Description:
        """The positions still held; the floor is the first whose window is whole."""
        offset = committed(cache)
        max_size, keep = whole(cache, "max_size"), whole(cache, "keep")
        if keep >= max_size:
            raise MalformedCache(f"RotatingKVCache keeps {keep} of {max_size} positions")
        check_planes(cache, (cache.keys, cache.values), 0)
        slots, index = cache.keys.shape[2], whole(cache, "_idx")
        held = _layout(offset, slots, index, max_size, keep)
        if _is_doubtful(cache):
            held, slots = (Segment(offset - max_size, slots - max_size, max_size),), max_size
        return Description(
            kind=self.kind,
            version=self.version,
            params={"max_size": max_size, "keep": keep},
            offset=offset,
            floor=ring.floor(offset, slots, max_size),
            reach=Reach(window=max_size, keep=keep),
            rows=(row_spec("k", cache.keys), row_spec("v", cache.values)),
            held=held,
        )

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """``k`` and ``v`` as they lie."""
        return {"k": cache.keys, "v": cache.values}

    def state(self, cache: Any) -> State:
        """The physical length and the write index, of what is held; no tensors."""
        slots, index = cache.keys.shape[2], cache._idx
        if _is_doubtful(cache):
            slots = index = cache.max_size
        return State({"slots": slots, "index": index})

    def place(self, params: Mapping[str, Scalar], meta: Meta | None, p: int) -> Placement:
        """The ring as laid out, or in temporal order without ``meta``.

        Raises ``MalformedCache`` where ``meta`` is not that of a ring at ``p``.
        """
        max_size, keep = entry(params, "max_size"), entry(params, "keep")
        slots, index = ring.laid_out(max_size, meta, p)
        segments = _layout(p, slots, index, max_size, keep)
        return Placement(slots if p >= max_size else min(max_size, grown(p)), segments)

    def build(
        self,
        params: Mapping[str, Scalar],
        meta: Meta | None,
        p: int,
        planes: Mapping[str, mx.array],
        tensors: Mapping[str, mx.array],
        boundary: int | None,
    ) -> Any:
        """A ``RotatingKVCache`` at ``p``."""
        max_size = entry(params, "max_size")
        cache = _cache_class()(max_size, entry(params, "keep"))
        cache.keys, cache.values, cache.offset = planes["k"], planes["v"], p
        slots, cache._idx = ring.laid_out(max_size, meta, p)
        setattr(cache, RECORD, ring.floor(p, slots, max_size))
        return cache


def _is_doubtful(cache: Any) -> bool:
    """Whether slots before the window may hold the padding of a batch."""
    slots = cache.keys.shape[2]
    if slots <= cache.max_size or cache.keep:
        return False
    return recorded_floor(cache, ring.floor(cache.offset, slots, cache.max_size)) is None


def _layout(offset: int, slots: int, index: int, max_size: int, keep: int) -> tuple[Segment, ...]:
    return tuple(Segment(*part) for part in ring.layout(offset, slots, index, max_size, keep))


def _cache_class() -> Any:
    from mlx_lm.models.cache import RotatingKVCache

    return RotatingKVCache


CODEC = KVRotating()
