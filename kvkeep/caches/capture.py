"""Owned captures of keys and values, for layers and drafters that borrow another layer's.

A capture is what a layer's attention reads at one moment, in the order in which it lies there,
so that a read of it has the bits of the owner's own. It holds copies: later appends, trims and
conversions of the cache, also in place, do not change it, and it keeps nothing of the cache
alive. Rows of a batch have offsets, starts and ends of their own, and padding is never visible.

>>> import mlx.core as mx
>>> from mlx_lm.models.cache import RotatingKVCache
>>> cache = RotatingKVCache(max_size=4)
>>> for _ in range(6):
...     _ = cache.update_and_fetch(mx.ones((1, 2, 1, 8)), mx.ones((1, 2, 1, 8)))
>>> held = capture(cache)
>>> held.offsets.tolist(), held.positions.tolist()
([6], [[4, 5, 2, 3]])
>>> held.attend(mx.ones((1, 4, 1, 8)), scale=1.0, ahead=1).shape
(1, 4, 1, 8)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvkeep.caches.quantized import dequantize
from kvkeep.caches.reads import DenseRead, PackedRead
from kvkeep.caches.ring import layout
from kvkeep.errors import EmptyCache, MalformedCache, UnknownCache

PADDING = -1
"""The position of a slot that holds none."""


@dataclass(frozen=True)
class Capture:
    """Keys and values of B rows with T slots, as they were.

    ``keys`` and ``values`` are ``[B, H, T, D]``, or planes (packed, scales, biases) where
    ``bits`` is set. All of the following are ``int32``. ``offsets`` ``[B]`` are the committed
    positions of each row; its slots are ``[starts, ends)``, and ``positions`` ``[B, T]`` says
    which position lies in each, ``PADDING`` for none. The first ``keep`` positions of a ring
    stay visible behind its window.
    """

    keys: Any
    values: Any
    offsets: mx.array
    starts: mx.array
    ends: mx.array
    positions: mx.array
    padded: bool = False
    in_order: bool = True
    keep: int = 0
    bits: int | None = None
    group_size: int = 64

    @property
    def nbytes(self) -> int:
        """Bytes of the copies of keys and values."""
        return sum(plane.nbytes for plane in _planes(self.keys, self.values))

    def rows(self) -> tuple[mx.array, mx.array]:
        """Keys and values ``[B, H, T, D]``; planes are decoded."""
        if self.bits is None:
            return self.keys, self.values
        keys, values = (
            dequantize(planes, self.group_size, self.bits) for planes in (self.keys, self.values)
        )
        return keys, values

    def attend(
        self,
        queries: mx.array,
        scale: float,
        *,
        ahead: int = 0,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of ``queries`` ``[B, Hq, L, D]`` over what is visible: ``[B, Hq, L, Dv]``.

        The queries stand at the newest L positions of their row, as those of a layer that
        shares these keys and values; ``ahead`` moves them on, as a drafter's that come after.
        Each sees the positions up to its own, and with ``window`` the newest so many of them.
        Planes know no ``sinks``: ``ValueError``.
        """
        mask = self._mask(queries.shape[2], ahead, window)
        if self.bits is None:
            return DenseRead(self.keys, self.values, mask).attend(queries, scale, sinks=sinks)
        read = PackedRead(self.keys, self.values, self.bits, self.group_size, mask)
        return read.attend(queries, scale, sinks=sinks)

    def _mask(self, length: int, ahead: int, window: int | None) -> mx.array | str | None:
        # Where the owner's read has no mask or a named one, so has this: the bits follow it.
        slots = self.positions.shape[1]
        if not self.padded and (window is None or slots + ahead <= window):
            if ahead >= length - 1:
                return None
            if self.in_order and ahead == 0:
                return "causal"
        mine = (self.offsets[:, None] - length + ahead + mx.arange(length))[:, None, :, None]
        theirs = self.positions[:, None, None, :]
        seen = (theirs >= 0) & (theirs <= mine)
        if window is not None:
            seen = seen & ((theirs > mine - window) | (theirs < self.keep))
        return seen


