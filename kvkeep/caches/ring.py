"""Which slot of a ring holds which position: the arithmetic of ``RotatingKVCache``.

A ring holds the first ``keep`` positions and the newest ones. ``slots`` is the length of its
arrays, ``index`` the slot behind the newest row.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvkeep.errors import MalformedCache


def floor(offset: int, slots: int, max_size: int) -> int:
    """The first offset whose newest ``max_size`` positions are all held."""
    return offset - slots + max_size if offset > slots else 0


def layout(
    offset: int, slots: int, index: int, max_size: int, keep: int
) -> tuple[tuple[int, int, int], ...]:
    """The positions held, as (position, slot, length), in the order of positions.

    Raises ``MalformedCache`` where no sequence of appends leads to such a ring.
    """
    lost = offset - slots
    if lost <= 0:
        # More than max_size slots are never left with room behind the newest row.
        if index == offset and (slots <= max_size or lost == 0):
            return ((0, 0, offset),)
    elif slots >= max_size and keep < index <= slots and (slots == max_size or index == slots):
        first = lost + keep
        older = slots - index
        parts = (
            (0, 0, keep),
            (first, index, older),
            (first + older, keep, index - keep),
        )
        return tuple(part for part in parts if part[2])
    raise MalformedCache(
        f"No ring of {max_size} positions that keeps {keep} is at offset {offset} with {slots} "
        f"slots and write index {index}; was it trimmed after it wrapped?"
    )


def laid_out(max_size: int, meta: Mapping[str, object] | None, p: int) -> tuple[int, int]:
    """Slots and index of a ring at ``p``: those of a snapshot, or of the temporal order.

    Raises ``MalformedCache`` where ``meta`` holds no such numbers.
    """
    if meta is None:
        return min(p, max_size), min(p, max_size)
    slots, index = meta.get("slots"), meta.get("index")
    if type(slots) is not int or type(index) is not int or slots < 0 or index < 0:
        raise MalformedCache(f"A ring cannot have {slots!r} slots and write index {index!r}")
    return slots, index
