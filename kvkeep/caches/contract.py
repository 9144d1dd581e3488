"""The cache contract, as protocols that any cache can satisfy; docs/caches.md explains them.

One cache per layer that owns keys and values. Shapes: B rows, H key/value heads, L or T tokens,
D head size, tokens on axis 2. Nothing here imports mlx.

``Cache`` is what every cache of this room is; mlx-lm's own are it through ``adapters.adapt``.
The others are what a cache may be as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import mlx.core as mx


@runtime_checkable
class Cache(Protocol):
    """What a store, a scheduler and a speculative decoder may ask of a cache."""

    @property
    def kind(self) -> str:
        """Chosen, stable name of the storage; a wrapper names its inner kinds as well."""

    @property
    def offset(self) -> int:
        """Committed positions; never a ring index."""

    @property
    def minimum_resumable_offset(self) -> int:
        """The earliest prefix that what is held can resume; unknown history is ``offset``."""

    def max_append(self) -> int | None:
        """Positions that may be committed before the precision changes; ``None`` for any number."""

    def bytes_per_token(self) -> int:
        """Physical bytes that one more token costs one row; 0 for recurrent state, and before
        the first append has shown the shapes.
        """

    def is_trimmable(self) -> bool:
        """Whether this state can drop its newest positions now."""

    def trim(self, n: int) -> int:
        """Drop the last ``n`` positions, at most all; how many went. Neither checks nor changes
        ``minimum_resumable_offset``.
        """


class AttentionRead(Protocol):
    """What one append made visible. Later appends, trims and conversions do not change it."""

    def attend(self, queries: mx.array, scale: float, *, sinks: mx.array | None = None) -> mx.array:
        """Attention of ``queries`` ``[B, Hq, L, D]`` over the read: ``[B, Hq, L, Dv]``.

        Works any number of times. ``sinks`` ``[Hq]`` are logits that take weight and give none.
        """


@runtime_checkable
class OwnsRead(Protocol):
    """A cache that is read through what it appends. The method is the phase.

    ``keys`` ``[B, H, L, D]`` are already rotated for the positions that they take.
    """

    def append_decode(self, keys: mx.array, values: mx.array) -> AttentionRead:
        """Append one position per row, and read it with all before it.

        Raises ``ValueError`` for another number of positions.
        """

    def append_window(self, keys: mx.array, values: mx.array) -> AttentionRead:
        """Append L positions, causal among themselves, and read them with all before them."""


@runtime_checkable
class Composed(Protocol):
    """A cache that holds others; storing, cloning and batching act on those."""

    @property
    def caches(self) -> Sequence[Any]:
        """The inner caches, in order: for a delayed cache the one storage held now."""


@runtime_checkable
class PlannedPrefill(Protocol):
    """A cache whose precision changes, and for which a prefill fixes where."""

    def plan(self, end: int) -> None:
        """The chunk that is read now ends at ``end``, in however many forwards it is read.

        Until then nothing is converted. The plan ends there; without one every append is a
        chunk of its own. Raises ``BadScheme`` where ``end`` lies before the offset.
        """


@runtime_checkable
class SpeculativeRounds(Protocol):
    """State that cannot be trimmed, and takes back the tokens of a draft all the same."""

    def begin(self) -> None:
        """Arm a round, before the forward that verifies a draft."""

    def commit(self) -> None:
        """Every token of the round is accepted."""

    def rollback(self, keep: Any) -> None:
        """Go back to the start of the round, and replay its first ``keep`` tokens."""


@runtime_checkable
class Positioned(Protocol):
    """A cache that gives a compiled decode step its positions as data."""

    @property
    def positions(self) -> mx.array | None:
        """``int32``, the rotary offset of each row; ``None`` where decoding is not compiled."""


def floor_of(caches: Sequence[Cache]) -> int:
    """A list's floor: the maximum over its members."""
    return max((cache.minimum_resumable_offset for cache in caches), default=0)


def max_append_of(caches: Sequence[Cache]) -> int | None:
    """What a list may still be given before some member changes precision: the minimum."""
    limits = [limit for cache in caches if (limit := cache.max_append()) is not None]
    return min(limits, default=None)
