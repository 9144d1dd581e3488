"""Layouts: quantized, sliding-window, hybrid and latent caches, beside ``mlx_lm``'s files.

Each layout has the shapes of a known kind of model and random bits. Measured for each: storing
2,048 tokens and 512 more, the caller's seconds and the durable ones and the bytes, and
restoring all of it in a fresh process, warm. ``mlx_lm`` saves the whole cache each time. What is
restored is compared bit for bit, arrays of every layer and their offsets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pagecache
from benchmarks.harness import Answer, Bench, Result, Step, column, ratios
from benchmarks.rows import MIB, tokens
from benchmarks.steps import BUDGET, IDENTITY, load_imports, save_mlx_lm

Draw = Callable[..., Any]
"""Takes a shape, a dtype and numbers that stand for the place; an evaluated array."""

CHUNK = 512
"""Positions that are appended at once, as a prefill does."""


def _plain(**_: int) -> Any:
    from mlx_lm.models.cache import KVCache

    return KVCache()


def _quantized() -> list[Any]:
    from mlx_lm.models.cache import QuantizedKVCache

    return [QuantizedKVCache(group_size=64, bits=4) for _ in range(32)]


def _sliding() -> list[Any]:
    from mlx_lm.models.cache import RotatingKVCache

    return [_plain() if i % 6 == 5 else RotatingKVCache(max_size=1024) for i in range(24)]


def _hybrid() -> list[Any]:
    from mlx_lm.models.cache import ArraysCache

    return [_plain() if i % 4 == 3 else ArraysCache(size=2) for i in range(24)]


def _latent() -> list[Any]:
    return [_plain() for _ in range(48)]


LAYOUTS: dict[str, tuple[Callable[[], list[Any]], str, int, int, int]] = {
    "kv-quant": (_quantized, "32 layers of 8 heads × 128, 4 bits in groups of 64", 8, 128, 128),
    "sliding": (_sliding, "24 layers of 8 heads × 128, of 6 layers 5 see 1,024", 8, 128, 128),
    "hybrid": (_hybrid, "24 layers, of 4 layers 3 recurrent, 1 of 2 heads × 256", 2, 256, 256),
    "latent": (_latent, "48 layers of 1 head, 512 and 64 wide", 1, 512, 64),
}
"""How the caches are made, what they are like, and heads and widths of keys and values."""


def made(layout: str, stop: int, caches: list[Any] | None = None) -> list[Any]:
    """Caches of ``layout`` at ``stop``, new ones or longer ones; the same bits every time."""
    from kvkeep.hooks.prefill import vouch

    start = 0 if caches is None else stop - CHUNK
    if caches is None:
        caches = LAYOUTS[layout][0]()
        vouch(caches)
    extend(caches, layout, start, stop, _random)
    return caches


def extend(caches: list[Any], layout: str, start: int, stop: int, draw: Draw) -> None:
    """Read positions ``[start, stop)``, chunk by chunk, whose bits are what ``draw`` draws."""
    import mlx.core as mx

    for layer, cache in enumerate(caches):
        if not hasattr(cache, "update_and_fetch"):
            cache[0] = draw((1, 3, 8192), mx.bfloat16, layer, stop)
            cache[1] = draw((1, 32, 128, 128), mx.float32, layer, stop)
            continue
        for at in range(start, stop, CHUNK):
            cache.update_and_fetch(*drawn(layout, layer, at, min(CHUNK, stop - at), draw))
            mx.eval(cache.keys, cache.values)
    mx.clear_cache()


def drawn(layout: str, layer: int, at: int, count: int, draw: Draw) -> list[Any]:
    """Keys and values of ``count`` positions of a layer."""
    import mlx.core as mx

    heads, *widths = LAYOUTS[layout][2:]
    return [draw((1, heads, count, w), mx.bfloat16, layer, at, w) for w in widths]


def _random(shape: tuple[int, ...], dtype: Any, *seed: int) -> Any:
    import mlx.core as mx

    key = mx.random.key(hash(seed) % (1 << 31))
    made: Any = mx.random.normal(shape, key=key).astype(dtype)
    mx.eval(made)
    return made


def compare(caches: list[Any], wanted: list[Any]) -> int:
    """Compare what each cache shows, and its offset; the bytes compared."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    compared = 0
    for layer, (found, want) in enumerate(zip(caches, wanted, strict=True)):
        assert getattr(found, "offset", None) == getattr(want, "offset", None), layer
        shown = [
            x.keys_and_values() if hasattr(x, "keys_and_values") else x.cache for x in (found, want)
        ]
        pairs = zip(tree_flatten(shown[0]), tree_flatten(shown[1]), strict=True)
        for (_, a), (_, b) in pairs:
            assert a.dtype == b.dtype
            same = mx.array_equal(a.view(mx.uint8), b.view(mx.uint8))
            assert same.item(), f"layer {layer}: other bits than were stored"
            compared += int(b.nbytes)
    assert compared
    return compared


