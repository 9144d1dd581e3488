from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvkeep.prefixstore import threads
from kvkeep.prefixstore.threads import run_all


@pytest.fixture(params=[1, 3])
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The threads of a machine with one core, and with three."""
    monkeypatch.setattr(threads, "_threads", lambda: request.param)
    threads._pool.cache_clear()
    yield int(request.param)
    threads._pool.cache_clear()


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
