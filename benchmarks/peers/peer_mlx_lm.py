"""mlx-lm: ``save_prompt_cache`` and ``load_prompt_cache``, all of it each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DISTRIBUTION = "mlx-lm"


class Peer:
    """One file, with the tokens beside it; what differs is trimmed."""

    def __init__(self, folder: str) -> None:
        from mlx_lm.models import cache

        self._lib: Any = cache
        self._file = Path(folder) / "cache.safetensors"
        self._tokens = Path(folder) / "tokens.json"

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Write all of it anew."""
        self._lib.save_prompt_cache(str(self._file), caches)
        self._tokens.write_text(json.dumps(tokens))

    def settle(self) -> None:
        """Nothing is left to do."""

    def restore(self, prompt: list[int]) -> tuple[list[Any], int]:
        """Load all of it, and trim."""
        import mlx.core as mx

        stored = json.loads(self._tokens.read_text())
        caches = self._lib.load_prompt_cache(str(self._file))
        mx.eval([(cache.keys, cache.values) for cache in caches])
        limit = min(len(prompt), len(stored))
        shared = next((i for i in range(limit) if prompt[i] != stored[i]), limit)
        self._lib.trim_prompt_cache(caches, len(stored) - shared)
        return caches, shared