def open_space(folder: str, layout: str) -> tuple[Any, Any]:
    """A store and the space of ``layout``."""
    from kvkeep.prefixstore.store import open_store

    store = open_store(folder, max_bytes=BUDGET)
    return store, store.space(identity=IDENTITY, layout=LAYOUTS[layout][0]())


def store_kvkeep(folder: str, layout: str, count: int) -> Answer:
    """Snapshot ``count`` tokens, then ``CHUNK`` more."""
    load_imports()
    store, space = open_space(folder, layout)
    caches, prompt, answer = made(layout, count), tokens(count + CHUNK, 0), {}
    for name, stop in (("first", count), ("next", count + CHUNK)):
        if name == "next":
            made(layout, stop, caches)
        os.sync()
        start = time.perf_counter()
        receipt = space.snapshot(prompt[:stop], caches)
        answer[f"{name} caller"] = time.perf_counter() - start
        receipt.wait()
        answer[f"{name} durable"] = time.perf_counter() - start
        assert receipt.stored, receipt.reason
        answer[f"{name} bytes"] = receipt.bytes_written
    store.close()
    return answer


def store_mlx_lm(file: str, layout: str, count: int) -> Answer:
    """Save ``count`` tokens, then all of them with ``CHUNK`` more to another file."""
    load_imports()
    caches, answer = made(layout, count), {}
    for name, stop in (("first", count), ("next", count + CHUNK)):
        if name == "next":
            made(layout, stop, caches)
        os.sync()
        saved = save_mlx_lm(file, caches)
        answer |= {f"{name} {key}": value for key, value in saved.items()}
    return answer


def restore_kvkeep(folder: str, layout: str, count: int) -> Answer:
    """Open the store and resume everything."""
    load_imports()
    start = time.perf_counter()
    store, space = open_space(folder, layout)
    hit = space.resume(np.append(tokens(count, 0), 1))
    seconds = time.perf_counter() - start
    assert hit.offset == count, hit.decision
    compared = compare(hit.caches, made(layout, count, made(layout, count - CHUNK)))
    store.close()
    return {"seconds": seconds, "compared": compared}


def restore_mlx_lm(file: str, layout: str, count: int) -> Answer:
    """Load the whole file, and evaluate."""
    load_imports()
    import mlx.core as mx
    from mlx_lm.models import cache as mlx_lm_cache

    load: Callable[[str], list[Any]] = mlx_lm_cache.load_prompt_cache
    start = time.perf_counter()
    caches = load(file)
    mx.eval([cache.state for cache in caches])
    seconds = time.perf_counter() - start
    compared = compare(caches, made(layout, count, made(layout, count - CHUNK)))
    return {"seconds": seconds, "compared": compared}


def measure(bench: Bench) -> Result:
    """Every layout: store, grow and restore in each round."""
    count = 1024 if bench.quick else 2048
    result = Result(f"Other layouts: {count:,} tokens, then {CHUNK} more")
    compared = 0
    for layout in LAYOUTS:
        _, what, *_ = LAYOUTS[layout]
        with bench.scratch() as folder:
            steps = _steps(bench, folder, layout, count)
            found = bench.interleaved(steps)
        for name in ("first", "next"):
            label = "store" if name == "first" else f"+{CHUNK}"
            for key, unit, scale in (
                ("caller", "ms", 1e3),
                ("durable", "ms", 1e3),
                ("bytes", "MiB", 1 / MIB),
            ):
                ours, theirs = (column(found[x], f"{name} {key}", scale) for x in found)
                result.line(f"{layout}, {label}: kvkeep, {key}", ours, unit)
                result.line(f"{layout}, {label}: mlx_lm, {key}", theirs, unit)
        ours, theirs = (column(found[x], "seconds", 1e3) for x in found)
        result.line(f"{layout}, restore: kvkeep", ours, "ms")
        result.line(f"{layout}, restore: mlx_lm", theirs, "ms")
        result.line(f"{layout}, restore: kvkeep ÷ mlx_lm", ratios(ours, theirs), "×")
        compared += sum(int(x["compared"]) for answers in found.values() for x in answers)
        result.notes.append(f"{layout}: {what}.")
    result.notes.append(f"{compared / MIB:,.0f} MiB compared with what was stored: all bits equal.")
    return result


def _steps(bench: Bench, folder: Path, layout: str, count: int) -> dict[str, Step]:
    def kvkeep(number: int) -> Answer:
        store = folder / f"store{number}"
        wrote = bench.step(store_kvkeep, folder=store, layout=layout, count=count)
        pagecache.warm(store / "data.mdb")
        size = {"layout": layout, "count": count + CHUNK}
        return wrote | bench.step(restore_kvkeep, folder=store, **size)

    def mlx_lm(number: int) -> Answer:
        file = folder / f"{number}.safetensors"
        wrote = bench.step(store_mlx_lm, file=file, layout=layout, count=count)
        pagecache.warm(file)
        size = {"layout": layout, "count": count + CHUNK}
        return wrote | bench.step(restore_mlx_lm, file=file, **size)

    return {"kvkeep": kvkeep, "mlx_lm": mlx_lm}
