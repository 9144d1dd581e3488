"""The newest positions of a chunked attention (llama4), quantized.

The model cuts the front of the planes and numbers what is left, as it does with mlx-lm's
``ChunkedKVCache``. Reads are dense (``quantized.py``).

>>> import mlx.core as mx
>>> cache = ChunkedQuantizedKVCache(chunk_size=8, bits=8, group_size=32)
>>> _ = cache.update_and_fetch(mx.ones((1, 1, 20, 32)), mx.ones((1, 1, 20, 32)))
>>> cache.maybe_trim_front()
>>> cache.offset, cache.start_position, cache.minimum_resumable_offset
(20, 12, 20)
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from kvkeep.caches import chunk
from kvkeep.caches.quantized import QuantizedRows
from kvkeep.caches.reads import mask_of
from kvkeep.errors import BadScheme


class ChunkedQuantizedKVCache(QuantizedRows):
    """``kv-chunked-quant``: the positions from ``start_position`` on, in six planes."""

    kind = "kv-chunked-quant"
    moved = ("offset", "start_position")
    fixed = ("chunk_size",)

    def __init__(self, chunk_size: int, bits: int = 4, group_size: int = 64) -> None:
        super().__init__(bits, group_size)
        if chunk_size < 1:
            raise BadScheme(f"A chunk of {chunk_size} positions; it has at least one")
        self.chunk_size, self.start_position = chunk_size, 0

    @property
    def minimum_resumable_offset(self) -> int:
        """The precision boundary, or the first offset whose window is whole."""
        return max(self.boundary, chunk.floor(self.start_position, self.chunk_size))

    @minimum_resumable_offset.setter
    def minimum_resumable_offset(self, boundary: int) -> None:
        self.boundary = boundary

    def maybe_trim_front(self) -> None:
        """Drop all but the newest ``chunk_size`` positions; the model calls it."""
        if self.keys is None:
            return
        parts = self._parts()
        for part in parts:
            part.maybe_trim_front()
        self._settle(parts)

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Each of the next ``length`` positions sees those of its chunk up to itself."""
        return mask_of(self, length)

    def is_trimmable(self) -> bool:
        """Whether no front was cut yet; behind a cut a trim would leave too few positions."""
        return self.start_position == 0

    def size(self) -> int:
        """Positions held."""
        return self.offset - self.start_position

    def _plain(self) -> Any:
        return ChunkedKVCache(self.chunk_size)  # type: ignore[no-untyped-call]
