"""Which node goes first when room is needed. One file per policy, behind one small interface.

The same policies and the same loop serve the store and ``kvkeep simulate``, so that what is
simulated is what runs. A new policy is one new file here with a ``POLICY``, and its name in
``POLICIES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvkeep.errors import KvkeepError
from kvkeep.prefixstore.eviction import lru, probation, size
from kvkeep.prefixstore.eviction.base import Policy

DEFAULT = "lru"

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {module.POLICY.name: module.POLICY for module in (lru, probation, size)}
)
"""Every policy by its name."""


class UnknownPolicy(KvkeepError, ValueError):
    """There is no eviction policy of this name."""

    exit_code = 2
    remedy = f"Choose one of {', '.join(POLICIES)}."


def policy_named(name: str) -> Policy:
    """The policy ``name``. Raises ``UnknownPolicy``."""
    policy = POLICIES.get(name)
    if policy is None:
        raise UnknownPolicy(f"No eviction policy is called {name!r}")
    return policy
