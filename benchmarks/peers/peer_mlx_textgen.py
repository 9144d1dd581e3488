"""mlx-textgen: its ``save_cache`` and ``load_cache``, one safetensors file for a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DISTRIBUTION = "mlx-textgen"


class Peer:
    """The file, and the tokens beside it; what differs is trimmed, as its manager does."""

    def __init__(self, folder: str) -> None:
        from mlx_textgen import cache_utils

        self._utils: Any = cache_utils
        self._file = Path(folder) / "cache.safetensors"
        self._tokens = Path(folder) / "tokens.json"

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Write all of it anew."""
        import json

        self._utils.save_cache(caches, str(self._file), "bench")
        self._tokens.write_text(json.dumps(tokens))

    def settle(self) -> None:
        """Nothing is left to do."""

    def restore(self, prompt: list[int]) -> tuple[list[Any], int]:
        """Load all of it, and trim."""
        import json

        from mlx.core import load
        from mlx_lm.models.cache import KVCache, trim_prompt_cache

        stored = json.loads(self._tokens.read_text())
        layers = {name.split(".")[0] for name in load(str(self._file))}
        caches = [KVCache() for _ in layers]
        self._utils.load_cache(str(self._file), caches)
        limit = min(len(prompt), len(stored))
        shared = next((i for i in range(limit) if prompt[i] != stored[i]), limit)
        trim_prompt_cache(caches, len(stored) - shared)
        return caches, shared
