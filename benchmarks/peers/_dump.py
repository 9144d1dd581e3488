"""What vllm-mlx and Rapid-MLX share: a prefix cache in memory that is dumped to a folder."""

from __future__ import annotations

from typing import Any

from benchmarks.peers._adapter import Adapter, Make, Model, evaluate


class Dump(Adapter):
    """A ``MemoryAwarePrefixCache``; ``memory_cache`` is the peer's module."""

    def __init__(self, memory_cache: Any, folder: str, make: Make) -> None:
        config = memory_cache.MemoryCacheConfig(max_memory_mb=8192)
        self._cache: Any = memory_cache.MemoryAwarePrefixCache(Model(make), config)
        self._folder = folder

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Into memory, and all of it to the folder."""
        if not self._cache.store(tokens, caches):
            raise RuntimeError("not taken")
        if not self._cache.save_to_disk(self._folder):
            raise RuntimeError("not saved")

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """Load the folder, and fetch."""
        self._cache.load_from_disk(self._folder)
        caches, rest = self._cache.fetch(prompt)
        if caches is None:
            return None, 0
        return evaluate(caches), len(prompt) - len(rest)
