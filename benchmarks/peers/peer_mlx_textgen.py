"""mlx-textgen: its ``save_cache`` and ``load_cache``, one safetensors file for a prompt.

Its import has ``RotatingKVCache`` keep every position, and so its files do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers._adapter import Adapter, Make, shared_length, trimmed

DISTRIBUTION = "mlx-textgen"


class Peer(Adapter):
    """The file, and the tokens beside it; what differs is trimmed, as its manager does."""

    def __init__(self, folder: str, make: Make) -> None:
        from mlx_textgen import cache_utils

        self._utils: Any = cache_utils
        self._make = make
        self._file = Path(folder) / "cache.safetensors"
        self._tokens = Path(folder) / "tokens.json"

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Write all of it anew."""
        self._utils.save_cache(caches, str(self._file), "bench")
        self._tokens.write_text(json.dumps(tokens))

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """Load all of it, and trim."""
        from mlx_lm.models import cache

        stored = json.loads(self._tokens.read_text())
        caches = self._make()
        self._utils.load_cache(str(self._file), caches)
        return trimmed(cache, caches, len(stored), shared_length(prompt, stored))
