"""Diverging: a prompt that leaves a stored one after 3,000 of its 4,096 tokens.

Measured: tokens resumed and seconds, beside ``mlx_lm`` loading all of it and trimming.
"""

from __future__ import annotations

from benchmarks import pagecache
from benchmarks.harness import Answer, Bench, Result, column
from benchmarks.restore import prepare
from benchmarks.rows import LARGE
from benchmarks.steps import restore_kvkeep, restore_mlx_lm


def measure(bench: Bench) -> Result:
    """Restore the shared part warm in each round."""
    count, shared = (512, 300) if bench.quick else (4096, 3000)
    result = Result(f"A prompt that shares {shared:,} of {count:,} tokens")
    with bench.scratch() as folder:
        store, file = prepare(bench, folder, LARGE, count)
        common = {"shape": LARGE.json(), "count": count, "shared": shared}

        def kvkeep(_: int) -> Answer:
            pagecache.warm(store / "data.mdb")
            return bench.step(restore_kvkeep, folder=store, **common)

        def mlx_lm(_: int) -> Answer:
            pagecache.warm(file)
            return bench.step(restore_mlx_lm, file=file, **common)

        found = bench.interleaved({"kvkeep": kvkeep, "mlx_lm": mlx_lm})
    result.line("kvkeep: open and resume, warm", column(found["kvkeep"], "seconds"))
    result.line("mlx_lm: load and trim, warm", column(found["mlx_lm"], "seconds"))
    result.goal("kvkeep: tokens resumed", column(found["kvkeep"], "offset"), shared, "", more=True)
    return result
