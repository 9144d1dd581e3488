"""What a policy is told of a node, and what it answers.

A node is an edge of the trie: the tokens between two places where stored prompts part. Only
leaves are evicted, lowest rank first. A policy says the rank of a node that was just used;
everything else (that no node ranks below what hangs on it, that a rank never falls, that the
deeper of two equals goes first) is in ``order`` and the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

MAX_RANK = (1 << 64) - 1


class Use(NamedTuple):
    """The facts of a node at the moment of a use.

    ``when`` is in nanoseconds. ``hits`` are the lookups that resumed it since it was stored;
    a node that comes back soon after it was evicted begins with one. ``tokens`` and ``nbytes``
    are its own, without what lies before or behind it.
    """

    when: int
    hits: int
    tokens: int
    nbytes: int


class Policy(ABC):
    """An order of eviction. Pure: no clock, no state."""

    name: ClassVar[str]

    @abstractmethod
    def rank(self, use: Use, floor: int) -> int:
        """The rank of a node that was just used, in ``[0, 2**64)``; the lowest goes first.

        ``floor`` is the highest rank that was evicted so far; before the first eviction, the
        time of the first use in the store.
        """
