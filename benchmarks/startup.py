"""Starting: seconds of ``kvkeep --help``, in a process of its own each time.

Beside it Python alone, and the help of ``mlx_lm``'s program for prompt caches.

To reach: 0.25 s.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.harness import HOME, Answer, Bench, Result, Step, column

TIMES = 5


def measure(bench: Bench) -> Result:
    """The fastest of a few starts in each round."""
    result = Result("Starting, seconds of a whole process")
    commands = {
        "python alone": ["-c", "pass"],
        "kvkeep --help": ["-m", "kvkeep.cli", "--help"],
        "mlx_lm.cache_prompt --help": ["-m", "mlx_lm", "cache_prompt", "--help"],
    }

    def start(words: list[str]) -> Answer:
        times = TIMES if "mlx_lm" not in words else 1
        return {"seconds": min(_seconds([sys.executable, *words]) for _ in range(times))}

    def step(words: list[str]) -> Step:
        return lambda _: start(words)

    found = bench.interleaved({name: step(words) for name, words in commands.items()})
    for name in ("python alone", "mlx_lm.cache_prompt --help"):
        result.line(name, column(found[name], "seconds"))
    result.goal("kvkeep --help", column(found["kvkeep --help"], "seconds"), 0.25, "s")
    return result


def _seconds(words: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(words, check=True, cwd=HOME, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
