"""Write prompt-cache files with whichever mlx-lm is installed, once for each version.

    python -m tests.hooks.make_prompt_files

Files that exist are never written again: they are what users have on their disks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

FOLDER = Path(__file__).parent / "prompt_files"


def rows(count: int, width: int = 32, seed: int = 0) -> mx.array:
    """Rows ``[1, 2, count, width]`` that differ everywhere."""
    size = 2 * count * width
    return (mx.arange(size) % 251 + seed).reshape(1, 2, count, width).astype(mx.float16)


def feed(cache: Any, *counts: int) -> Any:
    """``cache`` after updates of that many tokens each."""
    for seed, count in enumerate(counts):
        cache.update_and_fetch(rows(count, seed=seed), rows(count, 16, seed=seed + 100))
    return cache


def quantized(classes: Any) -> Any:
    cache = classes.QuantizedKVCache(group_size=32, bits=4)
    cache.update_and_fetch(rows(3), rows(3, seed=9))
    return cache


def recurrent(cache: Any) -> Any:
    cache[0] = mx.arange(12).reshape(1, 3, 4).astype(mx.bfloat16)
    cache[1] = mx.arange(8).reshape(1, 2, 4).astype(mx.float32) / 7
    return cache


def caches(classes: Any) -> list[Any]:
    """One cache of each class that this mlx-lm has."""
    out = [
        feed(classes.KVCache(), 5, 1),
        quantized(classes),
        feed(classes.RotatingKVCache(max_size=4, keep=1), 6),
        feed(classes.RotatingKVCache(max_size=4, keep=1), *(1,) * 7),
        feed(classes.RotatingKVCache(max_size=8), 3),
        feed(classes.ChunkedKVCache(8), 5),
    ]
    if hasattr(classes, "ConcatenateKVCache"):
        out.append(feed(classes.ConcatenateKVCache(), 2, 3))
    if hasattr(classes, "ArraysCache"):
        out.append(recurrent(classes.ArraysCache(2)))
    if hasattr(classes, "MambaCache"):
        out.append(recurrent(classes.MambaCache()))
    return out


def nested(classes: Any) -> list[Any]:
    """Lists of caches, as falcon_h1 and deepseek_v32 have them."""
    state = recurrent((getattr(classes, "MambaCache", None) or (lambda: classes.ArraysCache(2)))())
    return [
        classes.CacheList(state, feed(classes.KVCache(), 4)),
        feed(classes.KVCache(), 4),
        classes.CacheList(feed(classes.KVCache(), 4), feed(classes.RotatingKVCache(8), 4)),
    ]


def main() -> int:
    import mlx_lm
    from mlx_lm.models import cache as classes

    FOLDER.mkdir(exist_ok=True)
    written = 0
    for name, make in (("caches", caches), ("nested", nested)):
        path = FOLDER / f"mlx_lm_{mlx_lm.__version__}_{name}.safetensors"
        if path.exists():
            print(f"{path.name} exists and stays as it is", file=sys.stderr)
            continue
        classes.save_prompt_cache(str(path), make(classes), {"model": "a/model", "note": "é"})
        written += 1
    return 0 if written else 1


if __name__ == "__main__":
    raise SystemExit(main())
