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

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvkeep.errors import BadRound, UncommittedRound

if TYPE_CHECKING:
    from typing import Self

    import mlx.core as mx
    from mlx.nn.layers.base import Module

OPEN = "speculative_round"
"""Attribute of a live cache between ``begin`` and ``commit`` or ``rollback``."""

METHODS = ("begin", "commit", "rollback")


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
        self._begun: list[_Part] = []
        self._parts = [
            _part(path, cache, owner)
            for number, owner in enumerate(owners)
            for path, cache in _leaves(caches[number], str(number))
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _end(self) -> None:
        self._armed = False
        self._begun = []
        for part in self._parts:
            with suppress(AttributeError):
                delattr(part.cache, OPEN)

    def _follow(self) -> None:
        """Take up the caches that the list holds now: conversion replaces them in place."""
        found = [
            leaf for i in range(len(self._caches)) for leaf in _leaves(self._caches[i], str(i))
        ]
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


class _Part(ABC):
    """One cache of the list, at ``path``, and how it is set back."""

    def __init__(self, path: str, cache: Any) -> None:
        self.path = path
        self.cache = cache

    @property
    def name(self) -> str:
        """The layer, as messages name it."""
        return f"Layer {self.path}: {type(self.cache).__name__}"

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def window(self) -> int | None:
        """Tokens appended since ``begin``; ``None`` where only the cache itself knows."""

    @abstractmethod
    def rows(self) -> int | None:
        """Rows of the batch; ``None`` where only the cache itself knows."""

    def check(self, keep: int | list[int]) -> None:  # noqa: B027 - most take every count
        """Raise ``BadRound`` where ``rollback(keep, …)`` cannot be done."""

    @abstractmethod
    def rollback(self, keep: int | list[int], window: int) -> None: ...

    def commit(self) -> None:  # noqa: B027 - most have nothing to drop
        """Drop what was kept to go back."""

    @abstractmethod
    def abandon(self) -> None:
        """Go back to where ``begin`` was, after any part of a window."""

    def replace(self, cache: Any) -> None:
        """Go on with ``cache``, which took the place of the old one in the list."""
        self.cache = cache


class _Own(_Part):
    """A cache that takes its own rounds."""

    def begin(self) -> None:
        self.cache.begin()

    def window(self) -> None:
        return None

    def rows(self) -> None:
        return None

    def rollback(self, keep: int | list[int], window: int) -> None:
        self.cache.rollback(keep)

    def commit(self) -> None:
        self.cache.commit()

    def abandon(self) -> None:
        # Where the failed forward never came to this layer there is nothing to go back from.
        with suppress(BadRound):
            self.cache.rollback(0)


class _Trimmed(_Part):
    """Keys and values by position: the tail is trimmed."""

    start = 0

    def begin(self) -> None:
        if not self.cache.is_trimmable():
            raise BadRound(f"{self.name} can no longer be trimmed", remedy=_REMEDY)
        self.start = self._position()

    def window(self) -> int:
        return self._position() - self.start

    def rows(self) -> int | None:
        keys = getattr(self.cache, "keys", None)
        plane = keys[0] if isinstance(keys, (tuple, list)) else keys
        return None if plane is None else int(plane.shape[0])

    def check(self, keep: int | list[int]) -> None:
        if not self.cache.is_trimmable():
            raise BadRound(f"{self.name} can no longer be trimmed", remedy=_REMEDY)
        if not isinstance(keep, int) and not hasattr(self.cache, "finalize"):
            raise BadRound(f"{self.name} holds one length for all rows", remedy=_REMEDY)

    def rollback(self, keep: int | list[int], window: int) -> None:
        counts = [keep] if isinstance(keep, int) else keep
        most = max(counts)
        self._trim(window - most)
        if not isinstance(keep, int):
            # What is rejected in one row only goes to its left, as padding.
            self.cache.prepare(right_padding=[most - count for count in counts])
            self.cache.finalize()

    def abandon(self) -> None:
        self._trim(self._position() - self.start)

    def _trim(self, count: int) -> None:
        dropped = self.cache.trim(count) if count > 0 else 0
        if dropped != max(count, 0):
            raise BadRound(f"{self.name} dropped {dropped} of {count} positions", remedy=_REMEDY)
        # ConcatenateKVCache only counts down: its next append would keep the rejected rows.
        if count > 0 and _is(self.cache, "ConcatenateKVCache"):
            offset = self.cache.offset
            self.cache.keys = self.cache.keys[..., :offset, :]
            self.cache.values = self.cache.values[..., :offset, :]

    def _position(self) -> int:
        offset = self.cache.offset
        return offset if isinstance(offset, int) else int(self.cache.size())


class _Ring(_Part):
    """A sliding window: set back by reference, and fed the kept rows again."""

    def __init__(self, path: str, cache: Any) -> None:
        super().__init__(path, cache)
        self._state: Any = None
        self._fed: list[tuple[mx.array, mx.array]] = []

    def begin(self) -> None:
        self._fed = fed = []
        self._state = _handles(self.cache.state)
        append = type(self.cache).update_and_fetch
        cache = self.cache

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            fed.append((keys, values))
            return append(cache, keys, values)

        cache.update_and_fetch = update_and_fetch

    def window(self) -> int:
        return sum(int(keys.shape[2]) for keys, _ in self._fed)

    def rows(self) -> int | None:
        return int(self._fed[0][0].shape[0]) if self._fed else None

    def check(self, keep: int | list[int]) -> None:
        if not isinstance(keep, int):
            raise BadRound(f"{self.name} takes one count for all rows", remedy=_REMEDY)

    def rollback(self, keep: int | list[int], window: int) -> None:
        assert isinstance(keep, int)
        fed = self._fed
        self._forget()
        if keep == window:
            return
        self.cache.state = self._state
        for keys, values in fed:
            count = min(keep, int(keys.shape[2]))
            if count:
                self.cache.update_and_fetch(keys[:, :, :count], values[:, :, :count])
            keep -= count
        self._state = None

    def commit(self) -> None:
        self._forget()
        self._state = None

    def abandon(self) -> None:
        self._forget()
        self.cache.state, self._state = self._state, None

    def replace(self, cache: Any) -> None:
        if self._state is not None:
            raise BadRound(f"{self.name} was replaced inside the round", remedy=_REMEDY)
        super().replace(cache)

    def _forget(self) -> None:
        vars(self.cache).pop("update_and_fetch", None)
        self._fed = []


class _Recurrent(_Part):
    """The state of a gated-delta layer: replayed."""

    def __init__(self, path: str, cache: Any, owner: Any) -> None:
        from kvkeep.caches.replay import Tape

        super().__init__(path, cache)
        self._tape = Tape(owner, cache)

    def begin(self) -> None:
        self._tape.start()

    def window(self) -> int:
        return self._tape.length

    def rows(self) -> int:
        return int(self.cache.batch_size)

    def rollback(self, keep: int | list[int], window: int) -> None:
        tape = self._tape
        point = tape.at(keep) if isinstance(keep, int) else tape.rows_at(keep)
        point.put(self.cache)
        tape.stop()

    def commit(self) -> None:
        self._tape.stop()

    def abandon(self) -> None:
        self.rollback(0, 0)

    def replace(self, cache: Any) -> None:
        raise BadRound(
            f"{self.name} was replaced in the list",
            remedy="Make new rounds for a new list of caches.",
        )


_REMEDY = "Generate without a draft model, or with a cache that can be set back (docs/caches.md)."


def _leaves(cache: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The caches inside a ``CacheList``, or the cache itself, each with its place."""
    if _is(cache, "CacheList"):
        for number, inner in enumerate(cache.caches):
            yield from _leaves(inner, f"{path}.{number}")
    else:
        yield path, cache


def _part(path: str, cache: Any, owner: Any) -> _Part:
    name = f"Layer {path}: {type(cache).__name__}"
    present = [method for method in METHODS if callable(getattr(cache, method, None))]
    if len(present) == len(METHODS):
        return _Own(path, cache)
    if present:
        missing = ", ".join(method for method in METHODS if method not in present)
        raise BadRound(
            f"{name} has {', '.join(present)} but not {missing}",
            remedy="A cache takes rounds of its own only with begin, commit and rollback.",
        )
    if _is(cache, "ArraysCache"):
        from kvkeep.caches.replay import is_gated_delta

        if is_gated_delta(owner):
            return _Recurrent(path, cache, owner)
        raise BadRound(f"{name} holds the state of no gated-delta layer", remedy=_REMEDY)
    if _slides(cache):
        return _Ring(path, cache)
    if callable(getattr(cache, "trim", None)) and callable(getattr(cache, "is_trimmable", None)):
        return _Trimmed(path, cache)
    raise BadRound(f"{name} can be neither trimmed nor set back", remedy=_REMEDY)


def _slides(cache: Any) -> bool:
    """Whether old positions are dropped as new ones come, so that a trim may not be enough."""
    if _is(cache, "ChunkedKVCache"):
        # Its front is cut before a forward, by what the chunk does not need any more.
        return False
    inner: Any = getattr(cache, "caches", ())
    return hasattr(cache, "max_size") or hasattr(cache, "chunk_size") or any(map(_slides, inner))


def _is(cache: object, name: str) -> bool:
    from mlx_lm.models import cache as module

    return type(cache) is getattr(module, name)


def _handles(state: Any) -> Any:
    """The same state behind new array objects, because mlx-lm writes into its own."""
    from mlx.core import array
    from mlx.utils import tree_map

    return tree_map(lambda x: x[...] if isinstance(x, array) else x, state)
