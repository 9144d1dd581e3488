"""A space: everything that is equal before a cached byte may be reused, and what one does in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvkeep.errors import Damaged, KvkeepError, OffsetMismatch, Refused, StoreClosed
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore.events import Event
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.nearby import changed_field
from kvkeep.prefixstore.policy import Choice, Decision, Reason, decide
from kvkeep.prefixstore.prepare import Prepared, prepare
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.recipe import kind_tree
from kvkeep.prefixstore.restore import BrokenChunk, Rebuilt, rebuild
from kvkeep.prefixstore.tokens import Tokens, as_tokens, common_prefix
from kvkeep.prefixstore.trie import Facts, Path, facts_of, walk

if TYPE_CHECKING:
    from kvkeep.prefixstore.store import Store

log = logging.getLogger("kvkeep")

ATTEMPTS = 32
"""Damaged records that one lookup steps over before it answers with a miss."""


@dataclass(frozen=True)
class Hit:
    """What a lookup gives back.

    ``caches`` cover ``tokens[:offset]`` and are the caller's own; ``None`` on a miss. ``rest``
    are the tokens that the model still has to read: never empty for a prompt that is not.
    """

    caches: list[Any] | None
    offset: int
    rest: list[int]
    decision: Decision


class Space:
    """Snapshots and resumes under one identity. Made by ``Store.space``; thread-safe."""

    def __init__(
        self, store: Store, identity: Identity, layout: tuple[str, ...], step: int = 1
    ) -> None:
        self.identity = identity
        self.id = identity.id
        self._store = store
        self._layout = layout
        self._step = step

    def snapshot(
        self,
        tokens: Any,
        caches: Sequence[Any],
        origin: str = "prompt",
        prefilled: int | None = None,
    ) -> Receipt:
        """Store ``caches``, which cover ``tokens``.

        Copies the rows that nobody stored before and returns; a thread does the rest (see
        ``Receipt``). Tokens beyond the caches' offset are left out, and caches beyond the
        tokens are cut, where that is exact. The caches are neither changed nor kept.
        ``origin`` says what ends here: ``prompt``, ``output``, ``boundary`` or ``interval``.

        In chunk-aligned mode only whole prefill steps are stored. ``prefilled`` says how many
        leading tokens a prefill computed; without it all of them, and none of an ``output``.

        Raises ``Refused`` for caches that cannot be stored exactly. A failure of the store
        raises nothing: the receipt says that it was not stored, and why.
        """
        ids = as_tokens(tokens)
        self._check_layout(caches)
        if self._step > 1:
            computed = (0 if origin == "output" else len(ids)) if prefilled is None else prefilled
            ids = ids[: min(len(ids), computed) // self._step * self._step]
            if not len(ids):
                return Receipt().settle(False, 0, "no whole prefill step to store")
        started = time.perf_counter()
        try:
            queued = self._store.writer.queued(self.id)
            with self._store.env.begin() as txn:
                prepared = prepare(
                    txn, self.id, ids, caches, origin, queued, self._store.quarantined()
                )
            self._store.register(self.identity)
            receipt = self._store.writer.submit(prepared)
        except OffsetMismatch as error:
            if self._step == 1:
                raise
            return Receipt().settle(False, 0, error.problem)
        except (Refused, StoreClosed):
            raise
        except (KvkeepError, OSError, MemoryError) as error:
            log.warning("kvkeep: not stored: %s", error)
            problem = error.problem if isinstance(error, KvkeepError) else str(error)
            return Receipt().settle(False, 0, problem)
        self._store.writer.call(lambda: self._note(prepared, receipt, started))
        return receipt

    def resume(self, tokens: Any, minimum: int = 1) -> Hit:
        """The longest stored prefix of ``tokens`` that can really be resumed, rebuilt.

        Resumes at most ``len(tokens) - 1`` positions, and nothing below ``minimum``. A
        failure of the store or damage in it is a miss, or the next best offset.
        """
        ids = as_tokens(tokens)
        started = time.perf_counter()
        used: tuple[bytes, ...] = ()
        rebuilt: Rebuilt | None = None
        try:
            self._await_queued(ids)
            choice, path, rebuilt = self._resume(ids, minimum)
            decision = choice.decision
            used = tuple(node.key for node in path.nodes)
        except StoreClosed:
            raise
        except (KvkeepError, OSError, MemoryError) as error:
            log.warning("kvkeep: a lookup failed and counts as a miss: %s", error)
            decision = Decision(0, 0, len(ids), Reason.STORE_FAILED)
        event = self._event("lookup", decision.why, started, rebuilt.bytes_read if rebuilt else 0)
        kinds = ",".join(sorted({limit.kind for limit in decision.limits}))
        self._store.events.add(
            replace(
                event,
                prompt=len(ids),
                matched=decision.matched,
                resumed=decision.offset,
                kinds=kinds,
            ),
            used,
        )
        caches = rebuilt.caches if rebuilt is not None else None
        return Hit(caches, decision.offset, ids[decision.offset :].tolist(), decision)

    def explain(self, tokens: Any, minimum: int = 1) -> Decision:
        """What ``resume`` would decide, without restoring or counting anything."""
        ids = as_tokens(tokens)
        self._await_queued(ids)
        with self._store.env.begin() as txn:
            choice, path, _ = self._decide(txn, ids, minimum)
            return self._named(txn, ids, choice.decision, path)

    def _resume(self, ids: Tokens, minimum: int) -> tuple[Choice, Path, Rebuilt | None]:
        newer = damaged = False
        for _ in range(ATTEMPTS):
            with self._store.env.begin() as txn:
                choice, path, facts = self._decide(txn, ids, minimum)
                offset, chosen = choice.decision.offset, choice.candidate
                if chosen is None:
                    decision = self._named(txn, ids, choice.decision, path)
                    return (
                        self._scarred(replace(choice, decision=decision), newer, damaged),
                        path,
                        None,
                    )
                held = facts.held[chosen]
                point = None
                if choice.point is not None:
                    point = next(p for p in held.points if p.offset == offset)
                try:
                    rebuilt = rebuild(txn, self.id, held, point, offset)
                    return self._scarred(choice, newer, damaged), path, rebuilt
                except BrokenChunk as broken:
                    newer, damaged = newer or broken.newer, damaged or not broken.newer
                    self._store.put_aside(broken.chunk, str(broken), newer=broken.newer)
        raise Damaged("So many records of this prompt are damaged that it is not served")

    def _decide(self, txn: Transaction, ids: Tokens, minimum: int) -> tuple[Choice, Path, Facts]:
        path = walk(txn, self.id, ids)
        facts = facts_of(txn, path, self._store.quarantined())
        choice = decide(len(ids), path.matched, facts.candidates, minimum, self._step)
        if path.broken is not None:
            reason = Reason.NEWER_FORMAT if path.newer else Reason.CORRUPT
            choice = replace(choice, decision=replace(choice.decision, reason=reason))
        return choice, path, facts

    def _scarred(self, choice: Choice, newer: bool, damaged: bool) -> Choice:
        """The choice, with damage as its reason where damage is what limited it."""
        decision = choice.decision
        if not (newer or damaged) or decision.reason in (Reason.FULL, Reason.LAST_TOKEN):
            return choice
        reason = Reason.CORRUPT if damaged else Reason.NEWER_FORMAT
        return replace(choice, decision=replace(decision, reason=reason))

    def _named(self, txn: Transaction, ids: Tokens, decision: Decision, path: Path) -> Decision:
        """A miss that another space explains, with the field that differs."""
        if path.nodes or decision.reason is not Reason.NO_PREFIX or len(ids) < 2:
            return decision
        field = changed_field(txn, self.identity, ids)
        return replace(decision, reason=Reason.SPACE_CHANGED, detail=field) if field else decision

    def _await_queued(self, ids: Tokens) -> None:
        """What was accepted is readable at once: wait where a queued snapshot shares a token."""
        for prepared in self._store.writer.queued(self.id):
            if common_prefix(prepared.snapshot.tokens, ids):
                self._store.writer.flush()
                return

    def _check_layout(self, caches: Sequence[Any]) -> None:
        kinds = kind_tree(caches)
        plain = tuple(kind.replace("kv-quant", "kv") for kind in kinds)
        if self._layout and kinds != self._layout and plain != self._layout:
            raise Refused(
                f"These caches are {', '.join(kinds)}; the space was made for "
                f"{', '.join(self._layout)}",
                remedy="Open a space whose layout is that of the model's own caches.",
            )

    def _note(self, prepared: Prepared, receipt: Receipt, started: float) -> None:
        event = self._event("snapshot", receipt.reason, started, receipt.bytes_written)
        self._store.events.add(
            replace(
                event,
                prompt=len(prepared.snapshot.tokens),
                new=receipt.tokens_new if receipt.stored else 0,
                known=receipt.tokens_known,
            )
        )

    def _event(self, what: str, reason: str, started: float, nbytes: int) -> Event:
        seconds = time.perf_counter() - started
        return Event(what, time.time(), self.id, reason, nbytes=nbytes, seconds=seconds)
