"""kvkeep itself, through the same steps as the others. Settled is durable here."""

from __future__ import annotations

from typing import Any

DISTRIBUTION = "kvkeep"


def version() -> str:
    """Also where it is not installed but lies beside the benchmarks."""
    from kvkeep._version import __version__

    return __version__


class Peer:
    """A store in the folder, and one space in it."""

    def __init__(self, folder: str) -> None:
        import kvkeep
        import kvkeep.persistence.pages  # as the other benchmarks, before the clock

        self._store = kvkeep.open(folder, max_bytes="8GB")
        self._space: Any = self._store.space(identity={"benchmark": "rows of random bits"})
        self.written = 0

    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """A snapshot; a thread writes it."""
        self._receipt = self._space.snapshot(tokens, caches)

    def settle(self) -> None:
        """Until the receipt says stored, which is durable."""
        assert self._receipt.stored, self._receipt.reason
        self.written = self._receipt.bytes_written

    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """A resume, with every checksum verified."""
        hit = self._space.resume(prompt)
        return hit.caches, hit.offset
