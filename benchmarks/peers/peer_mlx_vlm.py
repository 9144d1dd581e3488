"""mlx-vlm: the disk tier of its automatic prefix cache, with its default block size.

A restore is refused unless twice its bytes have room. Where neither Metal nor psutil states the
memory, its defaults leave room for 1 GiB, less than twice 512 MiB; so the room is set here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers._adapter import Adapter, Make, Model, evaluate

DISTRIBUTION = "mlx-vlm"
BARE = ("mlx_vlm",)
ROOM_GB = 8


class Peer(Adapter):
    """An ``APCManager`` over a ``DiskBlockStore``: shards of blocks, written by a thread.

    Its coordinator decides by the layout: blocks, or one checkpoint of the whole.
    """

    caches = "mlx_vlm.models.cache"

    def __init__(self, folder: str, make: Make) -> None:
        from mlx_vlm import apc
        from mlx_vlm.apc_coordinator import APCCoordinator

        disk = apc.DiskBlockStore(Path(folder), "bench")
        # No blocks in memory, which would keep the caller busy: the writer reads the live arrays.
        room = {"memory_max_gb": ROOM_GB}
        self._manager: Any = apc.APCManager(num_blocks=0, disk=disk, overrides=room)
        self._apc: Any = APCCoordinator(self._manager, Model(make))

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """What is not there yet goes to the disk."""
        if not self._apc.commit(caches, tokens):
            raise RuntimeError("not taken")

    def settle(self) -> None:
        """Closing waits for the writer."""
        self._manager.close()

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """The longest stored prefix, from the disk."""
        found = self._apc.lookup(
            prompt,
            extra_hash=0,
            safe_lookup_min=0,
            suffix_is_text_only=lambda _: True,
            prefix_has_media=lambda _: False,
        )
        if found is None or not found.get("warm_cache"):
            return None, 0
        return evaluate(found["warm_cache"]), found["prefix_len"]
