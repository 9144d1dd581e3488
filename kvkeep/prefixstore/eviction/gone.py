"""What was evicted, remembered by its digest: bounded, without a token, and a little forgetful.

A record says that the prompt which begins with some tokens was stored, and is not any more. It
tells a later miss ``evicted`` from ``no_prefix``, and a policy what came back soon. Records
are filed by a part of their digest, one to a slot; a new one takes the place of an old one
there. So the memory is bounded, no order is kept, and about as many of the latest records are
known as there are slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

SLOTS = 1 << 16


def digest_of(start: bytes, runs: Iterable[Any]) -> bytes:
    """16 bytes for the ids of ``runs``, one after the other; ``start`` keeps spaces apart."""
    digest = xxhash.xxh3_128(start)
    for run in runs:
        digest.update(np.ascontiguousarray(run, np.int64).data)
    return digest.digest()


def slot_of(digest: bytes) -> int:
    """Where the record of a digest is filed."""
    return int.from_bytes(digest[:4], "big") % SLOTS
