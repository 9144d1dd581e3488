"""mlx-vlm: the disk tier of its automatic prefix cache, with its default block size.

A restore is refused unless twice its bytes have room. Where neither Metal nor psutil states the
memory, its defaults leave room for 1 GiB, less than twice 512 MiB; so the room is set here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DISTRIBUTION = "mlx-vlm"
ROOM_GB = 8


class Peer:
    """An ``APCManager`` over a ``DiskBlockStore``: shards of blocks, written by a thread."""

    def __init__(self, folder: str) -> None:
        from mlx_vlm import apc

        disk = apc.DiskBlockStore(Path(folder), "bench")
        # No blocks in memory, which would keep the caller busy: the writer reads the live arrays.
        room = {"memory_max_gb": ROOM_GB}
        self._apc: Any = apc.APCManager(num_blocks=0, disk=disk, overrides=room)

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
