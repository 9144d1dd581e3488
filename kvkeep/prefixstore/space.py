"""A space: everything that is equal before a cached byte may be reused, and what one does in it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import KvkeepError, OffsetMismatch, Refused, StoreClosed
from kvkeep.prefixstore.batch import take_row
from kvkeep.prefixstore.core import Core
from kvkeep.prefixstore.event import (
    LOOKUP,
    MEMORY,
    RESTORE,
    SNAPSHOT,
    STORE,
    Event,
    request_id,
)
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.lookup import Found, Lookup
from kvkeep.prefixstore.pins import Pin, pinned_on, remove_pin
from kvkeep.prefixstore.policy import Decision, Reason
from kvkeep.prefixstore.prepare import prepare
from kvkeep.prefixstore.ranges import spelled
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.recipe import kind_tree, refuse_stale
from kvkeep.prefixstore.tokens import Tokens, as_tokens, common_prefix
from kvkeep.prefixstore.trace import Trace
from kvkeep.prefixstore.trie import walk
from kvkeep.prefixstore.unfinished import Unfinished

log = logging.getLogger("kvkeep")

FAILURES = (KvkeepError, OSError, MemoryError, RuntimeError)
"""What becomes a miss or a receipt (I7). MLX without memory and threads that cannot start raise
``RuntimeError``."""

SHED = "shed: the writer is behind"
"""The reason of a snapshot that was left out, because it might not wait."""


@dataclass(frozen=True)
class Hit:
    """What a lookup gives back.

    ``caches`` cover ``tokens[:offset]`` and are the caller's own; ``None`` on a miss. ``rest``
    are the tokens that the model still has to read: never empty for a prompt that is not.

    With a draft model, ``draft`` are its caches and ``draft_offset`` the tokens that they
    cover: it may lag, and then still has to read ``tokens[draft_offset:offset]``. Where no
    draft cache is stored, ``draft`` is ``None`` and its caches are made anew.

    ``request`` names the lookup in reports: ``kvkeep why REQUEST`` explains it later.
    """

    caches: list[Any] | None
    offset: int
    rest: list[int]
    decision: Decision
    draft: list[Any] | None = None
    draft_offset: int = 0
    request: str = ""


class Space:
    """Snapshots and resumes under one identity. Made by ``Store.space``; thread-safe."""

    def __init__(
        self,
        core: Core,
        identity: Identity,
        layout: tuple[str, ...],
        step: int = 1,
        draft: Space | None = None,
    ) -> None:
        self.identity = identity
        self.id = identity.id
        self.draft = draft
        self._core = core
        self._layout = layout
        self._step = step
        self._lookup = Lookup(core.env, identity, step, core.quarantine)
        core.events.know(identity)

    @property
    def layout(self) -> tuple[str, ...]:
        """The kinds of the caches that belong here, in order; empty where any are taken."""
        return self._layout

    @property
    def step(self) -> int:
        """The prefill step at whose multiples alone it resumes; 1 but in chunk-aligned mode."""
        return self._step

    def snapshot(
        self,
        tokens: Any,
        caches: Sequence[Any],
        origin: str = "prompt",
        prefilled: int | None = None,
        row: int | None = None,
        request: str | None = None,
        wait: bool = True,
    ) -> Receipt:
        """Store ``caches``, which cover ``tokens``.

        Copies the rows that nobody stored before and returns; a thread does the rest (see
        ``Receipt``). Tokens beyond the caches' offset are left out, and caches beyond the
        tokens are cut, where that is exact. The caches are neither changed nor kept.
        ``origin`` says what ends here: ``prompt``, ``output``, ``boundary`` or ``interval``.

        ``row`` takes one request out of a batch layout first, without padding; ``tokens`` are
        then that request's own.

        With a draft model, its caches may follow the target's in the same list, as mlx-lm
        keeps them. They have an offset of their own, and are left out where they cannot be
        stored exactly; the receipt is the target's.

        In chunk-aligned mode only whole prefill steps are stored. ``prefilled`` says how many
        leading tokens a prefill computed; without it all of them, and none of an ``output``.

        ``request`` is the id of the lookup that this belongs to (``Hit.request``).

        Where the writer is far behind, the call waits for it; with ``wait=False`` the snapshot
        is left out instead, and its receipt says so.

        Raises ``Refused`` for caches that cannot be stored exactly. A failure of the store
        raises nothing: the receipt says that it was not stored, and why.
        """
        ids = as_tokens(tokens)
        if row is not None:
            caches = take_row(caches, row)
        if self.draft is not None and len(caches) > len(self._layout):
            caches, drafted = caches[: len(self._layout)], caches[len(self._layout) :]
            refuse_stale(caches, len(ids))
            with suppress(Refused):
                self.draft._take(ids, drafted, origin, prefilled, wait)
        started = time.perf_counter()
        receipt = self._take(ids, caches, origin, prefilled, wait)
        named = request_id(request)
        self._core.writer.call(lambda: self._note(ids, receipt, started, origin, named))
        return receipt

    def resume(
        self,
        tokens: Any,
        minimum: int = 1,
        request: str | None = None,
        held: int = 0,
        record: bool = True,
    ) -> Hit:
        """The longest stored prefix of ``tokens`` that can really be resumed, rebuilt.

        Resumes at most ``len(tokens) - 1`` positions, and nothing below ``minimum``. A
        failure of the store or damage in it is a miss, or the next best offset. ``request``
        names the lookup in reports; without it an id is made up.

        ``held`` tokens are what the caller can resume from its own memory. Nothing is rebuilt
        that does not reach further; the hit then has no caches, and counts as one of ``held``.

        With ``record=False`` nothing is written down: no event, and not that something was used.
        """
        ids = as_tokens(tokens)
        named = request_id(request) or os.urandom(6).hex()
        started = time.perf_counter()
        found = self._find(ids, minimum, held)
        tier = MEMORY if found.rebuilt is None else STORE
        if record:
            self._count(LOOKUP, found, ids, started, named, tier)
        offset, rest = found.decision.offset, ids[found.decision.offset :].tolist()
        if found.rebuilt is None:
            return Hit(None, offset, rest, found.decision, request=named)
        drafted = Found(found.decision)
        if self.draft is not None:
            started = time.perf_counter()
            drafted = self.draft._find(ids[: offset + 1], 1, 0)
            if drafted.rebuilt is not None and record:
                self.draft._count(RESTORE, drafted, ids[: offset + 1], started, named)
        return Hit(
            found.rebuilt.caches,
            offset,
            rest,
            found.decision,
            drafted.rebuilt.caches if drafted.rebuilt is not None else None,
            drafted.decision.offset if drafted.rebuilt is not None else 0,
            named,
        )

    def explain(self, tokens: Any, minimum: int = 1) -> Decision:
        """What ``resume`` would decide, without restoring or counting anything."""
        ids = as_tokens(tokens)
        self._await_queued(ids, minimum)
        return self._lookup.explain(ids, minimum)

    def trace(self, tokens: Any, minimum: int = 1) -> Trace:
        """As ``explain``, with the walk, the recipes and the resume points that led to it."""
        ids = as_tokens(tokens)
        self._await_queued(ids, minimum)
        return self._lookup.trace(ids, minimum)

    def pin(self, tokens: Any, seconds: float | None = None) -> Pin:
        """Keep what is stored of ``tokens`` from being evicted, and from expiring.

        For ``seconds``, unless there is no other way to make room; without a time for good,
        until ``unpin``. Waits for what was accepted before. ``Pin.tokens`` says how much of it
        was stored. Raises ``NothingToPin``, or ``TooMuchPinned`` where pins without a deadline
        would hold more than three quarters of the budget.
        """
        return self._core.pin(self.id, as_tokens(tokens), seconds)

    def unpin(self, tokens: Any) -> bool:
        """Take out the pin that reaches furthest within ``tokens``; whether there was one."""
        self._core.check_writable()
        with self._core.env.begin(write=True) as txn:
            node = pinned_on(txn, self.id, as_tokens(tokens))
            return node is not None and remove_pin(txn, node)

    def unfinished(self, prompt: Any, key: bytes) -> Unfinished:
        """The answer to ``prompt`` of the request that ``key`` tells from others."""
        return Unfinished(self._core, self, prompt, key)

    def served(self, decision: Decision, seconds: float, request: str | None = None) -> str:
        """Count a lookup that a server answered from memory, without the store.

        ``decision`` says what was resumed of what was asked, and why not more; handing it
        over took ``seconds``. Answers the request's id.
        """
        named = request_id(request) or os.urandom(6).hex()
        started = time.perf_counter() - seconds
        self._count(LOOKUP, Found(decision), None, started, named, tier=MEMORY)
        return named

    def measured(self, tokens: int, seconds: float) -> None:
        """Say that the model read ``tokens`` of a prompt in ``seconds``.

        From such measurements reports estimate what resuming saved. Nothing else is counted
        by it.
        """
        self._core.events.measured(self.id, tokens, seconds)

    def _take(
        self,
        ids: Tokens,
        caches: Sequence[Any],
        origin: str,
        prefilled: int | None,
        wait: bool,
    ) -> Receipt:
        self._check_layout(caches)
        if self._step > 1:
            computed = (0 if origin == "output" else len(ids)) if prefilled is None else prefilled
            ids = ids[: min(len(ids), computed) // self._step * self._step]
            if not len(ids):
                return Receipt().settle(False, 0, "no whole prefill step to store")
        if not wait and self._core.writer.is_full:
            return Receipt().settle(False, 0, SHED)
        try:
            with self._core.writer.building(self.id, ids):
                queued = self._core.writer.queued(self.id)
                with self._core.env.begin() as txn:
                    prepared = prepare(
                        txn, self.id, ids, caches, origin, queued, self._core.quarantine.ids()
                    )
                self._core.register(self.identity)
                return self._core.writer.submit(prepared, wait)
        except OffsetMismatch as error:
            if self._step == 1:
                raise
            return Receipt().settle(False, 0, error.problem)
        except (Refused, StoreClosed):
            raise
        except FAILURES as error:
            log.warning("kvkeep: not stored: %s", error)
            problem = error.problem if isinstance(error, KvkeepError) else str(error)
            return Receipt().settle(False, 0, problem)

    def _find(self, ids: Tokens, minimum: int, held: int) -> Found:
        try:
            self._await_queued(ids, max(minimum, held + 1))
            return self._lookup.find(ids, minimum, held)
        except StoreClosed:
            raise
        except FAILURES as error:
            log.warning("kvkeep: a lookup failed and counts as a miss: %s", error)
            return Found(Decision(held, held, len(ids), Reason.STORE_FAILED))

    def _await_queued(self, ids: Tokens, minimum: int) -> None:
        """What was accepted is readable at once: wait for what shares ``minimum`` tokens."""
        for prepared in self._core.writer.queued(self.id):
            if common_prefix(prepared.snapshot.tokens, ids) >= minimum:
                self._core.writer.settled(prepared)

    def _check_layout(self, caches: Sequence[Any]) -> None:
        kinds = kind_tree(caches)
        plain = tuple(kind.replace("kv-quant", "kv") for kind in kinds)
        if self._layout and kinds != self._layout and plain != self._layout:
            raise Refused(
                f"These caches are {', '.join(kinds)}; the space was made for "
                f"{', '.join(self._layout)}",
                remedy="Open a space whose layout is that of the model's own caches.",
            )

    def _note(
        self, ids: Tokens, receipt: Receipt, started: float, origin: str, request: str
    ) -> None:
        taken = time.perf_counter() - started
        node = 0
        if receipt.stored:
            with self._core.env.begin() as txn:
                nodes = walk(txn, self.id, ids).nodes
                node = nodes[-1].id if nodes else 0
        self._core.events.add(
            Event(
                SNAPSHOT,
                time.time(),
                self.id,
                receipt.reason,
                prompt=len(ids),
                new=receipt.tokens_new if receipt.stored else 0,
                known=receipt.tokens_known,
                nbytes=receipt.bytes_written,
                seconds=taken,
                origin=origin,
                tier=STORE if receipt.stored else "",
                request=request,
                rate=self._core.events.rate(self.id),
                node=node,
            )
        )

    def _count(
        self,
        what: str,
        found: Found,
        ids: Tokens | None,
        started: float,
        request: str,
        tier: str = STORE,
    ) -> None:
        decision, limits = found.decision, found.decision.limits
        self._core.events.add(
            Event(
                what,
                time.time(),
                self.id,
                decision.why,
                prompt=decision.prompt_tokens,
                matched=decision.matched,
                resumed=decision.offset,
                nbytes=found.rebuilt.bytes_read if found.rebuilt is not None else 0,
                seconds=time.perf_counter() - started,
                kinds=",".join(sorted({limit.kind for limit in limits})) if limits else "",
                layers=spelled(limits[0].layers) if limits else "",
                limit=limits[0].offset if limits else 0,
                rule=str(limits[0].reason) if limits else "",
                origin=found.origin,
                tier=tier if decision.offset else "",
                request=request,
                rate=self._core.events.rate(self.id),
                node=found.node,
                rebuild=found.seconds,
                asked=_asked(ids, decision.matched, self._core.events.keeps),
            ),
            found.used,
        )


def _asked(ids: Tokens | None, matched: int, keeps: int) -> tuple[int, ...]:
    """The ids that the prompt had where it parted, as many as are kept."""
    return tuple(ids[matched:][:keeps].tolist()) if keeps and ids is not None else ()
