"""A few threads for copying and a few for waiting on the disk, shared by the whole process.

numpy lets go of the interpreter while it copies, so that two threads copy twice as much. More
threads than cores only wait for each other. Reading is different: it waits for the disk.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

Job = TypeVar("Job")
Read = TypeVar("Read")
Answer = TypeVar("Answer")

MOST = 8
AHEAD = 2 * MOST
"""Jobs that are read before their turn: enough for the disk, and no more than the page cache
can be trusted to keep. Never below ``MOST``, see ``run_ahead``."""


def run_all(work: Callable[[Job], Answer], jobs: Sequence[Job]) -> list[Answer]:
    """The answers of ``work`` to every job, in order, a few at a time.

    Returns or raises once no job runs any more, so that what they work on may go away then.
    The error is that of the first job, in order, that failed.
    """
    if len(jobs) < 2 or _threads() < 2:
        return [work(job) for job in jobs]
    futures = [_copiers().submit(work, job) for job in jobs]
    try:
        return [future.result() for future in futures]
    finally:
        _let_go(futures)


def run_ahead(
    read: Callable[[Job], Read],
    work: Callable[[Job, Read], Answer],
    jobs: Sequence[Job],
    readers: int,
) -> list[Answer]:
    """As ``run_all`` of ``work(job, read(job))``, with up to ``readers`` reads running ahead."""
    if len(jobs) < 2 or _threads() < 2:
        return [work(job, read(job)) for job in jobs]
    pool = _readers(readers)
    begun = itertools.count()
    reads: dict[int, Future[Read]] = {}
    lock = threading.Lock()

    def read_next() -> None:
        with lock:
            number = next(begun)
            if number < len(jobs):
                reads[number] = pool.submit(read, jobs[number])

    def step(number: int) -> Answer:
        # Of the steps before this one, fewer than MOST have not come past here yet.
        read_next()
        return work(jobs[number], reads.pop(number).result())

    for _ in range(AHEAD):
        read_next()
    try:
        return run_all(step, range(len(jobs)))
    finally:
        _let_go(reads.values())


def _let_go(futures: Iterable[Future[Any]]) -> None:
    waiting = [future for future in futures if not future.cancel()]
    wait(waiting)


def _threads() -> int:
    return min(MOST, os.cpu_count() or 1)


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "kvkeep-copy")


@cache
def _readers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "kvkeep-read")


# The threads of a parent do not run in its children.
os.register_at_fork(after_in_child=_copiers.cache_clear)
os.register_at_fork(after_in_child=_readers.cache_clear)
