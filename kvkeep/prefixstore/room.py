"""Making room: what goes, in which order, until a snapshot fits its budgets.

1. What has outlived the time to live of its space.
2. What the tenant used least recently, while the tenant is over its quota.
3. While the store is over its budget: states, lowest score first, as long as they take more
   than their share; else leaves, in the order of the policy.
4. States below their share as well, where no leaf is left that may go.
5. What is pinned until a deadline. What is pinned without one stays.

What the snapshot builds on stays throughout.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvkeep.persistence.environment import Environment, Transaction
from kvkeep.prefixstore import layout, tenants
from kvkeep.prefixstore.bookkeeping import rebuild
from kvkeep.prefixstore.event import EVICT, Event
from kvkeep.prefixstore.events import append
from kvkeep.prefixstore.evict import Tally, give_up, leaves, oldest, thin
from kvkeep.prefixstore.eviction import policy_named
from kvkeep.prefixstore.ledger import POLICY, Ledger, counter, policy_name
from kvkeep.prefixstore.pins import drop_lapsed, protected

BUDGET, QUOTA, STATES, EXPIRED, ASKED = "budget", "quota", "states", "expired", "asked"
"""Why something was evicted."""

STATE_SHARE = b"state_share"
DEFAULT_SHARE = 1 / 3
MILLION = 1_000_000


@dataclass
class Room:
    """One making of room, in a write transaction.

    ``spare`` are nodes that stay, ``last`` states that stay with them.
    """

    ledger: Ledger
    budget: int
    spare: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    why: str = BUDGET
    gone: Tally = field(default_factory=Tally)

    def is_due(self, space: bytes, more: int) -> bool:
        """Whether ``make`` could have anything to do."""
        txn = self.ledger.txn
        return bool(self._over(space, more) or txn.count("ttls") or txn.count("pins"))

    def make(self, space: bytes, more: int, more_state: int = 0) -> str:
        """Make room for ``more`` bytes of ``space``, of these ``more_state`` of a state.

        What it does not fit, ``budget`` or ``quota``; or nothing.
        """
        drop_lapsed(self.ledger.txn)
        hard, soft = protected(self.ledger.txn)
        self.expire(hard | soft)
        for pinned in (hard | soft, hard):
            self._keep_quota(space, more, pinned)
            self._keep_budget(more, more_state, pinned)
            over = self._over(space, more)
            if not over or not soft:
                break
        return over

    def expire(self, pinned: set[int]) -> None:
        """Drop what has outlived its space's time to live."""
        ledger, now = self.ledger, time.time_ns()
        for space, value in list(ledger.txn.items("ttls")):
            before = now - layout.from_u64(value)
            for node in oldest(ledger, [space], self.spare | pinned):
                mark = ledger.shelf.get(node.id)
                if mark is None or mark.when >= before:
                    break
                self.gone.add(space, EXPIRED, give_up(ledger, node, None, self.spare, expired=True))

    def ask(
        self, to: int | None, before: int | None, space: bytes | None, *, pinned: bool = False
    ) -> None:
        """Drop what somebody asked for: see ``Store.evict``. ``pinned``: also what is pinned."""
        ledger = self.ledger
        hard, soft = protected(ledger.txn)
        kept = set() if pinned else hard | soft
        if to and before is None and space is None:
            self.budget, self.why = to, ASKED
            self._keep_budget(0, 0, kept)
            return
        spaces = [space] if space is not None else list(ledger.txn.keys("spaces"))
        for node in oldest(ledger, spaces, kept):
            mark = ledger.shelf.get(node.id)
            if before is not None and (mark is None or mark.when >= before):
                break
            if to is not None and ledger.used <= to:
                break
            excess = ledger.used - to if to is not None else None
            self.gone.add(node.space, ASKED, give_up(ledger, node, excess, kept))

    def report(self) -> None:
        """Write an event for each space and reason."""
        now = time.time()
        append(
            self.ledger.txn,
            [
                Event(
                    EVICT, now, space, reason, known=x.tokens, nbytes=max(0, x.bytes), nodes=x.nodes
                )
                for (space, reason), x in self.gone.parts.items()
            ],
        )

    def _over(self, space: bytes, more: int) -> str:
        if self.ledger.used + more > self.budget:
            return BUDGET
        tenant = self.ledger.tenant(space)
        return QUOTA if tenant.quota and tenant.used + more > tenant.quota else ""

    def _keep_quota(self, space: bytes, more: int, pinned: set[int]) -> None:
        ledger = self.ledger
        tenant = ledger.tenant(space)
        if not tenant.quota or tenant.used + more <= tenant.quota:
            return
        key = tenants.tenant_of(ledger.txn, space)
        for node in oldest(ledger, tenants.spaces_of(ledger.txn, key), self.spare | pinned):
            excess = ledger.tenant(space).used + more - tenant.quota
            if excess <= 0:
                return
            self.gone.add(node.space, QUOTA, give_up(ledger, node, excess, self.spare | pinned))

    def _keep_budget(self, more: int, more_state: int, pinned: set[int]) -> None:
        ledger, target = self.ledger, self.budget - more
        if ledger.used <= target:
            return
        share = int(self.budget * state_share(ledger.txn)) - more_state
        going = leaves(ledger, self.spare | pinned)
        left = True
        while ledger.used > target:
            if (ledger.state_bytes > share or not left) and self._thin_one(pinned):
                continue
            node = next(going, None) if left else None
            left = node is not None
            if node is not None:
                gone = give_up(ledger, node, ledger.used - target, self.spare | pinned)
                self.gone.add(node.space, self.why, gone)
            elif not self._thin_one(pinned):
                return

    def _thin_one(self, pinned: set[int]) -> bool:
        for chunk, mark in self.ledger.states.ascending():
            if mark.node in pinned or chunk in self.last:
                continue
            thinned = thin(self.ledger, chunk, self.spare | pinned)
            if thinned is not None:
                self.ledger.states.floor = max(self.ledger.states.floor, mark.score)
                self.gone.add(thinned[0], STATES, thinned[1])
                return True
        return False


def settle_eviction(env: Environment, policy: str | None, share: float | None) -> None:
    """Write down a policy and a share that were given; nodes are ranked anew for a new policy.

    Raises ``UnknownPolicy``, or ``ValueError`` for a share outside ``[0, 1]``.
    """
    if policy is not None:
        policy_named(policy)
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"A state_share of {share} is not within 0 and 1")
    with env.begin() as txn:
        new_policy = policy is not None and policy != policy_name(txn)
        new_share = share is not None and round(share * MILLION) != round(
            state_share(txn) * MILLION
        )
    if env.read_only or not (new_policy or new_share):
        return
    with env.begin(write=True) as txn:
        if new_share and share is not None:
            txn.put("meta", STATE_SHARE, layout.u64(round(share * MILLION)))
        if new_policy and policy is not None:
            txn.put("meta", POLICY, policy.encode())
            ledger = Ledger(txn)
            rebuild(ledger, used=ledger.used, reorder=True)
            ledger.settle()


def state_share(txn: Transaction) -> float:
    """What part of the budget states may keep when room is needed."""
    data = txn.get("meta", STATE_SHARE)
    return layout.from_u64(data) / MILLION if data is not None else DEFAULT_SHARE


def budget_of(txn: Transaction, fallback: int) -> int:
    """The budget in force: another process may have changed it since this one began."""
    return counter(txn, "budget") or fallback
