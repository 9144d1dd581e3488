"""mlx-vlm: the disk tier of its automatic prefix cache, with its default block size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

DISTRIBUTION = "mlx-vlm"


class Peer:
    """An ``APCManager`` over a ``DiskBlockStore``: shards of blocks, written by a thread."""

    def __init__(self, folder: str) -> None:
        # Otherwise it reads nothing back while less than 2 GiB are free, page cache not counted.
        os.environ.setdefault("APC_DISK_MIN_FREE_RAM_GB", "0")
        from mlx_vlm import apc

        disk = apc.DiskBlockStore(Path(folder), "bench")
        self._apc: Any = apc.APCManager(disk=disk)

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """Whole blocks that are not there yet go to the disk."""
        keys = [cache.keys[:, :, : cache.offset, :] for cache in caches]
        values = [cache.values[:, :, : cache.offset, :] for cache in caches]
        self._apc.release(self._apc.store_kv_blocks(tokens, keys, values))

    def settle(self) -> None:
        """Closing waits for the writer."""
        self._apc.close()

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """The longest stored prefix of whole blocks, from the disk."""
        import mlx.core as mx

        caches, offset = self._apc.lookup_prefix_disk_cache(prompt)
        if caches is None:
            return None, 0
        mx.eval([(cache.keys, cache.values) for cache in caches])
        return caches, offset
