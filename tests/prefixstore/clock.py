"""A clock for tests: nanoseconds that pass only when they are told to."""

from __future__ import annotations

import time

SECOND = 1_000_000_000


class Clock:
    """Stands in for the module ``time`` where a store asks what time it is."""

    def __init__(self):
        self.now = 1_700_000_000 * SECOND

    def time_ns(self):
        return self.now

    def time(self):
        return self.now / 1e9

    def __getattr__(self, name):
        return getattr(time, name)
