"""A crowd: 1, 2 and 8 processes store and restore at once, one store for all.

Every process has a conversation of its own, 32 MiB. All begin at the same moment. Measured: the
seconds until the last of them is durable, and until the last has everything back, beside as
many processes that save and load ``mlx_lm`` files of their own. Compared bit for bit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import Answer, Bench, Result, column, ratios, settle_disk
from benchmarks.rows import LARGE, MIB, Shape, check, empty, extend, tokens
from benchmarks.steps import load_imports, load_mlx_lm, open_space, save_mlx_lm

COUNT = 256
CROWDS = (1, 2, 8)
READY_SECONDS = 120


def store_kvkeep(folder: str, number: int, crowd: int, shape: dict[str, int]) -> Answer:
    """Store a conversation of its own, once all are ready."""
    load_imports()
    kind = Shape(**shape)
    caches = empty(kind)
    extend(caches, kind, COUNT, number)
    store, space = open_space(f"{folder}/store", kind)
    start = _meet(folder, number, crowd)
    receipt = space.snapshot(tokens(COUNT, number), caches)
    receipt.wait()
    done = time.time()
    assert receipt.stored, receipt.reason
    store.close()
    return {"start": start, "done": done}


def restore_kvkeep(folder: str, number: int, crowd: int, shape: dict[str, int]) -> Answer:
    """Resume it, once all are ready."""
    load_imports()
    kind = Shape(**shape)
    start = _meet(folder, number, crowd)
    store, space = open_space(f"{folder}/store", kind)
    hit = space.resume(np.append(tokens(COUNT, number), 1))
    done = time.time()
    assert hit.offset == COUNT, hit.decision
    compared = check(hit.caches, kind, 0, COUNT, number)
    store.close()
    return {"start": start, "done": done, "compared": compared}


def store_mlx_lm(folder: str, number: int, crowd: int, shape: dict[str, int]) -> Answer:
    """Save a file of its own, with fsync, once all are ready."""
    load_imports()
    kind = Shape(**shape)
    caches = empty(kind)
    extend(caches, kind, COUNT, number)
    start = _meet(folder, number, crowd)
    save_mlx_lm(f"{folder}/{number}.safetensors", caches)
    return {"start": start, "done": time.time()}


def restore_mlx_lm(folder: str, number: int, crowd: int, shape: dict[str, int]) -> Answer:
    """Load it, once all are ready."""
    load_imports()
    kind = Shape(**shape)
    start = _meet(folder, number, crowd)
    caches = load_mlx_lm(f"{folder}/{number}.safetensors")
    done = time.time()
    return {"start": start, "done": done, "compared": check(caches, kind, 0, COUNT, number)}


def measure(bench: Bench) -> Result:
    """Each crowd stores, and then restores, in each round."""
    crowds = CROWDS[:2] if bench.quick else CROWDS
    result = Result(f"Many at once: {LARGE.nbytes(COUNT) // MIB} MiB for each process")
    ways: dict[str, tuple[Callable[..., Answer], Callable[..., Answer]]] = {
        "kvkeep": (store_kvkeep, restore_kvkeep),
        "mlx_lm": (store_mlx_lm, restore_mlx_lm),
    }
    with bench.scratch() as folder:
        found = bench.interleaved(
            {
                f"{way} {crowd}": _crowd(bench, folder, crowd, *steps)
                for crowd in crowds
                for way, steps in ways.items()
            }
        )
    for what in ("store", "restore"):
        for crowd in crowds:
            ours, theirs = (column(found[f"{way} {crowd}"], what, 1e3) for way in ways)
            result.line(f"{what}, {crowd} at once: kvkeep", ours, "ms")
            result.line(f"{what}, {crowd} at once: mlx_lm", theirs, "ms")
            result.line(f"{what}, {crowd} at once: kvkeep ÷ mlx_lm", ratios(ours, theirs), "×")
    compared = sum(int(answer["compared"]) for answers in found.values() for answer in answers)
    result.notes.append(f"{compared / MIB:,.0f} MiB compared with what was stored: all bits equal.")
    return result


def _meet(folder: str, number: int, crowd: int) -> float:
    """Wait until all processes are ready; the moment of the start. Raises ``TimeoutError``."""
    Path(folder, f"ready{number}").touch()
    latest = time.time() + READY_SECONDS
    while len(list(Path(folder).glob("ready*"))) < crowd:
        if time.time() > latest:
            raise TimeoutError("Another process of the crowd did not get ready")
        time.sleep(0.001)
    return time.time()


def _crowd(
    bench: Bench,
    scratch: Path,
    crowd: int,
    store: Callable[..., Answer],
    restore: Callable[..., Answer],
) -> Callable[[int], Answer]:
    def take(number: int) -> Answer:
        folder = scratch / f"{store.__name__}-{crowd}-{number}"
        folder.mkdir()
        answer: Answer = {"compared": 0}
        for what, step in (("store", store), ("restore", restore)):
            settle_disk()
            common = {"folder": folder, "crowd": crowd, "shape": LARGE.json()}
            answers = bench.together(step, [{"number": n, **common} for n in range(crowd)])
            answer[what] = max(a["done"] for a in answers) - max(a["start"] for a in answers)
            answer["compared"] += sum(int(a.get("compared", 0)) for a in answers)
            for file in folder.glob("ready*"):
                file.unlink()
        shutil.rmtree(folder)
        return answer

    return take
