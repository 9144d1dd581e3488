"""mlx-lm's own caches under the contract, as they are: nothing of mlx-lm is patched.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import KVCache, RotatingKVCache
>>> cache = adapt(RotatingKVCache(max_size=4))
>>> read = cache.append_window(mx.ones((1, 2, 7, 8)), mx.ones((1, 2, 7, 8)))
>>> cache.kind, cache.offset, cache.minimum_resumable_offset, cache.bytes_per_token()
('kv-rotating', 7, 7, 128)
>>> cache.is_trimmable(), cache.max_append()
(False, None)
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvkeep.caches.contract import Cache, floor_of, max_append_of
from kvkeep.caches.reads import DenseRead, PackedRead, append, one_position
from kvkeep.caches.ring import floor
from kvkeep.errors import UnknownCache

RECORD = "minimum_resumable_offset"
"""Attribute by which whoever fed a cache vouches for its history."""

_KINDS = {
    ArraysCache: "arrays",
    ChunkedKVCache: "kv-chunked",
    ConcatenateKVCache: "kv-concat",
    KVCache: "kv",
    QuantizedKVCache: "kv-quant",
    RotatingKVCache: "kv-rotating",
}


def adapt(cache: Any) -> Cache:
    """``cache`` under the contract: itself where it satisfies it, or a view on it.

    Raises ``UnknownCache`` for a class without a kind: a kind that is missing fails closed.
    """
    if type(cache) is CacheList:
        return AdaptedList(cache)
    if type(cache) in _KINDS:
        return Adapted(cache)
    if isinstance(cache, Cache) and isinstance(cache.kind, str):
        return cache
    name = f"{type(cache).__module__}.{type(cache).__qualname__}"
    raise UnknownCache(
        f"{name} has no kind, and is none of mlx-lm's own caches",
        remedy="Give the class the members of kvkeep.caches.contract.Cache.",
    )


def kind_of(cache: Any) -> str:
    """The kind of a cache for messages; of an unknown class its name."""
    kind = getattr(cache, "kind", None)
    return kind if isinstance(kind, str) else _KINDS.get(type(cache), type(cache).__name__)


class Adapted:
    """One of mlx-lm's caches under the contract. ``cache`` is the cache itself."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    def kind(self) -> str:
        """The kind of the class."""
        return _KINDS[type(self.cache)]

    @property
    def offset(self) -> int:
        """Committed positions. Raises ``UnknownCache`` for recurrent state, which has none."""
        if not hasattr(self.cache, "offset"):
            raise UnknownCache(
                f"{type(self.cache).__name__} has no offset of its own",
                remedy="Take it from a sibling layer, or from the number of tokens.",
            )
        return int(self.cache.offset)

    @property
    def minimum_resumable_offset(self) -> int:
        """What the held rows can resume; of quantized rows without a record, the offset."""
        return floor_of_plain(self.cache)

    def max_append(self) -> int | None:
        """``None``: mlx-lm converts from outside, by replacing a cache."""
        return None

    def bytes_per_token(self) -> int:
        """Bytes that one more token adds to the rows; 0 before the first append."""
        return row_bytes(self.cache)

    def is_trimmable(self) -> bool:
        """Whether ``trim`` leaves what a shorter run would have left."""
        if isinstance(self.cache, ChunkedKVCache):
            return self.cache.start_position == 0
        return bool(self.cache.is_trimmable())

    def trim(self, n: int) -> int:
        """Drop the last ``n`` positions, at most all; how many went."""
        cut, gone = self.cache, int(self.cache.trim(n))
        if self.kind == "kv-concat" and gone:
            # Its length is its offset: rows that stay would be read again.
            cut.keys, cut.values = cut.keys[:, :, : cut.offset], cut.values[:, :, : cut.offset]
        return gone

    def append_decode(self, keys: mx.array, values: mx.array) -> DenseRead | PackedRead:
        """Append one position per row; a read of it and all before it."""
        one_position(keys)
        return append(self.cache, keys, values)

    def append_window(self, keys: mx.array, values: mx.array) -> DenseRead | PackedRead:
        """Append L positions, causal among themselves; a read of them and all before them."""
        return append(self.cache, keys, values)


class AdaptedList:
    """A ``CacheList`` under the contract: what holds for all that is inside."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.caches = tuple(adapt(inner) for inner in cache.caches)

    @property
    def kind(self) -> str:
        """``list`` with the inner kinds."""
        return f"list({','.join(inner.kind for inner in self.caches)})"

    @property
    def offset(self) -> int:
        """That of what is inside. Raises ``UnknownCache`` where nothing inside has one."""
        return (self._counting() or self.caches)[0].offset

    @property
    def minimum_resumable_offset(self) -> int:
        """The maximum over what is inside; recurrent state resumes only where it stands."""
        counting = self._counting()
        return self.offset if len(counting) < len(self.caches) else floor_of(counting)

    def max_append(self) -> int | None:
        """The minimum over what is inside."""
        return max_append_of(self.caches)

    def bytes_per_token(self) -> int:
        """The sum over what is inside."""
        return sum(inner.bytes_per_token() for inner in self.caches)

    def is_trimmable(self) -> bool:
        """Whether all that is inside is."""
        return all(inner.is_trimmable() for inner in self.caches)

    def trim(self, n: int) -> int:
        """Drop the last ``n`` positions of all that is inside; how many went."""
        return max(inner.trim(n) for inner in self.caches)

    def _counting(self) -> tuple[Cache, ...]:
        return tuple(c for c in self.caches if not c.kind.startswith("arrays"))


def floor_of_plain(cache: Any) -> int:
    """The earliest prefix that a cache of mlx-lm can resume, by what it holds.

    Quantized rows without a record, and slots that a batch may have padded, are unknown history.
    """
    recorded: Any = getattr(cache, RECORD, None)
    known = type(recorded) is int and 0 <= recorded <= cache.offset
    if isinstance(cache, QuantizedKVCache):
        return int(recorded if known else cache.offset)
    if isinstance(cache, RotatingKVCache) and cache.keys is not None:
        slots = cache.keys.shape[2]
        if not known and not cache.keep:
            slots = min(slots, cache.max_size)
        return floor(cache.offset, slots, cache.max_size)
    if isinstance(cache, ChunkedKVCache) and cache.start_position:
        return int(cache.start_position + cache.chunk_size)
    if isinstance(cache, ArraysCache):
        return Adapted(cache).offset
    return 0


def row_bytes(cache: Any) -> int:
    """Physical bytes of one position of one row, 0 for recurrent state or an empty cache."""
    sides = (getattr(cache, "keys", None), getattr(cache, "values", None))
    planes = [x for side in sides if side is not None for x in _flat(side)]
    return sum(plane[:1, :, :1].nbytes for plane in planes)


def _flat(side: Any) -> Any:
    return side if isinstance(side, tuple | list) else (side,)
