"""Token ids as one flat int64 array, whatever they came as."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import BadTokens

Tokens = NDArray[np.int64]


def as_tokens(tokens: Any) -> Tokens:
    """Token ids as a contiguous int64 array of shape ``[N]``.

    Takes a list, a numpy array or an ``mx.array`` of integers; negative and 64-bit ids are
    legal (servers key images so). Raises ``BadTokens`` for anything else.
    """
    try:
        array = np.asarray(tokens)
        if array.size == 0 and array.ndim <= 1:
            return np.empty(0, np.int64)
        if array.ndim == 1 and array.dtype.kind in "iu":
            if array.dtype == np.uint64 and int(array.max()) > np.iinfo(np.int64).max:
                raise BadTokens("A token id does not fit 64 signed bits")
            return np.ascontiguousarray(array, dtype=np.int64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadTokens(f"Tokens are not integers: {error}") from error
    raise BadTokens(f"Tokens have shape {array.shape} and type {array.dtype}")


def common_prefix(left: Tokens, right: NDArray[Any]) -> int:
    """How many leading ids are equal. Reads not much more than these."""
    length = min(len(left), len(right))
    start, stop = 0, 1
    while start < length:
        equal = left[start:stop] == right[start:stop]
        if not equal.all():
            return start + int(equal.argmin())
        start, stop = stop, min(length, stop * 4 + 256)
    return length


def insides(tokens: Tokens) -> tuple[tuple[int, int], ...]:
    """The offsets within runs of one negative id, as sorted half-open ranges.

    Such a run is an image: its positions were computed together, so none of them can be
    resumed at. Its two ends are not inside.
    """
    if not len(tokens) or int(tokens.min()) >= 0:
        return ()
    inside = np.flatnonzero((tokens[1:] == tokens[:-1]) & (tokens[1:] < 0)) + 1
    if not len(inside):
        return ()
    runs = np.split(inside, np.flatnonzero(np.diff(inside) > 1) + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


def media_tokens(tokens: Any, media: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """``tokens`` as a key for prompts with images: what the model shows as placeholders.

    Each of ``media`` is ``(start, stop, content)``: the positions that an image, or a sound,
    takes, and its bytes or a digest of them. The placeholder ids there are replaced by one
    negative id made from content and position, so two images never pass for the same prompt,
    and no resume point lies inside one. Raises ``BadTokens`` where a range does not fit.
    """
    ids = as_tokens(tokens).copy()
    for start, stop, content in media:
        if not 0 <= start < stop <= len(ids):
            raise BadTokens(f"Media at [{start}, {stop}) in a prompt of {len(ids)} tokens")
        seed = hashlib.blake2b(start.to_bytes(8, "big") + content, digest_size=8).digest()
        ids[start:stop] = -1 - (int.from_bytes(seed, "big") >> 2)
    keyed: list[int] = ids.tolist()
    return keyed
