"""One cache of a model in a speculative round, and how it is set back: by its storage.

========= ==============================================================================
own       takes rounds itself
trimmed   keys and values by position: the tail is trimmed
ring      a sliding window: set back by reference, and fed the kept rows again
recurrent the state of a gated-delta layer: replayed
========= ==============================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvkeep.errors import BadRound

if TYPE_CHECKING:
    import mlx.core as mx

METHODS = ("begin", "commit", "rollback")
"""What a cache has that takes its own rounds."""

_REMEDY = "Generate without a draft model, or with a cache that can be set back (docs/caches.md)."


def leaves(cache: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The caches inside a ``CacheList``, or the cache itself, each with its place."""
    if _is(cache, "CacheList"):
        for number, inner in enumerate(cache.caches):
            yield from leaves(inner, f"{path}.{number}")
    else:
        yield path, cache


def part_of(path: str, cache: Any, owner: Any) -> Part:
    """How ``cache``, whose layer is ``owner``, takes part. Raises ``BadRound`` where it cannot."""
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


class Part(ABC):
    """One cache of the list, at ``path``, and how it is set back.

    ``Rounds`` calls ``begin``, then ``window`` and ``rows`` as often as it likes, and ends with one
    of ``rollback``, after ``check``, ``commit`` and ``abandon``.
    """

    def __init__(self, path: str, cache: Any) -> None:
        self.path = path
        self.cache = cache

    @property
    def name(self) -> str:
        """The layer, as messages name it."""
        return f"Layer {self.path}: {type(self.cache).__name__}"

    @abstractmethod
    def begin(self) -> None:
        """Keep what is needed to go back; nothing is copied."""

    @abstractmethod
    def window(self) -> int | None:
        """Tokens appended since ``begin``; ``None`` where only the cache itself knows."""

    @abstractmethod
    def rows(self) -> int | None:
        """Rows of the batch; ``None`` where only the cache itself knows."""

    def check(self, keep: int | list[int]) -> None:  # noqa: B027 - most take every count
        """Raise ``BadRound`` where ``rollback(keep, …)`` cannot be done."""

    @abstractmethod
    def rollback(self, keep: int | list[int], window: int) -> None:
        """Keep the first ``keep`` of a window of so many tokens, or so many of each row."""

    def commit(self) -> None:  # noqa: B027 - most have nothing to drop
        """Drop what was kept to go back."""

    @abstractmethod
    def abandon(self) -> None:
        """Go back to where ``begin`` was, after any part of a window."""

    def replace(self, cache: Any) -> None:
        """Go on with ``cache``, which took the place of the old one in the list."""
        self.cache = cache


class _Own(Part):
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


class _Trimmed(Part):
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


class _Ring(Part):
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


class _Recurrent(Part):
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
