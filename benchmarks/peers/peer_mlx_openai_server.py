"""mlx-openai-server: its ``LRUPromptCache``, a pickle of all caches for each prompt.

What its files hold is known to the process that wrote them only: after a restart it finds nothing.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers._adapter import Adapter, Make, evaluate

DISTRIBUTION = "mlx-openai-server"


class Peer(Adapter):
    """The cache over a folder, as ``--prompt-cache-dir`` gives it one."""

    def __init__(self, folder: str, make: Make) -> None:
        from app.utils.prompt_cache import LRUPromptCache

        self._cache: Any = LRUPromptCache(cache_dir=folder)

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Write all of it anew."""
        self._cache.insert_cache(tokens, caches)

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """The nearest prompt that this process has stored."""
        caches, rest = self._cache.fetch_nearest_cache(prompt)
        if caches is None:
            return None, 0
        return evaluate(caches), len(prompt) - len(rest)
