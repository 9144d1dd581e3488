"""The next turn: a stored conversation grows, and only its new rows are written.

Measured: the caller's and the durable seconds and the bytes of storing 512 tokens more on
4,096 (128 KiB a token) and 1,000 more on 32,000 (8 KiB a token), beside a full ``mlx_lm``
save of the grown cache. In each round another continuation grows from the same prefix, in a
fresh process that resumed it. Ceiling: writing a plain file of as many new bytes, and fsync.

To reach: 1,000 on 32,000 takes at most 1/15 of the full save, in bytes and in seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import Answer, Bench, Result, column, ratios
from benchmarks.restore import prepare
from benchmarks.rows import LARGE, LONG, MIB, Shape, check, extend, tokens
from benchmarks.steps import load_imports, load_mlx_lm, open_space, save_mlx_lm, write_plain


def grow_kvkeep(folder: str, shape: dict[str, int], stored: int, new: int, number: int) -> Answer:
    """Resume ``stored`` tokens, append ``new`` ones, and snapshot."""
    load_imports()
    kind = Shape(**shape)
    seed = 1 + number
    prompt = np.concatenate([tokens(stored, 0), tokens(new, seed)])
    store, space = open_space(folder, kind)
    hit = space.resume(prompt)
    assert hit.offset == stored, hit.decision
    extend(hit.caches, kind, stored + new, seed)
    os.sync()
    start = time.perf_counter()
    receipt = space.snapshot(prompt, hit.caches)
    caller = time.perf_counter() - start
    receipt.wait()
    durable = time.perf_counter() - start
    assert receipt.stored, receipt.reason
    assert receipt.tokens_new == new, receipt
    again = space.resume(np.append(prompt, 1))
    assert again.offset == stored + new, again.decision
    check(again.caches, kind, 0, stored, 0)
    check(again.caches, kind, stored, stored + new, seed)
    store.close()
    return {"caller": caller, "durable": durable, "bytes": receipt.bytes_written}


def grow_mlx_lm(file: str, shape: dict[str, int], stored: int, new: int, number: int) -> Answer:
    """Load ``stored`` tokens, append ``new`` ones, and save all of them to a new file."""
    load_imports()
    kind = Shape(**shape)
    caches = load_mlx_lm(file)
    extend(caches, kind, stored + new, 1 + number)
    os.sync()
    grown = Path(f"{file}.{number}.safetensors")
    answer = save_mlx_lm(str(grown), caches)
    grown.unlink()
    return answer


def measure(bench: Bench) -> Result:
    """Both sizes; a new continuation in each round."""
    result = Result("The next turn of a stored conversation")
    if bench.quick:
        sizes = [(LARGE, 1024, 128), (LONG, 8000, 250)]
    else:
        sizes = [(LARGE, 4096, 512), (LONG, 32_000, 1000)]
    for shape, stored, new in sizes:
        found = _grow(bench, shape, stored, new)
        ours, theirs = found["kvkeep"], found["mlx_lm"]
        name = f"+{new:,} on {stored:,}"
        result.line(f"{name}: kvkeep, the caller is busy", column(ours, "caller", 1e3), "ms")
        result.line(f"{name}: kvkeep, durable", column(ours, "durable", 1e3), "ms")
        result.line(f"{name}: kvkeep writes", column(ours, "bytes", 1 / MIB), "MiB")
        result.line(f"{name}: mlx_lm saves all", column(theirs, "caller", 1e3), "ms")
        result.line(f"{name}: mlx_lm, with fsync", column(theirs, "durable", 1e3), "ms")
        result.line(f"{name}: mlx_lm writes", column(theirs, "bytes", 1 / MIB), "MiB")
        plain = column(found["plain"], "seconds", 1e3)
        result.line(f"{name}: ceiling: plain file, fsync", plain, "ms")
    # The last size is the one with numbers to reach.
    for label, key in (("bytes", "bytes"), ("caller", "caller"), ("durable", "durable")):
        fewer = ratios(column(theirs, key), column(ours, key))
        result.goal(f"{name}, {label}: mlx_lm ÷ kvkeep", fewer, 15, more=True)
    return result


def _grow(bench: Bench, shape: Shape, stored: int, new: int) -> dict[str, list[Answer]]:
    size = {"shape": shape.json(), "stored": stored, "new": new}
    rows = shape.nbytes(new)
    with bench.scratch() as folder:
        store, file = prepare(bench, folder, shape, stored)
        return bench.interleaved(
            {
                "kvkeep": lambda n: bench.step(grow_kvkeep, folder=store, number=n, **size),
                "mlx_lm": lambda n: bench.step(grow_mlx_lm, file=file, number=n, **size),
                "plain": lambda n: bench.step(write_plain, file=folder / str(n), nbytes=rows),
            }
        )
