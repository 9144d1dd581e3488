"""``kv-compressed``: a window, compressed groups and the open group (DeepSeek V4.1).

Shapes
    Five arrays ``[1, T, D]``, each of its own T, D and dtype, all but ``window`` may be ``None``:

    ============================  ========================================================
    ``window``                    the newest ``window_size`` positions, keys and values in one
    ``compress_kv``               one row for each closed group of ``ratio`` positions
    ``index_k``                   as many rows: what the index of the groups compares
    ``pending_kv, pending_gate``  the positions of the open group: fewer than ``ratio``, so
                                  they may have no rows; never set where ``ratio`` is 1
    ============================  ========================================================

    ``ratio`` belongs to the model. What the cache shows of it is that the positions before the
    open group are a whole number of positions per closed group.

Hazards
    mlx-lm has no setter for its ``state``, and ``window_size`` is not in it: the parts are
    read and set by name. A closed group holds positions that no other array has, so that
    nothing can be taken back.

Resume
    Exactly at a snapshot, nowhere else. Each snapshot holds the whole cache.

>>> import mlx.core as mx
>>> from mlx_lm.models.deepseek_v41 import LayerCache
>>> cache = LayerCache(window_size=4)
>>> _ = cache.update_window(mx.ones((1, 6, 8)))
>>> facts = CODEC.describe(cache)
>>> facts.offset, facts.floor, facts.params, facts.bytes_per_token
(6, 6, {'window_size': 4}, 0)
>>> state = CODEC.state(cache)
>>> state.meta["none"], {name: x.shape for name, x in state.tensors.items()}
([1, 2, 3, 4], {'window': (1, 4, 8)})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

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
    whole,
)
from kvkeep.errors import BatchCache, EmptyCache, MalformedCache

if TYPE_CHECKING:
    import mlx.core as mx

PARTS: Final = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


class KVCompressed(Codec):
    """``mlx_lm.models.deepseek_v41.LayerCache``."""

    kind = "kv-compressed"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``LayerCache``."""
        return is_a(cache, "mlx_lm.models.deepseek_v41", "LayerCache")

    def describe(self, cache: Any) -> Description:
        """The offset, which is also the floor; no rows."""
        offset, window_size = whole(cache, "offset"), whole(cache, "window_size")
        if not offset:
            raise EmptyCache("LayerCache covers no token")
        lengths = {name: _length(name, getattr(cache, name, None)) for name in PARTS}
        wrong = _contradiction(offset, window_size, lengths)
        if wrong:
            raise MalformedCache(f"LayerCache at offset {offset:,} holds {wrong}")
        return Description(
            kind=self.kind,
            version=self.version,
            params={"window_size": window_size},
            offset=offset,
            floor=offset,
            reach=Reach(window=0, stateful=True),
        )

    def state(self, cache: Any) -> State:
        """Every part that is set, by its name; ``none`` lists the others by their place."""
        parts = {name: getattr(cache, name) for name in PARTS}
        return State(
            {"none": [i for i, part in enumerate(parts.values()) if part is None]},
            {name: part for name, part in parts.items() if part is not None},
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
        """A ``LayerCache`` with the parts of the snapshot at ``p``.

        Raises ``MalformedCache`` without a snapshot, or where its parts are not complete.
        """
        none = meta.get("none") if meta is not None else None
        if not isinstance(none, list | tuple):
            raise MalformedCache("A compressed cache resumes only at a snapshot")
        missing = [name for i, name in enumerate(PARTS) if i in none]
        if sorted([*tensors, *missing]) != sorted(PARTS) or "window" in missing:
            raise MalformedCache(f"{sorted(tensors)} are not the parts of a LayerCache")
        cache = _cache_class()(entry(params, "window_size"))
        cache.offset = p
        cache.window = tensors.get("window")
        cache.compress_kv, cache.index_k = tensors.get("compress_kv"), tensors.get("index_k")
        cache.pending_kv = tensors.get("pending_kv")
        cache.pending_gate = tensors.get("pending_gate")
        return cache


def _length(name: str, part: Any) -> int | None:
    """The rows of ``part``; ``None`` where it is not set."""
    if part is None:
        return None
    if getattr(part, "ndim", None) != 3:
        raise MalformedCache(f"LayerCache.{name} is no array of 3 axes")
    if part.shape[0] != 1:
        raise BatchCache(f"LayerCache.{name} holds {part.shape[0]} requests")
    return int(part.shape[1])


def _contradiction(offset: int, window_size: int, rows: Mapping[str, int | None]) -> str:
    """What cannot be true of a cache at ``offset``, or nothing."""
    window, groups, index, pending, gate = (rows[name] for name in PARTS)
    if not window_size or window != min(offset, window_size):
        return f"a window of {window} of {window_size} positions"
    if index is not None and index != groups:
        return f"{groups} groups and {index} index keys"
    if pending != gate:
        return f"{pending} keys and {gate} gates of the open group"
    closed = offset - (pending or 0)
    if groups:
        # Each group has closed // groups positions, more than the open one.
        if closed % groups or closed // groups <= (pending or 0):
            return f"{groups} groups and {pending or 0} positions of an open one"
    elif pending is not None and closed:
        return f"no group and {pending} positions of an open one"
    return ""


def _cache_class() -> Any:
    from mlx_lm.models.deepseek_v41 import LayerCache

    return LayerCache


CODEC = KVCompressed()
