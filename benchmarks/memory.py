"""Memory: the most that a process holds while it stores and while it restores.

Measured in processes that do nothing else, sampled every millisecond: memory of their own
(Linux: anonymous pages; pages of the mapped store are the kernel's to take back and are
listed apart), less what they held before. Elsewhere the peak of the whole process is taken.

To reach: storing holds the new rows and one chunk of 8 MiB more; restoring holds the cache
and one chunk. The interpreter's own small change is allowed 16 MiB.
"""

from __future__ import annotations

import re
import resource
import sys
import threading
from pathlib import Path

import numpy as np

from benchmarks import pagecache
from benchmarks.harness import Answer, Bench, Result, column
from benchmarks.restore import prepare
from benchmarks.rows import LARGE, MIB, Shape, empty, extend, tokens
from benchmarks.steps import load_imports, load_mlx_lm, open_space

CHUNK = 8
SMALL_CHANGE = 16
STATUS = Path("/proc/self/status")


class Peak:
    """Samples this process's memory in a thread while the block runs."""

    def __enter__(self) -> Peak:
        self.before = self.most = self.least = _held()
        self.mapped = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self._note()

    @property
    def extra(self) -> float:
        """MiB beyond what was held before."""
        return (self.most - self.before) / MIB

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self._note()

    def _note(self) -> None:
        self.most = max(self.most, _held())
        self.mapped = max(self.mapped, _status("RssFile"))


def store(folder: str, shape: dict[str, int], count: int) -> Answer:
    """Snapshot a cache while memory is sampled."""
    load_imports()
    kind = Shape(**shape)
    caches = empty(kind)
    extend(caches, kind, count, 0)
    kept, space = open_space(folder, kind)
    with Peak() as peak:
        receipt = space.snapshot(tokens(count, 0), caches)
        receipt.wait()
    assert receipt.stored, receipt.reason
    kept.close()
    return {"extra": peak.extra}


def restore(folder: str, shape: dict[str, int], count: int) -> Answer:
    """Resume while memory is sampled."""
    load_imports()
    kind = Shape(**shape)
    kept, space = open_space(folder, kind)
    prompt = np.append(tokens(count, 0), 1)
    with Peak() as peak:
        hit = space.resume(prompt)
    assert hit.offset == count, hit.decision
    held = sum(cache.nbytes for cache in hit.caches)
    kept.close()
    return {"extra": peak.extra, "cache": held / MIB, "mapped": peak.mapped / MIB}


def load(file: str) -> Answer:
    """``load_prompt_cache`` while memory is sampled."""
    load_imports()
    with Peak() as peak:
        caches = load_mlx_lm(file)
    held = sum(cache.nbytes for cache in caches)
    return {"extra": peak.extra, "cache": held / MIB}


def measure(bench: Bench) -> Result:
    """Store and restore in each round."""
    count = 512 if bench.quick else 4096
    rows = LARGE.nbytes(count) / MIB
    result = Result(f"Memory: storing and restoring {rows:.0f} MiB")
    with bench.scratch() as folder:
        kept, file = prepare(bench, folder, LARGE, count)
        pagecache.warm(kept / "data.mdb")
        common = {"shape": LARGE.json(), "count": count}
        found = bench.interleaved(
            {
                "store": lambda n: bench.step(store, folder=folder / f"new{n}", **common),
                "restore": lambda _: bench.step(restore, folder=kept, **common),
                "load": lambda _: bench.step(load, file=file),
            }
        )
    result.line("kvkeep, storing: peak", column(found["store"], "extra"), "MiB")
    result.line("kvkeep, restoring: peak", column(found["restore"], "extra"), "MiB")
    result.line("kvkeep, restoring: the cache itself", column(found["restore"], "cache"), "MiB")
    result.line("kvkeep, restoring: pages of the map", column(found["restore"], "mapped"), "MiB")
    result.line("mlx_lm, loading: peak", column(found["load"], "extra"), "MiB")
    over = [a["extra"] - rows for a in found["store"]]
    result.goal("storing: beyond the new rows", over, CHUNK + SMALL_CHANGE, "MiB")
    over = [a["extra"] - a["cache"] for a in found["restore"]]
    result.goal("restoring: beyond the cache", over, CHUNK + SMALL_CHANGE, "MiB")
    return result


def _held() -> int:
    if STATUS.exists():
        return _status("RssAnon")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    if not STATUS.exists():
        return 0
    found = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())
    return int(found[1]) * 1024 if found else 0
