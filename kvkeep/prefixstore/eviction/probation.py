"""``probation``: what was never resumed again goes first, however new it is.

A scan of prompts that nobody repeats pushes only itself out. A node that no lookup resumed
since it was stored is on probation: its life in a full store is a quarter of that of a node that
was. Life is counted from ``floor``, the rank of what was evicted last, so that the share of
the store that is on probation stays about the same at any load. In S3-FIFO this is the small
queue; what comes back soon after its eviction is off probation at once, as with its ghosts.

>>> from kvkeep.prefixstore.eviction.base import Use
>>> new, proven = (Use(when=150, hits=hits, tokens=10, nbytes=4096) for hits in (0, 1))
>>> POLICY.rank(new, floor=50), POLICY.rank(proven, floor=50)
(75, 150)
"""

from __future__ import annotations

from kvkeep.prefixstore.eviction.base import Policy, Use

SHARE = 4


class Probation(Policy):
    """Rank is the time of the last use, drawn close to the floor while on probation."""

    name = "probation"

    def rank(self, use: Use, floor: int) -> int:
        """The time of the use, or a quarter of the way to it from the floor."""
        if use.hits or use.when <= floor:
            return use.when
        return floor + (use.when - floor) // SHARE


POLICY = Probation()
