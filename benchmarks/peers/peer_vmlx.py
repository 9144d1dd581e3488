"""vMLX: its paged prefix cache on its block store alone, which is flushed block by block.

Its code reads ``meta_state`` of a plain cache, which mlx-lm 0.32 has no more: mlx-lm 0.31.3.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers._adapter import Adapter, Make, Model
from benchmarks.peers._paged import rebuilt, states

DISTRIBUTION = "vmlx"
BARE = ("vmlx_engine", "vmlx_engine.utils")


class Peer(Adapter):
    """Disk only: no copies of the blocks stay in memory. Block size and count by default."""

    def __init__(self, folder: str, make: Make) -> None:
        from vmlx_engine.block_disk_store import BlockDiskStore
        from vmlx_engine.paged_cache import PagedCacheManager
        from vmlx_engine.prefix_cache import BlockAwarePrefixCache

        self._disk: Any = BlockDiskStore(folder, expected_num_layers=len(make()))
        paged = PagedCacheManager(disk_store=self._disk, disk_only=True)
        self._cache: Any = BlockAwarePrefixCache(Model(make), paged)

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Blocks that are not there yet are queued for the writer."""
        if self._cache.store_cache("store", tokens, states(caches)) is None:
            raise RuntimeError("not taken")

    def settle(self) -> None:
        """Until the writer is done."""
        self._cache.settle_write_behind(wait=True)
        self._disk.shutdown()

    def close(self) -> None:
        """Stop its threads."""
        self._disk.shutdown()

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """The longest chain of stored blocks."""
        return rebuilt(self._cache, prompt)
