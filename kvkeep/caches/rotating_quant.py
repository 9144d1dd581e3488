"""A sliding window of quantized rows: the first ``keep`` positions and the newest, in a ring.

The ring is laid out as mlx-lm's ``RotatingKVCache`` lays out its rows after the same appends,
slot by slot; only what lies in a slot is quantized. Reads are dense (``quantized.py``).

>>> import mlx.core as mx
>>> cache = RotatingQuantizedKVCache(max_size=8, keep=2, bits=8, group_size=32)
>>> for _ in range(11):
...     rows = cache.update_and_fetch(mx.ones((1, 1, 1, 32)), mx.ones((1, 1, 1, 32)))
>>> cache.offset, rows[0].shape, cache.minimum_resumable_offset
(11, (1, 1, 8, 32), 11)
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import RotatingKVCache

from kvkeep.caches.quantized import QuantizedRows
from kvkeep.caches.ring import floor
from kvkeep.errors import BadScheme


class RotatingQuantizedKVCache(QuantizedRows):
    """``kv-rotating-quant``: the ring of ``max_size`` positions, in six planes."""

    kind = "kv-rotating-quant"
    moved = ("offset", "_idx")
    fixed = ("max_size", "keep")

    def __init__(self, max_size: int, keep: int = 0, bits: int = 4, group_size: int = 64) -> None:
        super().__init__(bits, group_size)
        if not 0 <= keep < max_size:
            raise BadScheme(f"A ring of {max_size} positions cannot keep {keep} of them")
        self.max_size, self.keep, self._idx = max_size, keep, 0

    @property
    def minimum_resumable_offset(self) -> int:
        """The precision boundary, or the first offset whose window is whole."""
        slots = self.offset if self.keys is None else self.keys[0].shape[2]
        return max(self.boundary, floor(self.offset, slots, self.max_size))

    @minimum_resumable_offset.setter
    def minimum_resumable_offset(self, boundary: int) -> None:
        self.boundary = boundary

    def _plain(self) -> Any:
        return RotatingKVCache(self.max_size, self.keep)  # type: ignore[no-untyped-call]
