"""Restoring: the same 512 MiB in a fresh process, warm and cold, checksums verified.

Measured: opening the store and resuming, beside ``mlx_lm.load_prompt_cache`` and eval, with
the file in the page cache and without it. Ceiling: the disk's own time to read the stored
bytes in threads.

To reach: warm, 0.8 of ``mlx_lm``'s time; cold, 1.15 of the disk's.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import pagecache
from benchmarks.harness import Answer, Bench, Result, Step, column, ratios
from benchmarks.rows import LARGE, MIB, Shape
from benchmarks.steps import restore_kvkeep, restore_mlx_lm, store_kvkeep, store_mlx_lm


def prepare(bench: Bench, folder: Path, shape: Shape, count: int) -> tuple[Path, Path]:
    """A store and a file that hold the same cache; where kvkeep's and mlx_lm's bytes lie."""
    store, file = folder / "store", folder / "cache.safetensors"
    bench.step(store_kvkeep, folder=store, shape=shape.json(), count=count)
    bench.step(store_mlx_lm, file=file, shape=shape.json(), count=count)
    return store, file


def measure(bench: Bench) -> Result:
    """Restore warm and cold in each round."""
    count = 512 if bench.quick else 4096
    result = Result(f"Restoring {LARGE.nbytes(count) // MIB} MiB, checksums verified")
    with bench.scratch() as folder:
        store, file = prepare(bench, folder, LARGE, count)
        data = store / "data.mdb"
        common = {"shape": LARGE.json(), "count": count}

        def step(which: str, cold: bool) -> Step:
            def take(_: int) -> Answer:
                (pagecache.drop if cold else pagecache.warm)(file if which == "mlx_lm" else data)
                if which == "disk":
                    return {"seconds": pagecache.read_in_threads(data)}
                if which == "mlx_lm":
                    return bench.step(restore_mlx_lm, file=file, **common)
                return bench.step(restore_kvkeep, folder=store, **common)

            return take

        heats = {"warm": False, "cold": True} if pagecache.CAN_DROP else {"warm": False}
        found = bench.interleaved(
            {
                f"{which} {heat}": step(which, cold)
                for heat, cold in heats.items()
                for which in ("kvkeep", "mlx_lm", "disk")
            }
        )
    times = {name: column(answers, "seconds") for name, answers in found.items()}
    for heat in heats:
        result.line(f"kvkeep, {heat}: open and resume", times[f"kvkeep {heat}"])
        result.line(f"mlx_lm, {heat}: load and eval", times[f"mlx_lm {heat}"])
        result.line(f"ceiling, {heat}: file read in threads", times[f"disk {heat}"])
    warm = found["kvkeep warm"]
    result.line("kvkeep: opening the store, of it", column(warm, "open", 1e3), "ms")
    result.goal("warm: kvkeep ÷ mlx_lm", ratios(times["kvkeep warm"], times["mlx_lm warm"]), 0.8)
    if pagecache.CAN_DROP:
        result.goal(
            "cold: kvkeep ÷ the disk", ratios(times["kvkeep cold"], times["disk cold"]), 1.15
        )
        result.line(
            "cold: mlx_lm ÷ the disk", ratios(times["mlx_lm cold"], times["disk cold"]), "×"
        )
    else:
        result.notes.append("Cold restores are left out: this system cannot drop one file's pages.")
    compared = sum(int(a["compared"]) for name in found for a in found[name] if "compared" in a)
    result.notes.append(f"{compared / MIB:,.0f} MiB compared with what was stored: all bits equal.")
    return result
