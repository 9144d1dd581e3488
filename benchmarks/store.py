"""Storing: a cache of 512 MiB that nobody stored before.

Measured: how long the caller is busy, and when the snapshot is durable, beside ``mlx_lm``'s
save without and with fsync. Ceilings: writing a plain file with fsync, and copying as much
memory. No number of its own to reach: the next turn has one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.harness import Answer, Bench, Result, column, ratios
from benchmarks.rows import LARGE, MIB
from benchmarks.steps import copy_memory, store_kvkeep, store_mlx_lm, write_plain


def measure(bench: Bench) -> Result:
    """Store once in each round, every time into a new folder or file."""
    count = 512 if bench.quick else 4096
    nbytes = LARGE.nbytes(count)
    result = Result(f"Storing {nbytes // MIB} MiB of new rows")
    with bench.scratch() as folder:

        def kvkeep(number: int) -> Answer:
            made = folder / f"store{number}"
            answer = bench.step(store_kvkeep, folder=made, shape=LARGE.json(), count=count)
            shutil.rmtree(made)
            return answer

        def mlx_lm(number: int) -> Answer:
            file = folder / f"{number}.safetensors"
            answer = bench.step(store_mlx_lm, file=file, shape=LARGE.json(), count=count)
            file.unlink()
            return answer

        def plain(number: int) -> Answer:
            file = folder / f"{number}.plain"
            answer = bench.step(write_plain, file=file, nbytes=nbytes)
            Path(file).unlink()
            return answer

        found = bench.interleaved(
            {
                "kvkeep": kvkeep,
                "mlx_lm": mlx_lm,
                "plain file": plain,
                "memory": lambda _: bench.step(copy_memory, nbytes=nbytes),
            }
        )
    ours, theirs = found["kvkeep"], found["mlx_lm"]
    result.line("kvkeep: the caller is busy", column(ours, "caller"))
    result.line("kvkeep: durable", column(ours, "durable"))
    result.line("mlx_lm: save returns", column(theirs, "caller"))
    result.line("mlx_lm: save and fsync", column(theirs, "durable"))
    result.line("ceiling: plain file and fsync", column(found["plain file"], "seconds"))
    result.line("ceiling: memory copied into fresh pages", column(found["memory"], "fresh"))
    result.line(
        "kvkeep durable ÷ mlx_lm save and fsync",
        ratios(column(ours, "durable"), column(theirs, "durable")),
        "×",
    )
    return result
