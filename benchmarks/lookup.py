"""Looking up: what a lookup costs before anything is restored.

A prompt of 100,000 tokens is looked up (``Space.explain``) in stores of 10, 1,000 and 10,000
conversations. They share system prompts, branch at turns, and hold rows of 4 bytes a token.
Among them are the prompt's own conversation, stored in one piece, and another of the same
length that was stored turn by turn, so that its path has 100 edges. Measured warm: the median
of many lookups in a fresh process, given a numpy array, a Python list and an ``mx.array``.

To reach among 10,000: 2 ms given an integer array, 5 ms given a list; and growth with the
edges on the path, not with the conversations: at most 1.5 times what it costs among 10.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Answer, Bench, Result, milliseconds, say
from benchmarks.rows import Shape, empty
from benchmarks.steps import load_imports, open_space

TINY = Shape(1, 1, 1)
LENGTH = 100_000
TURNS = 100
SYSTEMS = 20


def fill(folder: str, start: int, stop: int, long: bool) -> Answer:
    """Store conversations ``[start, stop)``, and first the two long ones where ``long``."""
    load_imports()
    store, space = open_space(folder, TINY)
    began = time.perf_counter()
    if long:
        space.snapshot(_long(0), _caches(LENGTH))
        turns = _long(1)
        for turn in range(1, TURNS + 1):
            count = turn * LENGTH // TURNS
            space.snapshot(turns[:count], _caches(count))
    for number in range(start, stop):
        conversation = _conversation(number)
        space.snapshot(conversation, _caches(len(conversation)))
    store.flush()
    seconds = time.perf_counter() - began
    stored, used = len(store.conversations()), store.used_bytes
    store.close()
    return {"seconds": seconds, "conversations": stored, "bytes": used}


def look_up(folder: str, repeats: int) -> Answer:
    """Median milliseconds of a lookup, by what the prompt is given as."""
    load_imports()
    import mlx.core as mx

    store, space = open_space(folder, TINY)
    prompt, turns = np.append(_long(0), 1), np.append(_long(1), 1)
    as_list, as_mx = prompt.tolist(), mx.array(prompt)
    mx.eval(as_mx)
    short = _conversation(3)
    answer: Answer = {
        "array": _time(lambda: space.explain(prompt), LENGTH, repeats),
        "list": _time(lambda: space.explain(as_list), LENGTH, repeats),
        "mx": _time(lambda: space.explain(as_mx), LENGTH, repeats),
        "edges": _time(lambda: space.explain(turns), LENGTH, repeats),
        "short": _time(lambda: space.explain(short), len(short) - 1, repeats),
        "convert": milliseconds(lambda: np.asarray(as_list), repeats),
    }
    store.close()
    return answer


def measure(bench: Bench) -> Result:
    """Fill in three steps and look up after each, in each round."""
    sizes = [10, 100] if bench.quick else [10, 1000, 10_000]
    result = Result(f"Looking up a prompt of {LENGTH:,} tokens")
    found: dict[int, list[Answer]] = {}
    with tempfile.TemporaryDirectory(dir=_in_memory(bench)) as folder:
        before = 0
        for size in sizes:
            say(f"  filling up to {size:,} conversations")
            bench.step(fill, folder=folder, start=before, stop=size, long=before == 0)
            before = size
            found[size] = [
                bench.step(look_up, folder=folder, repeats=30) for _ in range(bench.rounds)
            ]
    names = {
        "array": "numpy array",
        "list": "Python list",
        "mx": "mx.array",
        "edges": "numpy array, a path of 100 edges",
        "short": "numpy array, a stored conversation",
    }
    for name, label in names.items():
        for size in sizes:
            result.line(f"{label}, among {size:,}", [a[name] for a in found[size]], "ms")
    last, first = found[sizes[-1]], found[sizes[0]]
    result.line("the list's conversion alone (numpy)", [a["convert"] for a in last], "ms")
    result.goal("numpy array", [a["array"] for a in last], 2, "ms")
    result.goal("Python list", [a["list"] for a in last], 5, "ms")
    growth = [a["array"] / b["array"] for a, b in zip(last, first, strict=True)]
    result.goal(f"among {sizes[-1]:,} ÷ among {sizes[0]}", growth, 1.5)
    return result


def _time(look: Callable[[], Any], offset: int, repeats: int) -> float:
    """Milliseconds of ``look``, which must decide for ``offset``."""
    for _ in range(3):
        assert look().offset == offset, look()
    return milliseconds(look, repeats)


def _long(number: int) -> Any:
    return np.concatenate(
        [_system(number), np.random.default_rng((7, number)).integers(0, 150_000, LENGTH)]
    )[:LENGTH]


def _conversation(number: int) -> Any:
    """A system prompt, a first turn that ten conversations share, and turns of its own."""
    rng = np.random.default_rng((8, number))
    shared = np.random.default_rng((9, number // 10)).integers(0, 150_000, 200)
    own = rng.integers(0, 150_000, int(rng.integers(100, 2000)))
    return np.concatenate([_system(number // 10), shared, own])


def _system(number: int) -> Any:
    kind = number % SYSTEMS
    return np.random.default_rng((10, kind)).integers(0, 150_000, 300 + 50 * kind)


def _caches(count: int) -> list[Any]:
    import mlx.core as mx

    (cache,) = empty(TINY)
    rows = mx.zeros((1, 1, count, 1), mx.bfloat16)
    cache.update_and_fetch(rows, rows)
    mx.eval(cache.keys, cache.values)
    return [cache]


def _in_memory(bench: Bench) -> Path:
    """A disk in memory where there is one, as ten thousand commits are not what is measured."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else bench.folder
