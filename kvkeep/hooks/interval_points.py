"""Resume points inside a long prefill, for layers that resume only where one was stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.prefixstore.policy import FAULTS, Decision, Reason
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.recipe import read_caches
from kvkeep.prefixstore.space import Space
from kvkeep.prefixstore.tokens import Tokens, as_tokens, insides

WANTING = (Reason.NO_STATE_AT_OFFSET, Reason.ROWS_MISSING, *FAULTS)
"""What a resume point at the same offset would have helped against."""


class IntervalPoints:
    """A progress callback for ``prefill`` that stores a resume point between its chunks.

    Plain caches resume anywhere below their end and need none. Recurrent state resumes only
    where it was stored, and a ring only where its window was: for a cache list that holds
    one of these, each chunk's end becomes a resume point, except the last, which is the
    caller's to store. A chunk that ends at ``junction`` (see ``junction_of``) is one where a
    later prompt left this path, and is noted as such. ``tokens[:start]`` are in ``caches``
    before the prefill begins; ``then`` is called with the same progress afterwards.

    The time between calls tells the space how fast the model reads, for its reports.
    """

    def __init__(
        self,
        space: Space,
        tokens: Sequence[int],
        caches: list[Any],
        start: int = 0,
        then: Callable[[int, int], None] | None = None,
        junction: int | None = None,
    ) -> None:
        self.receipts: list[tuple[int, Receipt]] = []
        """The offset of each resume point, and what became of it."""
        self._space, self._tokens, self._caches = space, tokens, caches
        self._start, self._then, self._junction = start, then, junction
        self._done, self._since = 0, time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        """Store a resume point where one is due."""
        self._space.measured(done - self._done, time.perf_counter() - self._since)
        if 0 < done < total and needs_points(self._caches):
            offset = self._start + done
            origin = "junction" if offset == self._junction else "interval"
            receipt = self._space.snapshot(self._tokens[:offset], self._caches, origin=origin)
            self.receipts.append((offset, receipt))
        if self._then is not None:
            self._then(done, total)
        self._done, self._since = done, time.perf_counter()


def junction_of(decision: Decision, tokens: Sequence[int] | Tokens) -> int | None:
    """The offset at which a prompt left a stored path, where it could not be resumed there.

    Others are likely to part at the same place. Cut the prefill there and store what the caches
    hold, and the next one resumes at it. ``None`` where the prompt did resume there, where it
    is stored to its end, and inside an image.
    """
    at = decision.matched
    wanting = any(limit.reason in WANTING for limit in decision.limits)
    if not wanting or not decision.offset < at < len(tokens) - 1:
        return None
    inside = any(start <= at < stop for start, stop in insides(as_tokens(tokens)))
    return None if inside else at


def needs_points(caches: Sequence[Any]) -> bool:
    """Whether ``caches``, which are not empty, hold a layer that a later cut would lose."""
    layers = read_caches(caches, 0).recipe.layers
    return any(layer.reach.stateful or layer.reach.window is not None for layer in layers)
