"""flyto-mlx: oMLX's paged prefix cache on its SSD block store, which are in its wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers._adapter import Adapter, Make, Model
from benchmarks.peers._paged import rebuilt, states

DISTRIBUTION = "flyto-mlx"
BARE = ("omlx",)
BLOCK, MOST_BLOCKS = 256, 1000


class Peer(Adapter):
    """One file for each block and its chain hash, written by a thread; blocks are joined again."""

    def __init__(self, folder: str, make: Make) -> None:
        from omlx.cache.paged_cache import PagedCacheManager
        from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
        from omlx.cache.prefix_cache import BlockAwarePrefixCache

        paged = PagedCacheManager(BLOCK, MOST_BLOCKS, model_name="bench")
        self._ssd: Any = PagedSSDCacheManager(Path(folder), 8 << 30)
        paged.set_paged_ssd_cache_manager(self._ssd)
        self._cache: Any = BlockAwarePrefixCache(Model(make), paged, self._ssd)

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Cut every layer into blocks; those that are there already are not written again."""
        from omlx.cache.hybrid_cache import ModelCacheConfig

        config = ModelCacheConfig.from_cache_list(caches, model_name="bench")
        table = self._cache.store_cache("store", tokens, states(caches), config)
        taken = table.num_tokens if table else 0
        if taken < len(tokens) // BLOCK * BLOCK:
            raise RuntimeError(f"{taken} of {len(tokens)} tokens taken")

    def settle(self) -> None:
        """Closing waits for the writer."""
        self._ssd.close()

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """The blocks of the longest chain, joined layer by layer."""
        return rebuilt(self._cache, prompt)
