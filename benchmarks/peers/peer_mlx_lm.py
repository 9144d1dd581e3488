"""mlx-lm: ``save_prompt_cache`` and ``load_prompt_cache``, all of it each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers._adapter import Adapter, Make, evaluate, shared_length, trimmed

DISTRIBUTION = "mlx-lm"


class Peer(Adapter):
    """One file, with the tokens beside it; what differs is trimmed."""

    def __init__(self, folder: str, make: Make) -> None:
        from mlx_lm.models import cache

        self._lib: Any = cache
        self._file = Path(folder) / "cache.safetensors"
        self._tokens = Path(folder) / "tokens.json"

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Write all of it anew."""
        self._lib.save_prompt_cache(str(self._file), caches)
        self._tokens.write_text(json.dumps(tokens))

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """Load all of it, and trim."""
        stored = json.loads(self._tokens.read_text())
        caches = evaluate(self._lib.load_prompt_cache(str(self._file)))
        return trimmed(self._lib, caches, len(stored), shared_length(prompt, stored))
