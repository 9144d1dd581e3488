"""vllm-mlx: its memory-aware prefix cache, dumped to a folder and loaded again."""

from __future__ import annotations

from benchmarks.peers._adapter import Make
from benchmarks.peers._dump import Dump

DISTRIBUTION = "vllm-mlx"


class Peer(Dump):
    """See ``Dump``."""

    def __init__(self, folder: str, make: Make) -> None:
        from vllm_mlx import memory_cache

        super().__init__(memory_cache, folder, make)
