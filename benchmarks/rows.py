"""Caches of incompressible rows that any process can make again, and check bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

BLOCK = 512
MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """A plain cache: ``layers`` × keys and values × ``[1, heads, tokens, head_size]``, bf16."""

    layers: int
    heads: int
    head_size: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position in all layers."""
        return self.layers * 2 * self.heads * self.head_size * 2

    def nbytes(self, tokens: int) -> int:
        """Bytes of the rows of ``tokens`` positions."""
        return self.bytes_per_token * tokens

    def json(self) -> dict[str, int]:
        """The arguments of a step."""
        return asdict(self)


LARGE = Shape(32, 8, 128)
"""128 KiB a token, an 8B model's: 4,096 tokens are 512 MiB."""

LONG = Shape(8, 4, 64)
"""8 KiB a token, so that 32,000 tokens are 250 MiB."""


def plane(shape: Shape, layer: int, which: int, start: int, stop: int, seed: int) -> Any:
    """Random bits of positions ``[start, stop)``, uint16 ``[1, heads, stop - start, head_size]``.

    A position's bits depend on nothing but ``seed``, the layer and the position.
    """
    first = start // BLOCK
    blocks = [
        _block(shape, (seed, layer, which, number)) for number in range(first, -(-stop // BLOCK))
    ]
    joined = np.concatenate(blocks, axis=2) if len(blocks) > 1 else blocks[0]
    return joined[:, :, start - first * BLOCK : stop - first * BLOCK]


def _block(shape: Shape, key: tuple[int, ...]) -> Any:
    bits = np.random.SFC64(np.random.SeedSequence(key))
    words = shape.heads * BLOCK * shape.head_size // 4
    raw = bits.random_raw(words).astype(np.uint64, copy=False).view(np.uint16)
    return raw.reshape(1, shape.heads, BLOCK, shape.head_size)


def tokens(count: int, seed: int, shared: int = 0) -> Any:
    """Token ids: the first ``shared`` are the same for every seed."""
    common = np.random.default_rng(0).integers(0, 150_000, shared)
    own = np.random.default_rng(seed + 1).integers(150_000, 300_000, count - shared)
    return np.concatenate([common, own])


def extend(caches: list[Any], shape: Shape, stop: int, seed: int) -> None:
    """Append the rows of ``seed`` up to position ``stop`` to live caches, and evaluate them."""
    import mlx.core as mx

    for layer, cache in enumerate(caches):
        start = cache.offset
        if start == stop:
            continue
        keys, values = (
            mx.array(plane(shape, layer, which, start, stop, seed)).view(mx.bfloat16)
            for which in (0, 1)
        )
        cache.update_and_fetch(keys, values)
        mx.eval(cache.keys, cache.values)
        del keys, values
    mx.clear_cache()


def empty(shape: Shape) -> list[Any]:
    """Caches that hold nothing."""
    from mlx_lm.models import cache

    make: Callable[[], Any] = cache.KVCache
    return [make() for _ in range(shape.layers)]


def check(caches: list[Any], shape: Shape, start: int, stop: int, seed: int) -> int:
    """Compare positions ``[start, stop)`` with what was made; the bytes compared.

    Raises ``AssertionError`` where a single bit differs.
    """
    import mlx.core as mx

    compared = 0
    for layer, cache in enumerate(caches):
        assert cache.offset >= stop, f"layer {layer} stands at {cache.offset}, not {stop}"
        for which, array in enumerate((cache.keys, cache.values)):
            bits = array.view(mx.uint16)
            mx.eval(bits)
            found = np.asarray(memoryview(bits))[:, :, start:stop]
            want = plane(shape, layer, which, start, stop, seed)
            assert found.shape == want.shape
            assert np.array_equal(found, want), f"layer {layer}: other bits than were stored"
            compared += found.nbytes
    assert compared == shape.nbytes(stop - start)
    return compared


def one_token(caches: list[Any], shape: Shape) -> float:
    """Seconds to append one position to every layer."""
    import mlx.core as mx

    row = mx.ones((1, shape.heads, 1, shape.head_size), mx.bfloat16)
    mx.eval(row)
    start = time.perf_counter()
    for cache in caches:
        cache.update_and_fetch(row, row)
    mx.eval([(cache.keys, cache.values) for cache in caches])
    return time.perf_counter() - start
