"""Compressing: real keys and values in bf16, lossless.

A model reads a real text; what it leaves in its caches goes through kvkeep's frames. Measured:
raw bytes by stored bytes, and the rate of one thread in both directions, beside zstd on the
same bytes as they are. Random bits, as in the other measurements, do not compress at all.

To reach: 1.4.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import HOME, Answer, Bench, LeftOut, Result, column, say
from benchmarks.steps import load_mlx_lm

MODEL = HOME / ".models" / "smollm2-135m-instruct-4bit"
TEXTS = ("examples/prompts/harbour-first.md", "docs/format.md")
CHUNK = 256


def read_text(model: str, file: str, count: int) -> Answer:
    """Have ``model`` read ``count`` tokens in bf16, and save its caches to ``file``."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

    from kvkeep.hooks.prefill import prefill

    net, tokenizer = load(model)[:2]
    net.set_dtype(mx.bfloat16)
    text = "\n\n".join((HOME / name).read_text(encoding="utf-8") for name in TEXTS)
    ids = tokenizer.encode(text)[:count]
    caches = make_prompt_cache(net)
    prefill(net, ids, caches)
    for cache in caches:
        assert cache.keys.dtype == mx.bfloat16, cache.keys.dtype
    save_prompt_cache(file, caches)
    return {"tokens": len(ids), "layers": len(caches)}


def code(file: str) -> Answer:
    """Seal the caches in ``file`` as frames and read them back, bit for bit."""
    import zstandard

    from kvkeep.persistence.frame import Frame

    caches = load_mlx_lm(file)
    raw = stored = plain = 0
    times = {"seal": 0.0, "none": 0.0, "open": 0.0, "zstd": 0.0}
    zstd = zstandard.ZstdCompressor(level=3)
    for start in range(0, caches[0].offset, CHUNK):
        planes = _planes(caches, start, min(start + CHUNK, caches[0].offset))
        kept, without = _draft(planes), _draft(planes)
        frame = _timed(times, "seal", kept.seal)
        _timed(times, "none", lambda draft=without: draft.seal("none"))
        stored += len(frame)
        out = {name: np.ones_like(plane) for name, plane in planes.items()}

        def back(frame: Any = frame, out: Any = out) -> None:
            opened = Frame.open(frame)
            for name, target in out.items():
                opened.copy_into(name, target, 2, 0, target.shape[2])

        _timed(times, "open", back)
        for name, plane in planes.items():
            assert np.array_equal(out[name], plane), f"{name}: other bits came back"
            raw += plane.nbytes
            plain += len(_timed(times, "zstd", lambda p=plane: zstd.compress(p.tobytes())))
    return {
        "raw": raw,
        "ratio": raw / stored,
        "zstd_ratio": raw / plain,
        **{f"{name}_rate": raw / seconds / 1e9 for name, seconds in times.items()},
    }


def measure(bench: Bench) -> Result:
    """Read the text once; code it in each round."""
    result = Result("Compressing real keys and values, bf16")
    model = bench.model or _small_model()
    with bench.scratch() as folder:
        file = folder / "real.safetensors"
        say(f"  {Path(model).name} reads")
        read = bench.step(read_text, model=model, file=file, count=256 if bench.quick else 512)
        found = [bench.step(code, file=file) for _ in range(bench.rounds)]
    result.line("seal: compress and checksum, one thread", column(found, "seal_rate"), "GB/s")
    result.line("seal: checksum only", column(found, "none_rate"), "GB/s")
    result.line("open and copy out: verify and expand", column(found, "open_rate"), "GB/s")
    result.line("zstd level 3, bytes as they are", column(found, "zstd_ratio"), "×")
    result.line("zstd level 3, rate", column(found, "zstd_rate"), "GB/s")
    result.goal("raw ÷ stored bytes", column(found, "ratio"), 1.4, more=True)
    result.notes.append(
        f"{Path(model).name}: {read['tokens']:,} tokens of text, {read['layers']} layers, "
        f"{found[0]['raw'] / 1e6:.1f} MB of rows; all bits came back."
    )
    return result


def _planes(caches: list[Any], start: int, stop: int) -> dict[str, Any]:
    import mlx.core as mx

    out = {}
    for name, tensor in (("k", "keys"), ("v", "values")):
        for layer, cache in enumerate(caches):
            bits = getattr(cache, tensor)[..., start:stop, :].view(mx.uint16)
            out[f"{layer}/{name}"] = np.array(bits)
    return out


def _draft(planes: dict[str, Any]) -> Any:
    from kvkeep.persistence.frame import Draft
    from kvkeep.persistence.tensors import TensorSpec

    specs = [TensorSpec(name, "bfloat16", plane.shape) for name, plane in planes.items()]
    draft = Draft(specs, {})
    for name, plane in planes.items():
        draft.views[name][...] = plane
    return draft


def _timed(times: dict[str, float], name: str, run: Any) -> Any:
    start = time.perf_counter()
    answer = run()
    times[name] += time.perf_counter() - start
    return answer


def _small_model() -> str:
    """The demo's model, made where it is missing. Raises ``LeftOut``."""
    made = subprocess.run(
        [sys.executable, str(HOME / "examples" / "make_smollm2.py"), str(MODEL)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise LeftOut(f"no model (name one with --model): {made.stderr.strip()[-300:]}")
    return str(MODEL)
