"""``arrays``: recurrent state (Mamba, gated delta, RWKV, short convolutions).

Shapes
    ``slots`` arrays of any shape and dtype, the first axis being the request: 1. A slot may be
    ``None``. There are no rows: the state sums up the whole prefix.

Hazards
    The cache holds no offset; whoever stores it takes that of the sibling layers, or the token
    count. ``left_padding`` and ``lengths`` belong to batches and are refused. Slot 0 may be
    ``None`` while others are set, so mlx-lm's own ``empty()`` is not asked.

Resume
    Exactly at a snapshot, nowhere else. It cannot be trimmed.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import ArraysCache
>>> cache = ArraysCache(size=2)
>>> cache[1] = mx.ones((1, 3, 4))
>>> facts = CODEC.describe(cache)
>>> facts.offset, facts.params, facts.bytes_per_token
(None, {'slots': 2}, 0)
>>> state = CODEC.state(cache)
>>> state.meta, sorted(state.tensors)
({'none': [0]}, ['1'])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvkeep.codecs.base import (
    Codec,
    Description,
    Meta,
    Placement,
    Reach,
    Scalar,
    State,
    entry,
    is_a,
)
from kvkeep.errors import BatchCache, EmptyCache, MalformedCache

if TYPE_CHECKING:
    import mlx.core as mx


class Arrays(Codec):
    """``mlx_lm.models.cache.ArraysCache``."""

    kind = "arrays"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is an ``ArraysCache``."""
        return is_a(cache, "mlx_lm.models.cache", "ArraysCache")

    def describe(self, cache: Any) -> Description:
        """No offset, no floor and no rows."""
        if cache.left_padding is not None or cache.lengths is not None:
            raise BatchCache("ArraysCache holds the padding or the lengths of a batch")
        if all(slot is None for slot in cache.cache):
            raise EmptyCache("ArraysCache holds no state")
        for number, slot in enumerate(cache.cache):
            if slot is None:
                continue
            if not getattr(slot, "ndim", 0):
                raise MalformedCache(f"Slot {number} of ArraysCache is no array with axes")
            if slot.shape[0] != 1:
                raise BatchCache(f"Slot {number} of ArraysCache holds {slot.shape[0]} requests")
        return Description(
            kind=self.kind,
            version=self.version,
            params={"slots": len(cache.cache)},
            offset=None,
            floor=None,
            reach=Reach(window=0, stateful=True),
        )

    def state(self, cache: Any) -> State:
        """Every slot that is set, by its number; ``none`` lists the others."""
        none = [i for i, slot in enumerate(cache.cache) if slot is None]
        return State(
            {"none": none},
            {str(i): slot for i, slot in enumerate(cache.cache) if slot is not None},
        )

    def place(self, params: Mapping[str, Scalar], meta: Meta | None, p: int) -> Placement:
        """Nothing: there are no rows."""
        return Placement(0, ())

    def build(
        self,
        params: Mapping[str, Scalar],
        meta: Meta | None,
        p: int,
        planes: Mapping[str, mx.array],
        tensors: Mapping[str, mx.array],
        boundary: int | None,
    ) -> Any:
        """An ``ArraysCache`` with the slots of the snapshot at ``p``.

        Raises ``MalformedCache`` without a snapshot, or where its slots are not complete.
        """
        slots = entry(params, "slots")
        none = meta.get("none") if meta is not None else None
        if not isinstance(none, Sequence) or isinstance(none, str):
            raise MalformedCache("Recurrent state resumes only at a snapshot")
        # Compared by count first, so that a wrong number allocates nothing.
        named = [*tensors, *(str(i) for i in none)]
        if len(named) != slots or set(named) != {str(i) for i in range(slots)}:
            raise MalformedCache(f"{sorted(named)} are not the {slots} slots of an ArraysCache")
        cache = _cache_class()(slots)
        for name, tensor in tensors.items():
            cache[int(name)] = tensor
        return cache


def _cache_class() -> Any:
    from mlx_lm.models.cache import ArraysCache

    return ArraysCache


CODEC = Arrays()
