"""Events: what it costs that every lookup leaves a record.

Measured in a store whose ring is full, with lookups of 1,000 tokens that match in part: the
time that the caller spends on the record, as the difference between lookups with and without
(in turns, so that the machine's moods meet both) and alone; the time of the writer's thread
for an event in a batch of 64, committed; and the bytes of the full ring.

``python -m benchmarks.events`` takes this one measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Answer, Bench, Result, column
from benchmarks.rows import Shape, empty
from benchmarks.steps import load_imports, open_space

TINY = Shape(1, 1, 1)
TOKENS = 1000


def record(folder: str, ring: int, repeats: int) -> Answer:
    """Microseconds of a lookup and of its record, with ``ring`` events there before."""
    load_imports()
    import numpy as np

    from kvkeep.prefixstore import events
    from kvkeep.prefixstore.event import LOOKUP

    events.RING = ring
    store, space = open_space(folder, TINY)
    prompt = np.random.default_rng(1).integers(0, 150_000, TOKENS)
    space.snapshot(prompt[: TOKENS // 2], _caches(TOKENS // 2)).wait()
    log: Any = space._core.events
    found = space._find(prompt, 1, 0)
    for _ in range(ring):
        space._count(LOOKUP, found, prompt, 0.0, "warm")
        if len(log._events) >= events.BATCH:
            log.write()
    store.flush()
    add = log.add
    with_records, without = [], []
    for _ in range(repeats):
        log.add = add
        with_records.append(_microseconds(lambda: space.resume(prompt)))
        log.add = _nothing
        without.append(_microseconds(lambda: space.resume(prompt)))
    log.add = add
    store.flush()
    alone = [
        _microseconds(lambda: space._count(LOOKUP, found, prompt, 0.0, "alone"))
        for _ in range(events.BATCH // 2)
    ]
    store.flush()
    batches = []
    for _ in range(20):
        for _ in range(events.BATCH - 1):
            space._count(LOOKUP, found, prompt, 0.0, "batch")
        batches.append(_microseconds(log.write) / (events.BATCH - 1))
    with store.env.begin() as txn:
        kept = sum(len(key) + len(value) for key, value in txn.items("events"))
        number = txn.count("events")
    store.close()
    return {
        "lookup": statistics.median(without),
        "difference": statistics.median(with_records) - statistics.median(without),
        "alone": statistics.median(alone),
        "batch": statistics.median(batches),
        "bytes": kept / number,
        "events": number,
    }


def measure(bench: Bench) -> Result:
    """Fill a ring and measure in it, in each round."""
    ring = 1000 if bench.quick else 100_000
    result = Result(f"The record of a lookup, in a ring of {ring:,}")
    found = []
    for _ in range(bench.rounds):
        with bench.scratch() as folder:
            found.append(bench.step(record, folder=folder / "s", ring=ring, repeats=300))
    result.line("a lookup of 1,000 tokens without a record", column(found, "lookup"), "µs")
    result.line("and what its record adds to it", column(found, "difference"), "µs")
    result.line("the record alone, for the caller", column(found, "alone"), "µs")
    result.line("the writer's thread, an event in a batch", column(found, "batch"), "µs")
    result.line("bytes of an event in the ring", column(found, "bytes"), "B")
    result.goal("the record alone, for the caller", column(found, "alone"), 20, "µs")
    return result


def _nothing(*args: Any) -> None:
    """Stands in for the record."""


def _microseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def _caches(count: int) -> list[Any]:
    import mlx.core as mx

    (cache,) = empty(TINY)
    rows = mx.zeros((1, 1, count, 1), mx.bfloat16)
    cache.update_and_fetch(rows, rows)
    mx.eval(cache.keys, cache.values)
    return [cache]


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    from benchmarks import events as here
    from benchmarks import table

    with tempfile.TemporaryDirectory() as scratch:
        print(table.render([here.measure(Bench(Path(scratch), rounds=3, quick=False))]))
