"""kvkeep itself, through the same steps as the others. Settled is durable here."""

from __future__ import annotations

from typing import Any

from benchmarks.peers._adapter import Adapter, Make

DISTRIBUTION = "kvkeep"


def version() -> str:
    """Also where it is not installed but lies beside the benchmarks."""
    from kvkeep._version import __version__

    return __version__


class Peer(Adapter):
    """A store in the folder, and one space in it."""

    def __init__(self, folder: str, make: Make) -> None:
        import kvkeep
        import kvkeep.persistence.pages  # as the other benchmarks, before the clock

        self._store = kvkeep.open(folder, max_bytes="8GB")
        identity = {"benchmark": "rows of random bits"}
        self._space: Any = self._store.space(identity=identity, layout=make())

    def begin(self, caches: list[Any]) -> None:
        """Their history is known from here on, as its hooks do."""
        from kvkeep.hooks.prefill import vouch

        vouch(caches)

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """A snapshot; a thread writes it."""
        self._receipt = self._space.snapshot(tokens, caches)

    def settle(self) -> None:
        """Until the receipt says stored, which is durable."""
        if not self._receipt.stored:
            raise RuntimeError(self._receipt.reason)
        self.written = self._receipt.bytes_written

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """A resume, with every checksum verified."""
        hit = self._space.resume(prompt)
        return hit.caches, hit.offset
