"""Rows in full precision until ``start``, quantized from there on: one cache all along.

What ``kv_bits`` with ``quantized_kv_start`` makes mlx-lm do from outside, the cache does inside
its own append: the append that brings ``offset`` to ``start`` is read in full precision, and
then everything held is quantized, once and for good. So even ``start=0`` reads its first chunk
in full precision. The offset of that moment is the floor: a shorter run would have converted
elsewhere. One layer is converted and evaluated before the next, so that one at most is held
twice.

A prefill may be read in more forwards than planned, to stop for a sibling that parts inside a
chunk. ``plan(end)`` says where the chunk ends; no conversion happens before.

>>> import mlx.core as mx
>>> cache = DelayedKVCache(bits=4, group_size=32, start=6)
>>> row = mx.ones((1, 1, 1, 32))
>>> rows = cache.update_and_fetch(mx.repeat(row, 5, axis=2), mx.repeat(row, 5, axis=2))
>>> cache.converted, cache.max_append(), cache.kind
(False, 1, 'delayed(kv,kv-quant)')
>>> keys, values = cache.update_and_fetch(mx.repeat(row, 4, axis=2), mx.repeat(row, 4, axis=2))
>>> keys.shape, cache.converted, cache.minimum_resumable_offset, cache.max_append()
((1, 1, 9, 32), True, 9, None)
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from kvkeep.caches.adapters import RECORD, floor_of_plain, row_bytes
from kvkeep.caches.chunked_quant import ChunkedQuantizedKVCache
from kvkeep.caches.quantized import DenseQuantizedKVCache, QuantizedRows, dequantize
from kvkeep.caches.reads import Reads, mask_of
from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache
from kvkeep.caches.scheme import check_affine, check_head, check_start
from kvkeep.errors import BadScheme

_KINDS: dict[type, str] = {
    KVCache: "delayed(kv,kv-quant)",
    QuantizedKVCache: "delayed(kv,kv-quant)",
    DenseQuantizedKVCache: "delayed(kv,kv-quant)",
    RotatingKVCache: "delayed(kv-rotating,kv-rotating-quant)",
    RotatingQuantizedKVCache: "delayed(kv-rotating,kv-rotating-quant)",
    ChunkedKVCache: "delayed(kv-chunked,kv-chunked-quant)",
    ChunkedQuantizedKVCache: "delayed(kv-chunked,kv-chunked-quant)",
}

_CONVERTED = (QuantizedKVCache, QuantizedRows)


class DelayedKVCache(Reads):
    """A plain cache of mlx-lm that becomes a quantized one at ``start``.

    ``source`` is what it holds at first: a ``KVCache`` (the default), ``RotatingKVCache`` or
    ``ChunkedKVCache``, or one of their quantized counterparts where it was converted before.
    ``dense`` gives converted rows of a ``KVCache`` out in full precision, for attention that
    does not multiply planes; windows are always read so. ``lent`` keeps what the last append
    read for layers that borrow it through ``keys_and_values``.

    Raises ``BadScheme`` for a width, a group size, a start or a source that is not possible.
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int = 64,
        start: int = 5000,
        *,
        source: Any = None,
        dense: bool = False,
        lent: bool = False,
    ) -> None:
        check_affine(bits, group_size)
        check_start(start)
        held: Any = source
        if held is None:
            held = KVCache()  # type: ignore[no-untyped-call]
        if type(held) not in _KINDS:
            names = ", ".join(cls.__name__ for cls in _KINDS)
            raise BadScheme(f"{type(held).__name__} is not converted later; valid are {names}")
        self.caches: list[Any] = [held]
        self.packed_bits, self.group_size, self.start = bits, group_size, start
        self.dense, self.lent = dense, lent
        self._end = 0
        self._planes_read = False
        self._last: Any = None

    @property
    def kind(self) -> str:
        """The kind with both inner ones, whichever is held now."""
        return _KINDS[type(self.caches[0])]

    @property
    def converted(self) -> bool:
        """Whether the rows are quantized by now."""
        return isinstance(self.caches[0], _CONVERTED)

    @property
    def offset(self) -> int:
        """Committed positions."""
        return int(self.caches[0].offset)

    @property
    def minimum_resumable_offset(self) -> int:
        """The offset of the conversion; before it, what the plain storage can resume."""
        held = self.caches[0]
        return int(held.minimum_resumable_offset) if self.converted else floor_of_plain(held)

    @property
    def bits(self) -> int:
        """The width, where the last append returned planes.

        Raises ``AttributeError`` otherwise: by this name mlx-lm's attention tells planes from
        rows.
        """
        if not self._planes_read:
            raise AttributeError("bits")
        return self.packed_bits

    @property
    def keys(self) -> Any:
        """What is held of the keys, rows or planes, with room to grow."""
        return self.caches[0].keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self.caches[0].keys = keys

    @property
    def values(self) -> Any:
        """What is held of the values, as ``keys``."""
        return self.caches[0].values

    @values.setter
    def values(self, values: Any) -> None:
        self.caches[0].values = values

    @property
    def start_position(self) -> int:
        """The first position that a chunked cache holds."""
        return int(self.caches[0].start_position)

    def maybe_trim_front(self) -> None:
        """Cut the front of a chunked cache; the model calls it. Others have none to cut."""
        if hasattr(self.caches[0], "maybe_trim_front"):
            self.caches[0].maybe_trim_front()

    def plan(self, end: int) -> None:
        """The chunk that is read now ends at ``end``, in however many forwards it is read.

        Raises ``BadScheme`` where ``end`` lies before the offset.
        """
        if end < self.offset:
            raise BadScheme(f"A chunk cannot end at {end}; {self.offset} positions are held")
        self._end = end

    def max_append(self) -> int | None:
        """``start - offset`` until the conversion, at least 0; ``None`` after it."""
        return None if self.converted else max(0, self.start - self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append ``[B, H, L, D]``; what attention reads, rows or planes. Converts when due.

        Raises ``BadScheme`` where heads are no whole groups; nothing is appended then.
        """
        held = self.caches[0]
        check_head("Keys", keys.shape[3], self.group_size)
        check_head("Values", values.shape[3], self.group_size)
        read = held.update_and_fetch(keys, values)
        self._planes_read = hasattr(held, "bits")
        self._last = None
        if not self.converted and self._is_due():
            self.caches[0] = self._convert(held)
            self._last = read if self.lent else None
        return read

    def keys_and_values(self) -> Any:
        """What the last append returned."""
        if self._last is not None:
            return self._last
        held = self.caches[0]
        read = held.keys_and_values()
        if hasattr(held, "bits") and not self._planes_read:
            return tuple(dequantize(x, self.group_size, self.packed_bits) for x in read)
        return read

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the next ``length`` positions over what they will read."""
        return mask_of(self.caches[0], length, return_array, window_size)

    def is_trimmable(self) -> bool:
        """Whether the newest positions can be dropped now."""
        return bool(self.caches[0].is_trimmable())

    def trim(self, n: int) -> int:
        """Drop the last ``n`` positions, at most all; how many went. Takes no conversion back."""
        self._last = None
        return int(self.caches[0].trim(n))

    def bytes_per_token(self) -> int:
        """Bytes that one more token adds to what is held now; 0 before the first append."""
        return row_bytes(self.caches[0])

    @property
    def nbytes(self) -> int:
        """Bytes of what is held, with its room to grow."""
        held = self.caches[0]
        return 0 if held.empty() else int(held.nbytes)

    def empty(self) -> bool:
        """Whether nothing was appended yet."""
        return bool(self.caches[0].empty())

    def size(self) -> int:
        """Positions held."""
        return int(self.caches[0].size() or self.offset)

    @property
    def state(self) -> tuple[Any, ...]:
        """The inner state, then everything else that ``from_state`` needs."""
        held = self.caches[0]
        recorded = self.minimum_resumable_offset if self.converted else 0
        rest = (self.packed_bits, self.group_size, self.start, self.dense, self.lent, self._end)
        return (held.state, type(held).__name__, recorded, *rest)

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        inner, name, recorded, *rest = value
        classes: dict[str, Any] = {cls.__name__: cls for cls in _KINDS}
        held = classes[name].from_state(inner)
        if type(held) is QuantizedKVCache:
            setattr(held, RECORD, recorded)
        self.caches = [held]
        self.packed_bits, self.group_size, self.start, self.dense, self.lent, self._end = rest
        self._planes_read, self._last = False, None

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> DelayedKVCache:
        """A cache with that state."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def _is_due(self) -> bool:
        return self.offset >= max(self.start, self._end, 1)

    def _convert(self, plain: Any) -> Any:
        """The quantized counterpart of ``plain``, evaluated."""
        bits, group_size = self.packed_bits, self.group_size
        new: Any
        if isinstance(plain, RotatingKVCache):
            new = RotatingQuantizedKVCache(plain.max_size, plain.keep, bits, group_size)
        elif isinstance(plain, ChunkedKVCache):
            new = ChunkedQuantizedKVCache(plain.chunk_size, bits, group_size)
        elif self.dense:
            new = DenseQuantizedKVCache(bits, group_size)
        else:
            new = plain.to_quantized(group_size=group_size, bits=bits)
            setattr(new, RECORD, plain.offset)
        if isinstance(new, QuantizedRows):
            new.take_over(plain)
        mx.eval(new.keys, new.values)
        return new
