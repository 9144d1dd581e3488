"""Token ids as one flat int64 array, whatever they came as."""

from __future__ import annotations

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
    """How many leading ids are equal."""
    length = min(len(left), len(right))
    if length == 0 or left[0] != right[0]:
        return 0
    equal = left[:length] == right[:length]
    return length if equal.all() else int(equal.argmin())
