"""``size``: what saves the fewest tokens for its bytes goes first (greedy dual size frequency).

A node's worth is its tokens, times how often it was used, over its bytes; states and the
caches of large models are heavy for their tokens. Worth is counted from ``floor``, the rank of
what was evicted last, so that what is not used any more is overtaken in time. Uses count up to
four, because a count that remembers for ever keeps what was popular once.

It counts tokens, not the time to compute them: in a store of several models it prefers the
small ones.

>>> from kvkeep.prefixstore.eviction.base import Use
>>> light, heavy = (Use(when=0, hits=0, tokens=64, nbytes=n) for n in (1 << 20, 1 << 24))
>>> POLICY.rank(light, floor=50) - 50, POLICY.rank(heavy, floor=50) - 50
(262144, 16384)
"""

from __future__ import annotations

from kvkeep.prefixstore.eviction.base import Policy, Use

MOST_USES = 4
SCALE = 1 << 32


class Size(Policy):
    """Rank is the floor and the node's worth."""

    name = "size"

    def rank(self, use: Use, floor: int) -> int:
        """The floor, and tokens times uses over bytes."""
        uses = min(use.hits + 1, MOST_USES)
        return floor + use.tokens * uses * SCALE // max(1, use.nbytes)


POLICY = Size()
