"""vMLX: its prompt store, a file for each whole prompt.

An entry has the tokens before the last of its prompt, so that one more is named when it is stored.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers._adapter import Adapter, Make, evaluate

DISTRIBUTION = "vmlx"
BARE = ("vmlx_engine", "vmlx_engine.utils")


class Peer(Adapter):
    """A ``DiskCacheManager``: a thread writes what the caller copied."""

    def __init__(self, folder: str, make: Make) -> None:
        from vmlx_engine.disk_cache import DiskCacheManager

        self._disk: Any = DiskCacheManager(folder, expected_num_layers=len(make()))

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """All of it anew."""
        if not self._disk.store([*tokens, 1], caches):
            raise RuntimeError("not taken")

    def settle(self) -> None:
        """Until the writer is done."""
        self._disk.flush_pending_writes()

    def close(self) -> None:
        """Stop its thread."""
        self._disk.shutdown()

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """The longest whole prompt that was stored."""
        caches, matched = self._disk.fetch_longest_prefix(prompt)
        if caches is None:
            return None, 0
        return evaluate(caches), len(matched) - 1
