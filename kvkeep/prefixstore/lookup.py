"""One lookup: walk, decide, rebuild, and step over what turns out to be damaged."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from kvkeep.errors import Damaged
from kvkeep.persistence.environment import Environment, Transaction
from kvkeep.prefixstore.events import NOTHING, Used
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.lapsed import EXPIRED, what_became
from kvkeep.prefixstore.nearby import changed_field
from kvkeep.prefixstore.policy import FAULTS, Choice, Decision, Reason, decide
from kvkeep.prefixstore.quarantine import Quarantine
from kvkeep.prefixstore.restore import BrokenChunk, Rebuilt, rebuild
from kvkeep.prefixstore.tokens import Tokens, insides
from kvkeep.prefixstore.trace import Trace, trace
from kvkeep.prefixstore.trie import Facts, Path, facts_of, walk
from kvkeep.prefixstore.ttl import fresh

ATTEMPTS = 32
"""Damaged records that one lookup steps over before it gives up."""


@dataclass(frozen=True)
class Found:
    """What a lookup decided, the nodes and the state that it used, and what it rebuilt.

    ``node`` is the id of the deepest node on the path, ``origin`` what the resume point was,
    empty away from one; rebuilding took ``seconds``.
    """

    decision: Decision
    used: Used = NOTHING
    rebuilt: Rebuilt | None = None
    node: int = 0
    origin: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Lookup:
    """Where and how to look: a space of an environment, and its prefill step.

    ``quarantine`` is told of every frame that cannot be used.
    """

    env: Environment
    identity: Identity
    step: int
    quarantine: Quarantine

    def explain(self, tokens: Tokens, minimum: int) -> Decision:
        """The decision alone."""
        with self.env.begin() as txn:
            choice, path, _ = self._decide(txn, tokens, minimum)
            return self._named(txn, tokens, choice.decision, path)

    def trace(self, tokens: Tokens, minimum: int) -> Trace:
        """The decision, with the walk and the weighing that led to it."""
        with self.env.begin() as txn:
            choice, path, facts = self._decide(txn, tokens, minimum)
            decision = self._named(txn, tokens, choice.decision, path)
            aside = self.quarantine.ids()
            return trace(txn, self.identity.id, tokens, decision, path, facts, self.step, aside)

    def find(self, tokens: Tokens, minimum: int, live: int = 0) -> Found:
        """The decision, carried out unless the caller's own ``live`` tokens reach as far.

        Raises ``StoreUnusable`` or ``Damaged``.
        """
        for _ in range(ATTEMPTS):
            with self.env.begin() as txn:
                choice, path, facts = self._decide(txn, tokens, minimum)
                decision = choice.decision
                used = Used(
                    tuple(n.key for n in path.nodes if n.start < max(live, decision.offset))
                )
                node = path.nodes[-1].id if path.nodes else 0
                if live and live >= decision.offset:
                    return Found(_outreached(decision, live), used, node=node)
                if choice.candidate is None:
                    return Found(self._named(txn, tokens, decision, path), used, node=node)
                held = facts.held[choice.candidate]
                point = None
                if choice.point is not None:
                    point = next(p for p in held.points if p.offset == decision.offset)
                    used = used._replace(state=point.state)
                started = time.perf_counter()
                try:
                    rebuilt = rebuild(txn, self.identity.id, held, point, decision.offset)
                    origin = point.origin if point is not None else ""
                    seconds = time.perf_counter() - started
                    return Found(decision, used, rebuilt, node, origin, seconds)
                except BrokenChunk as broken:
                    self.quarantine.add(broken)
        raise Damaged("So many records of this prompt are damaged that it is not served")

    def _decide(self, txn: Transaction, tokens: Tokens, minimum: int) -> tuple[Choice, Path, Facts]:
        path = fresh(txn, walk(txn, self.identity.id, tokens))
        facts = facts_of(txn, path, self.quarantine.ids(), self.quarantine.newer)
        inside = insides(tokens)
        choice = decide(len(tokens), path.matched, facts.candidates, minimum, self.step, inside)
        if path.fault is not None:
            choice = replace(choice, decision=_ended(choice.decision, path.fault))
        else:
            choice = replace(
                choice, decision=_regretted(txn, self.identity.id, choice.decision, tokens, path)
            )
        return choice, path, facts

    def _named(self, txn: Transaction, tokens: Tokens, decision: Decision, path: Path) -> Decision:
        """A miss that another space explains, with the field that differs."""
        if path.nodes or decision.reason is not Reason.NO_PREFIX or len(tokens) < 2:
            return decision
        field = changed_field(txn, self.identity, tokens)
        return replace(decision, reason=Reason.SPACE_CHANGED, detail=field) if field else decision


def _outreached(decision: Decision, live: int) -> Decision:
    """The decision of a lookup that ``live`` tokens in the caller's memory serve."""
    matched = max(decision.matched, live)
    reason = decision.reason
    if live == decision.prompt_tokens - 1:
        reason = Reason.LAST_TOKEN if matched > live else Reason.FULL
    elif matched == live:
        reason = Reason.FULL
    limits = tuple(limit for limit in decision.limits if limit.offset >= live)
    return replace(decision, offset=live, matched=matched, reason=reason, limits=limits)


def _regretted(
    txn: Transaction, space: bytes, decision: Decision, tokens: Tokens, path: Path
) -> Decision:
    """The decision, with its reason where what comes next was stored once."""
    if path.expired:
        return _ended(decision, Reason.EXPIRED)
    if decision.reason not in (Reason.FULL, Reason.NO_PREFIX):
        return decision
    became = what_became(txn, space, tokens, path.matched)
    if became is None:
        return decision
    return replace(decision, reason=Reason.EXPIRED if became == EXPIRED else Reason.EVICTED)


def _ended(decision: Decision, why: Reason) -> Decision:
    """The decision on a path that ends early, which is its reason where that may matter."""
    if decision.reason in (Reason.LAST_TOKEN, *FAULTS):
        return decision
    return replace(decision, reason=why)
