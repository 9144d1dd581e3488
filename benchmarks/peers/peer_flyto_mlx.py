"""flyto-mlx: the SSD block store of oMLX, which is in its wheel; blocks of 256 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DISTRIBUTION = "flyto-mlx"
BLOCK = 256


class Peer:
    """One file for each block and its chain hash, written by a thread; blocks are joined again."""

    def __init__(self, folder: str) -> None:
        from omlx.cache.paged_cache import compute_block_hash
        from omlx.cache.paged_ssd_cache import PagedSSDCacheManager

        self._hash: Any = compute_block_hash
        self._ssd: Any = PagedSSDCacheManager(Path(folder), 8 << 30)

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Cut every layer into blocks; those that are there already are not written again."""
        for number, name in enumerate(self._names(tokens)):
            a, b = number * BLOCK, (number + 1) * BLOCK
            layers = [(c.keys[:, :, a:b, :], c.values[:, :, a:b, :]) for c in caches]
            kinds = ["KVCache"] * len(caches)
            assert self._ssd.save_block(name, layers, BLOCK, "bench", kinds), "not taken"

    def settle(self) -> None:
        """Closing waits for the writer."""
        self._ssd.close()

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """The blocks of the longest chain, joined layer by layer."""
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache

        blocks = []
        for name in self._names(prompt):
            block = self._ssd.load_block(name) if self._ssd.has_block(name) else None
            if block is None:
                break
            blocks.append(block)
        if not blocks:
            return None, 0
        caches = []
        for layer in range(len(blocks[0])):
            cache = KVCache()
            cache.keys, cache.values = (
                mx.concatenate([block[layer][i] for block in blocks], axis=2) for i in (0, 1)
            )
            cache.offset = cache.keys.shape[2]
            caches.append(cache)
        mx.eval([(cache.keys, cache.values) for cache in caches])
        return caches, len(blocks) * BLOCK

    def _names(self, tokens: list[int]) -> list[bytes]:
        names: list[bytes] = []
        for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
            parent = names[-1] if names else None
            names.append(self._hash(parent, tokens[at : at + BLOCK], model_name="bench"))
        return names
