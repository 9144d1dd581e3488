"""The caches of ``benchmarks.layouts`` in any peer's classes, and whether two read on alike."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

from benchmarks import layouts

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "KVCache": (),
    "QuantizedKVCache": ("group_size", "bits"),
    "RotatingKVCache": ("max_size",),
    "ArraysCache": (),
}
"""What the constructor of each class is given, but for an ``ArraysCache``, which has a size."""
AHEAD = (16, 1)
"""Positions that are read on with, a chunk of a prompt and then a token."""


def in_classes(caches: list[Any], module: str) -> list[Any]:
    """Empty caches like ``caches``, in the classes of ``module``."""
    lib = importlib.import_module(module)

    def one(cache: Any) -> Any:
        kind = type(cache).__name__
        if kind == "ArraysCache":
            return lib.ArraysCache(size=len(cache.cache))
        return getattr(lib, kind)(**{name: getattr(cache, name) for name in ARGUMENTS[kind]})

    return [one(cache) for cache in caches]


def extend(caches: list[Any], layout: str, start: int, stop: int) -> None:
    """Read positions ``[start, stop)``, chunk by chunk; the same bits in every peer's MLX."""
    layouts.extend(caches, layout, start, stop, _random)


def difference(found: list[Any], want: list[Any], layout: str) -> str:
    """How what was restored differs from what was stored; empty where it reads on alike.

    Both are given more positions, which changes them; every bit that attention then reads is
    compared, in its order. A recurrent state is compared as it is.
    """
    if len(found) != len(want):
        return f"{len(found)} layers of {len(want)}"
    for layer, (one, other) in enumerate(zip(found, want, strict=True)):
        if not hasattr(other, "update_and_fetch"):
            pairs = [(getattr(one, "cache", None), other.cache)]
        elif (at := getattr(one, "offset", None)) != other.offset:
            return f"layer {layer} stands at {at}, not {other.offset}"
        else:
            rows = [layouts.drawn(layout, layer, other.offset, count, _random) for count in AHEAD]
            pairs = [(one.update_and_fetch(*x), other.update_and_fetch(*x)) for x in rows]
        for a, b in pairs:
            why = _unlike(a, b)
            if why:
                return f"layer {layer}, a {type(other).__name__}: {why}"
    return ""


def _unlike(found: Any, want: Any) -> str:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    def arrays(tree: Any) -> list[Any]:
        pairs: Any = tree_flatten(tree)
        return [array for _, array in pairs if isinstance(array, mx.array)]

    one, other = arrays(found), arrays(want)
    if not other or len(one) != len(other):
        return f"{len(one)} arrays, not {len(other)}"
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        if not mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item():
            return "other bits"
    return ""


def _random(shape: tuple[int, ...], dtype: Any, *seed: int) -> Any:
    """Numbers between 2^-7 and 2, of either sign: random bits but for five of the exponent."""
    import mlx.core as mx

    words = -(-math.prod(shape) * dtype.size // 8)
    raw = np.random.SFC64(np.random.SeedSequence(seed)).random_raw(words)
    keep, ones = (0x83FF83FF, 0x3C003C00) if dtype.size == 2 else (0x83FFFFFF, 0x3C000000)
    bits: Any = raw.astype(np.uint64).view(np.uint32) & np.uint32(keep) | np.uint32(ones)
    made: Any = mx.array(bits).view(dtype)[: math.prod(shape)].reshape(shape)
    mx.eval(made)
    return made
