"""In a distributed run every rank resumes the same number of tokens, or collectives deadlock.

Each rank has a memory and a store of its own, and may reach another offset. The ranks lower
their limit to the least that any of them reached, until all name the same offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Agree = Callable[[int], tuple[int, int]]
"""Tells the other ranks a number, and answers the least and the greatest that a rank told."""


def between_ranks() -> Agree | None:
    """The agreement of this process's group; ``None`` where it is alone."""
    import mlx.core as mx

    if mx.distributed.init().size() == 1:
        return None

    def agree(value: int) -> tuple[int, int]:
        told = mx.array([value], mx.int32)
        ends = [mx.distributed.all_min(told), mx.distributed.all_max(told)]
        both: Any = mx.concatenate(ends).tolist()
        return both[0], both[1]

    return agree


def common_offset(reach: Callable[[int], int], limit: int, agree: Agree) -> int:
    """The largest offset up to ``limit`` that all ranks reach; every rank answers the same.

    ``reach`` answers the largest offset of this rank up to a limit, 0 where there is none.
    """
    while True:
        least, most = agree(reach(limit) if limit > 0 else 0)
        if least == most:
            return least
        limit = least


def any_rank(told: bool) -> bool:
    """Whether any rank tells so; all of them must ask."""
    import mlx.core as mx

    return bool(mx.distributed.all_max(mx.array(int(told), mx.int32)).item())


def rank_name() -> str:
    """What tells the shards of this rank from those of others; empty where it is alone."""
    import mlx.core as mx

    group = mx.distributed.init()
    return f"rank {group.rank()} of {group.size()}" if group.size() > 1 else ""
