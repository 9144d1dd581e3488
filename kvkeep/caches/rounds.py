"""Speculative rounds: append a window of tokens, then keep all of it or its first few.

A verify forward of speculative decoding appends tokens that may be rejected. Keys and values
are trimmed; recurrent state cannot be, and a ring cannot once it has wrapped. ``Rounds`` takes
every cache of a model through one protocol::

    rounds = Rounds(model, caches)
    rounds.begin()
    logits = model(window, cache=caches)    # [B, L, vocabulary]
    rounds.commit()                         # every token stays
    rounds.rollback(2)                      # or: only the first two of the window stay

``begin`` and ``commit`` copy nothing. A window may be fed in one forward or in several. After
``rollback(keep)``

* a recurrent layer holds, bit for bit, the state that the window's own recurrence had after
  ``keep`` tokens;
* keys and values are trimmed: rows ``[0, offset + keep)`` are those that the window wrote;
* a ring is as if the window's forwards had appended only the first ``keep`` rows.

Uncommitted tokens are never stored: while a round is open the caches carry ``OPEN``, and a
snapshot of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvkeep.caches.round_parts import Part, leaves, part_of
from kvkeep.errors import BadRound, UncommittedRound

if TYPE_CHECKING:
    from typing import Self

    from mlx.nn.layers.base import Module

OPEN = "speculative_round"
"""Attribute of a live cache between ``begin`` and ``commit`` or ``rollback``."""


def in_round(cache: object) -> bool:
    """Whether ``cache``, or a cache inside it, may hold tokens that are still to be rejected."""
    inner = getattr(cache, "caches", ())
    return bool(getattr(cache, OPEN, False)) or any(map(in_round, inner))


def check_committed(cache: object) -> None:
    """Raise ``UncommittedRound`` where ``cache`` is in the middle of a speculative round."""
    if in_round(cache):
        raise UncommittedRound(f"{type(cache).__name__} is in the middle of a speculative round")


class Rounds:
    """Speculative rounds over the caches of one model, one after the other.

    ``model`` is an mlx-lm model and ``caches`` its list of caches, resumed ones too. A cache
    that has ``begin``, ``commit`` and ``rollback`` takes its own rounds. Otherwise keys and
    values are trimmed, rings are set back and fed again, and ``ArraysCache`` is replayed in
    gated-delta layers (mlx-lm's qwen3_next, qwen3_5 and olmo_hybrid). Use it as a context
    manager, or call ``close``: both abandon an open round.

    Raises ``BadRound``, naming the layer, for a cache that has only part of the three methods,
    or that cannot be set back.
    """

    def __init__(self, model: Module, caches: Sequence[Any]) -> None:
        layers = list(getattr(model, "layers", ()))
        owners = layers if len(layers) == len(caches) else [None] * len(caches)
        self._caches = caches
        self._armed = False
        self._begun: list[Part] = []
        self._parts = [
            part_of(path, cache, owner)
            for number, owner in enumerate(owners)
            for path, cache in leaves(caches[number], str(number))
        ]

    @property
    def armed(self) -> bool:
        """Whether a round is open."""
        return self._armed

    def begin(self) -> None:
        """Open a round. Free: it keeps references to the state, and copies nothing.

        Raises ``BadRound`` where one is open already; nothing is changed then.
        """
        if self._armed:
            raise BadRound(
                "A round is open already", remedy="End it with commit or rollback before the next."
            )
        self._follow()
        self._armed = True
        try:
            for part in self._parts:
                part.begin()
                self._begun.append(part)
                setattr(part.cache, OPEN, True)
        except BaseException:
            self.close()
            raise

    def commit(self) -> None:
        """Keep every token of the window. Raises ``BadRound``, and leaves the round open."""
        self._window()
        for part in self._parts:
            part.commit()
        self._end()

    def rollback(self, keep: int | Sequence[int]) -> None:
        """Keep the first ``keep`` tokens of the window: in ``[0, window]``, or one per row.

        One count per row works for recurrent state and for ``BatchKVCache``. Raises
        ``BadRound`` where no round is armed, nothing was recorded, or ``keep`` is out of range
        or of another number of rows; the round stays open and nothing is changed then.
        """
        window = self._window()
        keeps = self._keeps(keep, window)
        kept: int | list[int] = keeps[0] if len(set(keeps)) == 1 else keeps
        for part in self._parts:
            part.check(kept)
        for part in self._parts:
            part.rollback(kept, window)
        self._end()

    def close(self) -> None:
        """Abandon an open round: every cache stands where ``begin`` found it."""
        if not self._armed:
            return
        failed: list[BadRound] = []
        try:
            self._follow()
        except BadRound as error:
            failed.append(error)
        # Every layer is given back before an error is raised.
        for part in self._begun:
            try:
                part.abandon()
            except BadRound as error:
                failed.append(error)
        self._end()
        if failed:
            raise failed[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _end(self) -> None:
        self._armed = False
        self._begun = []
        for part in self._parts:
            with suppress(AttributeError):
                delattr(part.cache, OPEN)

    def _follow(self) -> None:
        """Take up the caches that the list holds now: conversion replaces them in place."""
        found = [leaf for i in range(len(self._caches)) for leaf in leaves(self._caches[i], str(i))]
        if [path for path, _ in found] != [part.path for part in self._parts]:
            raise BadRound(
                "The list of caches has another form than when the rounds were made",
                remedy="Make new rounds for a new list of caches.",
            )
        for part, (_, cache) in zip(self._parts, found, strict=True):
            if cache is not part.cache:
                part.replace(cache)

    def _window(self) -> int:
        """The tokens that every layer saw since ``begin``."""
        if not self._armed:
            raise BadRound("No round is armed", remedy="Call begin before the verify forward.")
        self._follow()
        seen: dict[int, str] = {}
        for part in self._parts:
            window = part.window()
            if window is not None:
                seen.setdefault(window, f"layer {part.path} {window:,}")
        if len(seen) > 1:
            raise BadRound(
                f"The layers saw windows of different lengths: {', '.join(seen.values())}",
                remedy="A forward failed or another model ran; close the rounds.",
            )
        window = next(iter(seen), 0)
        if window <= 0:
            raise BadRound(
                "Nothing was recorded since begin",
                remedy="Run the model over the window with these caches, or close the rounds.",
            )
        return window

    def _keeps(self, keep: int | Sequence[int], window: int) -> list[int]:
        per_row = isinstance(keep, Iterable)
        keeps: list[int] = []
        for count in keep if isinstance(keep, Iterable) else [keep]:
            whole = -1 if isinstance(count, bool) else getattr(count, "__index__", lambda: -1)()
            if not 0 <= whole <= window:
                raise BadRound(
                    f"keep is {count!r}; the window holds {window:,} tokens",
                    remedy=f"Pass integers from 0 to {window:,}.",
                )
            keeps.append(whole)
        if per_row:
            for part in self._parts:
                rows = part.rows()
                if rows is not None and rows != len(keeps):
                    raise BadRound(
                        f"{len(keeps)} counts were given for {rows} rows (layer {part.path})",
                        remedy="Pass one count for all rows, or one per row of the batch.",
                    )
        return keeps
