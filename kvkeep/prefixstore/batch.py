"""One request out of a batch layout, as caches of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvkeep.caches.rounds import check_committed
from kvkeep.errors import BatchCache, Refused, UncommittedRound


def take_row(caches: Sequence[Any], row: int) -> list[Any]:
    """The caches of request ``row``, without its padding and without its neighbours.

    The batch stays as it is. Rows of recurrent state are views that keep the whole batch
    alive: copy what is needed and drop them. Raises ``Refused`` for a row that is not there,
    ``BatchCache`` while a prefill with right padding is not finished, and ``UncommittedRound``,
    naming the layer, while a speculative round is open.
    """
    for number, cache in enumerate(caches):
        try:
            check_committed(cache)
        except UncommittedRound as error:
            raise UncommittedRound(f"Layer {number}: {error.problem}") from None
    return [_row(cache, row) for cache in caches]


def _row(cache: Any, row: int) -> Any:
    from mlx_lm.models import cache as mlx_lm_cache

    classes: Any = mlx_lm_cache
    if isinstance(cache, classes.CacheList):
        return classes.CacheList(*(_row(inner, row) for inner in cache.caches))
    pending = ("_right_padding", "_lengths", "lengths")
    if any(getattr(cache, name, None) is not None for name in pending):
        raise BatchCache(
            f"{type(cache).__name__} is in the middle of a padded prefill",
            remedy="Call its finalize() first, then take the row.",
        )
    if isinstance(cache, classes.ArraysCache):
        _check(cache.batch_size, row)
        single = classes.ArraysCache(len(cache.cache))
        single.cache = [x[row : row + 1] if x is not None else None for x in cache.cache]
        return single
    if not hasattr(cache, "extract"):
        _check(1, row)
        return cache
    _check(cache.offset.size, row)
    return cache.extract(row)


def _check(size: int, row: int) -> None:
    if not 0 <= row < size:
        raise Refused(f"Row {row} of a batch of {size}", remedy="Rows are counted from 0.")
