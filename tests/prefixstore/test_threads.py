from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvkeep.prefixstore import threads
from kvkeep.prefixstore.threads import run_ahead, run_all


@pytest.fixture(params=[1, 3])
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The threads of a machine with one core, and with three."""
    monkeypatch.setattr(threads, "_threads", lambda: request.param)
    threads._copiers.cache_clear()
    yield int(request.param)
    threads._copiers.cache_clear()


def test_answers_come_in_the_order_of_the_jobs(count: int) -> None:
    def late(job: int) -> int:
        time.sleep(0.001 * (job % 3))
        return job * job

    assert run_all(late, range(50)) == [job * job for job in range(50)]
    assert run_all(late, []) == []


def test_an_error_is_raised_once_no_job_runs(count: int) -> None:
    running: set[int] = set()
    started: set[int] = set()
    lock = threading.Lock()

    def work(job: int) -> None:
        with lock:
            running.add(job)
            started.add(job)
        try:
            if job == 1:
                raise KeyError(job)
            time.sleep(0.05)
        finally:
            with lock:
                running.remove(job)

    with pytest.raises(KeyError, match="1"):
        run_all(work, range(20))
    assert running == set()
    assert 1 in started
    assert len(started) < 20, "jobs that had not begun must not begin any more"


FORKING = """
import os, signal
from kvkeep.prefixstore import threads
threads._threads = lambda: 2
assert threads.run_all(str, range(9)) == [str(i) for i in range(9)]
child = os.fork()
if not child:
    signal.alarm(20)
    good = threads.run_all(str, range(9)) == [str(i) for i in range(9)]
    os._exit(0 if good else 1)
raise SystemExit(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], check=False, timeout=60)
    assert done.returncode == 0


def test_reads_run_ahead_but_not_far(count: int) -> None:
    lock = threading.Lock()
    read: list[int] = []
    worked: list[int] = []
    most = 0

    def fetch(job: int) -> str:
        with lock:
            read.append(job)
        return str(job)

    def work(job: int, fetched: str) -> tuple[int, str]:
        nonlocal most
        time.sleep(0.002)
        with lock:
            most = max(most, len(read) - len(worked))
            worked.append(job)
        return job, fetched

    jobs = range(100, 200)
    assert run_ahead(fetch, work, jobs, 2) == [(job, str(job)) for job in jobs]
    assert sorted(read) == sorted(worked) == list(jobs)
    assert most == 1 if count == 1 else 1 < most <= threads.AHEAD + count


@pytest.mark.parametrize("place", ["read", "work"])
def test_an_error_of_a_read_ahead_is_raised_once_nothing_runs(count: int, place: str) -> None:
    running: set[tuple[str, int]] = set()
    started: set[int] = set()
    lock = threading.Lock()

    def one(where: str, job: int) -> None:
        with lock:
            running.add((where, job))
            started.add(job)
        try:
            if (where, job) == (place, 3):
                raise KeyError(job)
            time.sleep(0.01)
        finally:
            with lock:
                running.remove((where, job))

    with pytest.raises(KeyError, match="3"):
        run_ahead(lambda job: one("read", job), lambda job, _: one("work", job), range(90), 4)
    assert running == set()
    assert 3 in started
    assert len(started) < 90
