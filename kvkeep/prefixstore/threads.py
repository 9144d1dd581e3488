"""A few threads for copying, shared by the whole process.

numpy lets go of the interpreter while it copies, so that two threads copy twice as much. More
threads than cores only wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

Job = TypeVar("Job")
Answer = TypeVar("Answer")

MOST = 8


def run_all(work: Callable[[Job], Answer], jobs: Sequence[Job]) -> list[Answer]:
    """The answers of ``work`` to every job, in order, a few at a time.

    Returns or raises once no job runs any more, so that what they work on may go away then.
    The error is that of the first job, in order, that failed.
    """
    if len(jobs) < 2 or _threads() < 2:
        return [work(job) for job in jobs]
    futures = [_pool().submit(work, job) for job in jobs]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def _threads() -> int:
    return min(MOST, os.cpu_count() or 1)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "kvkeep-copy")


# The threads of a parent do not run in its children.
os.register_at_fork(after_in_child=_pool.cache_clear)
