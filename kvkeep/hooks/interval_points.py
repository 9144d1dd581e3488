"""Resume points inside a long prefill, for layers that resume only where one was stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.recipe import read_caches
from kvkeep.prefixstore.space import Space


class IntervalPoints:
    """A progress callback for ``prefill`` that stores a resume point between its chunks.

    Plain caches resume anywhere below their end and need none. Recurrent state resumes only
    where it was stored, and a ring only where its window was: for a cache list that holds
    one of these, each chunk's end becomes a resume point, except the last, which is the
    caller's to store. ``tokens[:start]`` are in ``caches`` before the prefill begins;
    ``then`` is called with the same progress afterwards.

    The time between calls tells the space how fast the model reads, for its reports.
    """

    def __init__(
        self,
        space: Space,
        tokens: Sequence[int],
        caches: list[Any],
        start: int = 0,
        then: Callable[[int, int], None] | None = None,
    ) -> None:
        self.receipts: list[tuple[int, Receipt]] = []
        """The offset of each resume point, and what became of it."""
        self._space, self._tokens, self._caches = space, tokens, caches
        self._start, self._then = start, then
        self._done, self._since = 0, time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        """Store a resume point where one is due."""
        self._space.measured(done - self._done, time.perf_counter() - self._since)
        if 0 < done < total and needs_points(self._caches):
            offset = self._start + done
            receipt = self._space.snapshot(self._tokens[:offset], self._caches, origin="interval")
            self.receipts.append((offset, receipt))
        if self._then is not None:
            self._then(done, total)
        self._done, self._since = done, time.perf_counter()


def needs_points(caches: Sequence[Any]) -> bool:
    """Whether ``caches``, which are not empty, hold a layer that a later cut would lose."""
    layers = read_caches(caches, 0).recipe.layers
    return any(layer.reach.stateful or layer.reach.window is not None for layer in layers)
