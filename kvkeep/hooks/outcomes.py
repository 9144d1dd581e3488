"""What becomes of work that must not fail a server: all of it counted, a trouble logged once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvkeep.hooks.metrics import Metrics
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.space import SHED

log = logging.getLogger("kvkeep")

Answer = TypeVar("Answer")


class Outcomes:
    """The outcomes that one server's ``metrics`` count; any thread may ask."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._receipts: deque[Receipt] = deque()

    def guarded(self, doing: str, what: Callable[[], Answer], otherwise: Answer) -> Answer:
        """``what()``, or ``otherwise`` where it fails."""
        try:
            return what()
        except Exception as error:
            if self._metrics.fail(doing) == 1:
                log.warning("kvkeep: failed: %s; requests go on without it", doing, exc_info=error)
            return otherwise

    def warn(self, doing: str, message: str, about: object) -> None:
        """Something was not done, and nothing failed. ``message`` has a ``%s`` for what."""
        if self._metrics.fail(doing) == 1:
            log.warning("kvkeep: " + message, about)

    def expect(self, receipt: Receipt) -> None:
        """A snapshot was handed in: count what becomes of it, now or once it is known."""
        self._receipts.append(receipt)
        self.settle()

    def settle(self) -> None:
        """Count the snapshots whose outcome is known by now."""
        for _ in range(len(self._receipts)):
            try:
                receipt = self._receipts.popleft()
            except IndexError:
                return
            if not receipt.wait(0):
                self._receipts.append(receipt)
            elif receipt.stored:
                self._metrics.snapshot(receipt.reason, receipt.bytes_written)
            else:
                self._metrics.snapshot("shed" if receipt.reason == SHED else "failed")
                if receipt.reason != SHED:
                    self.warn("snapshot", "not stored: %s", receipt.reason)
