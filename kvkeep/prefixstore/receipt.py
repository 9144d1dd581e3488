"""What a snapshot answers."""

from __future__ import annotations

import threading


class Receipt:
    """The outcome of one snapshot.

    ``tokens_new`` and ``tokens_known`` are known at once: positions whose rows this snapshot
    brings, and positions that were stored before. Rows that another run stored first serve
    both. ``stored``, ``bytes_written`` and ``reason`` are settled by the writer; reading one
    of them waits for it.
    """

    def __init__(self, tokens_new: int = 0, tokens_known: int = 0) -> None:
        self.tokens_new = tokens_new
        self.tokens_known = tokens_known
        self._settled = threading.Event()
        self._stored = False
        self._bytes = 0
        self._reason = "pending"

    def settle(self, stored: bool, bytes_written: int, reason: str) -> Receipt:
        """Record the outcome; called once, by the writer."""
        self._stored, self._bytes, self._reason = stored, bytes_written, reason
        self._settled.set()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the outcome is known; whether it is."""
        return self._settled.wait(timeout)

    @property
    def stored(self) -> bool:
        """Whether a resume point for these tokens is in the store, durably."""
        self.wait()
        return self._stored

    @property
    def bytes_written(self) -> int:
        """Bytes of rows and state that were written; 0 where all was there already."""
        self.wait()
        return self._bytes

    @property
    def reason(self) -> str:
        """``stored``, ``already_stored``, or why nothing was stored."""
        self.wait()
        return self._reason

    def __repr__(self) -> str:
        if not self._settled.is_set():
            return f"Receipt(pending, tokens_new={self.tokens_new})"
        return (
            f"Receipt(stored={self._stored}, tokens_new={self.tokens_new}, "
            f"tokens_known={self.tokens_known}, bytes_written={self._bytes}, "
            f"reason={self._reason!r})"
        )
