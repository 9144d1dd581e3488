"""What vllm-mlx and Rapid-MLX share: a prefix cache in memory that is dumped to a folder."""

from __future__ import annotations

from typing import Any


class Dump:
    """A ``MemoryAwarePrefixCache``; ``memory_cache`` is the peer's module."""

    def __init__(self, memory_cache: Any, folder: str) -> None:
        model = type("Model", (), {"config": {}, "args": None, "layers": []})()
        config = memory_cache.MemoryCacheConfig(max_memory_mb=8192)
        self._cache: Any = memory_cache.MemoryAwarePrefixCache(model, config)
        self._folder = folder

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Into memory, and all of it to the folder."""
        assert self._cache.store(tokens, caches), "not taken"
        assert self._cache.save_to_disk(self._folder), "not saved"

    def settle(self) -> None:
        """Nothing is left to do."""

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """Load the folder, and fetch."""
        import mlx.core as mx

        self._cache.load_from_disk(self._folder)
        caches, rest = self._cache.fetch(prompt)
        if caches is None:
            return None, 0
        mx.eval([(cache.keys, cache.values) for cache in caches])
        return caches, len(prompt) - len(rest)
