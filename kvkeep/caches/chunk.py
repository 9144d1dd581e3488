"""Which positions a chunked attention holds: the arithmetic of ``ChunkedKVCache``.

A cut takes the front away; ``start`` is the first position that is left.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvkeep.errors import MalformedCache


def floor(start: int, chunk_size: int) -> int:
    """The first offset whose newest ``chunk_size`` positions are all held."""
    return start + chunk_size if start else 0


def check(name: str, offset: int, start: int, chunk_size: int) -> None:
    """Raise ``MalformedCache`` where no appends and cuts lead to what the cache ``name`` holds."""
    if chunk_size == 0 or start > offset:
        raise MalformedCache(f"{name} of {chunk_size} positions holds [{start}, {offset})")
    if start and offset - start < chunk_size:
        raise MalformedCache(
            f"{name} holds {offset - start} positions from {start} on, fewer than its "
            f"{chunk_size}: it was trimmed after its front was cut"
        )


def started(chunk_size: int, meta: Mapping[str, object] | None, p: int) -> int:
    """The first position of a cache rebuilt at ``p``: a snapshot's, or the newest ``chunk_size``.

    Raises ``MalformedCache`` where ``meta`` holds no such number, or one behind ``p``.
    """
    if meta is None:
        return max(0, p - chunk_size)
    start = meta.get("start_position")
    if type(start) is not int or start < 0:
        raise MalformedCache(f"start_position is {start!r} where an integer of at least 0 is due")
    if start > p:
        raise MalformedCache(f"A window that starts at {start} cannot resume at {p}")
    return start
