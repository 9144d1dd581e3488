"""``lru``: the least recently used leaf goes first. The default.

>>> from kvkeep.prefixstore.eviction.base import Use
>>> POLICY.rank(Use(when=70, hits=3, tokens=10, nbytes=4096), floor=50)
70
"""

from __future__ import annotations

from kvkeep.prefixstore.eviction.base import Policy, Use


class Lru(Policy):
    """Rank is the time of the last use."""

    name = "lru"

    def rank(self, use: Use, floor: int) -> int:
        """The time of the use."""
        return use.when


POLICY = Lru()
