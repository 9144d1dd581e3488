"""The first token after a resume: the first three positions appended to every layer.

Measured on what was restored warm, by kvkeep and by ``mlx_lm``. A restored cache without room
is copied whole when it grows.

To reach: the first costs what the second does, within noise: no more than a tenth of what
copying the cache takes.
"""

from __future__ import annotations

from benchmarks import pagecache
from benchmarks.harness import Answer, Bench, Result
from benchmarks.restore import prepare
from benchmarks.rows import LARGE, MIB
from benchmarks.steps import copy_memory, restore_kvkeep, restore_mlx_lm


def measure(bench: Bench) -> Result:
    """Restore and append in each round."""
    count = 512 if bench.quick else 4096
    nbytes = LARGE.nbytes(count)
    result = Result(f"The first tokens after restoring {nbytes // MIB} MiB")
    with bench.scratch() as folder:
        store, file = prepare(bench, folder, LARGE, count)
        common = {"shape": LARGE.json(), "count": count}

        def kvkeep(_: int) -> Answer:
            pagecache.warm(store / "data.mdb")
            return bench.step(restore_kvkeep, folder=store, **common)

        def mlx_lm(_: int) -> Answer:
            pagecache.warm(file)
            return bench.step(restore_mlx_lm, file=file, **common)

        found = bench.interleaved(
            {
                "kvkeep": kvkeep,
                "mlx_lm": mlx_lm,
                "memory": lambda _: bench.step(copy_memory, nbytes=nbytes),
            }
        )
    for who in ("kvkeep", "mlx_lm"):
        for place, nth in enumerate(("1st", "2nd", "3rd")):
            seconds = [a["first_tokens"][place] * 1e3 for a in found[who]]
            result.line(f"{who}: {nth} token", seconds, "ms")
    excess = [
        (a["first_tokens"][0] - a["first_tokens"][1]) / copy["touched"]
        for a, copy in zip(found["kvkeep"], found["memory"], strict=True)
    ]
    result.goal("kvkeep: (1st − 2nd) ÷ copying the cache", excess, 0.1)
    return result
