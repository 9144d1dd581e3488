"""What caches that hold every position, in one precision for good, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import mlx.core as mx


class EveryPosition:
    """``offset`` positions, of which the newest can always be dropped."""

    offset: int
    state: Any

    def make_mask(
        self,
        N: int,  # noqa: N803
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The causal mask of the next ``N`` positions, as mlx-lm's plain cache gives it."""
        from mlx_lm.models.cache import create_attention_mask

        mask: mx.array | str | None = create_attention_mask(
            N, self.offset, return_array, window_size
        )
        return mask

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Self:
        """The cache whose ``state`` this is."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def max_append(self) -> int | None:
        """``None``: the rows never change precision."""
        return None

    def is_trimmable(self) -> bool:
        """Always."""
        return True

    def size(self) -> int:
        """``offset``."""
        return self.offset
