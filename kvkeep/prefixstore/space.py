"""A space: everything that is equal before a cached byte may be reused, and what one does in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import KvkeepError, OffsetMismatch, Refused, StoreClosed
from kvkeep.prefixstore.batch import take_row
from kvkeep.prefixstore.core import Core
from kvkeep.prefixstore.events import Event
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.lookup import Found, Lookup
from kvkeep.prefixstore.policy import Decision, Reason
from kvkeep.prefixstore.prepare import prepare
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.recipe import kind_tree, refuse_stale
from kvkeep.prefixstore.tokens import Tokens, as_tokens, common_prefix

log = logging.getLogger("kvkeep")


@dataclass(frozen=True)
class Hit:
    """What a lookup gives back.

    ``caches`` cover ``tokens[:offset]`` and are the caller's own; ``None`` on a miss. ``rest``
    are the tokens that the model still has to read: never empty for a prompt that is not.

    With a draft model, ``draft`` are its caches and ``draft_offset`` the tokens that they
    cover: it may lag, and then still has to read ``tokens[draft_offset:offset]``. Where no
    draft cache is stored, ``draft`` is ``None`` and its caches are made anew.
    """

    caches: list[Any] | None
    offset: int
    rest: list[int]
    decision: Decision
    draft: list[Any] | None = None
    draft_offset: int = 0


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

    def snapshot(
        self,
        tokens: Any,
        caches: Sequence[Any],
        origin: str = "prompt",
        prefilled: int | None = None,
        row: int | None = None,
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
                self.draft._take(ids, drafted, origin, prefilled)
        started = time.perf_counter()
        receipt = self._take(ids, caches, origin, prefilled)
        self._core.writer.call(lambda: self._note(len(ids), receipt, started))
        return receipt

    def resume(self, tokens: Any, minimum: int = 1) -> Hit:
        """The longest stored prefix of ``tokens`` that can really be resumed, rebuilt.

        Resumes at most ``len(tokens) - 1`` positions, and nothing below ``minimum``. A
        failure of the store or damage in it is a miss, or the next best offset.
        """
        ids = as_tokens(tokens)
        started = time.perf_counter()
        found = self._find(ids, minimum)
        self._count(found, len(ids), started)
        offset, rest = found.decision.offset, ids[found.decision.offset :].tolist()
        if found.rebuilt is None:
            return Hit(None, offset, rest, found.decision)
        drafted = Found(found.decision)
        if self.draft is not None:
            drafted = self.draft._find(ids[: offset + 1], 1)
        return Hit(
            found.rebuilt.caches,
            offset,
            rest,
            found.decision,
            drafted.rebuilt.caches if drafted.rebuilt is not None else None,
            drafted.decision.offset if drafted.rebuilt is not None else 0,
        )

    def explain(self, tokens: Any, minimum: int = 1) -> Decision:
        """What ``resume`` would decide, without restoring or counting anything."""
        ids = as_tokens(tokens)
        self._await_queued(ids)
        return self._lookup.explain(ids, minimum)

    def _take(
        self, ids: Tokens, caches: Sequence[Any], origin: str, prefilled: int | None
    ) -> Receipt:
        self._check_layout(caches)
        if self._step > 1:
            computed = (0 if origin == "output" else len(ids)) if prefilled is None else prefilled
            ids = ids[: min(len(ids), computed) // self._step * self._step]
            if not len(ids):
                return Receipt().settle(False, 0, "no whole prefill step to store")
        try:
            queued = self._core.writer.queued(self.id)
            with self._core.env.begin() as txn:
                prepared = prepare(
                    txn, self.id, ids, caches, origin, queued, self._core.quarantine.ids()
                )
            self._core.register(self.identity)
            return self._core.writer.submit(prepared)
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

    def _find(self, ids: Tokens, minimum: int) -> Found:
        try:
            self._await_queued(ids)
            return self._lookup.find(ids, minimum)
        except StoreClosed:
            raise
        except (KvkeepError, OSError, MemoryError) as error:
            log.warning("kvkeep: a lookup failed and counts as a miss: %s", error)
            return Found(Decision(0, 0, len(ids), Reason.STORE_FAILED))

    def _await_queued(self, ids: Tokens) -> None:
        """What was accepted is readable at once: wait where a queued snapshot shares a token."""
        for prepared in self._core.writer.queued(self.id):
            if common_prefix(prepared.snapshot.tokens, ids):
                self._core.writer.flush()
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

    def _note(self, tokens: int, receipt: Receipt, started: float) -> None:
        self._core.events.add(
            Event(
                "snapshot",
                time.time(),
                self.id,
                receipt.reason,
                prompt=tokens,
                new=receipt.tokens_new if receipt.stored else 0,
                known=receipt.tokens_known,
                nbytes=receipt.bytes_written,
                seconds=time.perf_counter() - started,
            )
        )

    def _count(self, found: Found, tokens: int, started: float) -> None:
        decision = found.decision
        self._core.events.add(
            Event(
                "lookup",
                time.time(),
                self.id,
                decision.why,
                prompt=tokens,
                matched=decision.matched,
                resumed=decision.offset,
                nbytes=found.rebuilt.bytes_read if found.rebuilt is not None else 0,
                seconds=time.perf_counter() - started,
                kinds=",".join(sorted({limit.kind for limit in decision.limits})),
            ),
            found.used,
        )
