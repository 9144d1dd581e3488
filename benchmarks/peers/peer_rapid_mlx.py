"""Rapid-MLX: its memory-aware prefix cache, dumped to a folder and loaded again.

By default, ``--hybrid-cache-entries 0``, it takes no caches that cannot be trimmed.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers._adapter import Make
from benchmarks.peers._dump import Dump

DISTRIBUTION = "rapid-mlx"


class Peer(Dump):
    """See ``Dump``. It replaces a folder whole, so that it has one inside ours."""

    def __init__(self, folder: str, make: Make) -> None:
        from rapid_mlx import memory_cache

        super().__init__(memory_cache, str(Path(folder) / "dump"), make)