def capture(cache: Any, *, evaluate: bool = True) -> Capture:
    """A capture of what ``cache`` holds now.

    Copies are made at once, without waiting for them; with ``evaluate=False``, as inside a
    traced function, when something asks for them, and until then they keep the cache's own
    arrays alive.

    Raises ``EmptyCache`` where nothing was appended yet, and ``UnknownCache`` for recurrent
    state and other classes that hold no keys and values by position.
    """
    name = type(cache).__name__
    if not callable(getattr(cache, "keys_and_values", None)):
        raise UnknownCache(f"{name} holds no keys and values that could be captured", remedy="")
    if cache.empty() or (isinstance(cache.offset, int) and not cache.offset):
        raise EmptyCache(f"{name} covers no token")
    found = _of_batch(cache) if hasattr(cache, "left_padding") else _of_one(cache)
    if evaluate:
        places = (found.offsets, found.starts, found.ends, found.positions)
        mx.async_eval(*_planes(found.keys, found.values), *places)  # type: ignore[no-untyped-call]
    return found


def _of_one(cache: Any) -> Capture:
    """Rows at one offset."""
    keys, values = cache.keys_and_values()
    plane = next(_planes(keys))
    rows, slots, offset = plane.shape[0], plane.shape[2], int(cache.offset)
    held = _held(cache)
    positions = _positions(held, offset)
    # ConcatenateKVCache leaves trimmed rows behind its offset.
    if len(positions) > slots:
        raise MalformedCache(f"{type(cache).__name__} at {offset:,} holds {slots:,} positions")
    return Capture(
        _own(keys, len(positions)),
        _own(values, len(positions)),
        mx.array([offset] * rows, dtype=mx.int32),
        mx.zeros((rows,), dtype=mx.int32),
        mx.array([len(positions)] * rows, dtype=mx.int32),
        mx.array([positions] * rows, dtype=mx.int32),
        in_order=positions == list(range(offset - len(positions), offset)),
        keep=int(getattr(held, "keep", 0)),
        bits=cache.bits if hasattr(cache, "bits") else None,
        group_size=int(getattr(cache, "group_size", 64)),
    )


def _of_batch(cache: Any) -> Capture:
    """Rows of several requests, padded on the left."""
    from mlx_lm.models.cache import BatchKVCache

    if type(cache) is not BatchKVCache:
        raise UnknownCache(
            f"{type(cache).__name__} cannot be captured as a batch",
            remedy="Take each row out with `cache.extract(i)` and capture that.",
        )
    batch: Any = cache
    keys, values = batch.keys_and_values()
    # New arrays: mlx-lm counts some of its own in place.
    starts = (cache.left_padding + 0).astype(mx.int32)
    slots = mx.arange(cache._idx, dtype=mx.int32)[None]
    return Capture(
        _own(keys, cache._idx),
        _own(values, cache._idx),
        (cache.offset + 0).astype(mx.int32),
        starts,
        mx.full(starts.shape, cache._idx, dtype=mx.int32),
        mx.where(slots < starts[:, None], PADDING, slots - starts[:, None]),
        padded=True,
    )


def _positions(cache: Any, offset: int) -> list[int]:
    """The position in each slot that attention reads."""
    if not hasattr(cache, "max_size"):
        return list(range(int(getattr(cache, "start_position", 0)), offset))
    slots = next(_planes(cache.keys)).shape[2]
    found = [PADDING] * min(offset, slots)
    for position, slot, length in layout(offset, slots, cache._idx, cache.max_size, cache.keep):
        found[slot : slot + length] = range(position, position + length)
    return found


def _held(cache: Any) -> Any:
    """The storage that a wrapper around one holds now: it knows the slots."""
    inner: Any = getattr(cache, "caches", ())
    return inner[0] if len(inner) == 1 else cache


def _own(side: Any, count: int) -> Any:
    """Copies of the first ``count`` slots of rows or planes."""
    if isinstance(side, tuple | list):
        return tuple(_own(plane, count) for plane in side)
    return mx.array(side[:, :, :count])


def _planes(*sides: Any) -> Iterator[mx.array]:
    for side in sides:
        if isinstance(side, tuple | list):
            yield from side
        else:
            yield side
