"""``PromptCache``: the drop-in for ``mlx_lm``'s ``LRUPromptCache``, with a store below it.

    from kvkeep import PromptCache
    generator = ResponseGenerator(provider, PromptCache(store="~/.cache/kvkeep", provider=provider))

Two tiers: live caches in memory under a cap of bytes, and the store. A lookup restores from
the store only what reaches strictly further than memory. Nothing that goes wrong here reaches
the server: it is a miss, counted, and logged once.

Arrays are touched only on the thread that calls, which must be the one that runs the model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import KvkeepError, OffsetMismatch, Refused, UnknownCache
from kvkeep.hooks.agreement import Agree, common_offset
from kvkeep.hooks.live_caches import own
from kvkeep.hooks.memory_tier import Entry, MemoryTier, Taken
from kvkeep.hooks.metrics import Lookup, Metrics
from kvkeep.hooks.model_homes import FixedHome, Home, ModelHomes, NoHome, Provider
from kvkeep.hooks.outcomes import Answer, Outcomes
from kvkeep.hooks.precision import newest
from kvkeep.prefixstore.policy import Decision, Reason
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.recipe import Live, read_caches
from kvkeep.prefixstore.space import Hit, Space
from kvkeep.prefixstore.store import Store, open_store
from kvkeep.prefixstore.tokens import Tokens, as_tokens
from kvkeep.prefixstore.unfinished import Continued

ORIGINS = {"system": "boundary", "user": "prompt"}
"""What ends where an entry of this type ends; any other is an output."""

FLUSH_SECONDS = 10.0
"""The bound of the flush when a server stops."""

SHARE_OF_MEMORY = 8
"""Without a cap, live caches take at most this fraction of the machine's memory."""


@dataclass(frozen=True)
class Served:
    """The last lookup of a thread: what was asked, and what was answered.

    ``tokens`` is the whole prompt, ``saved`` the estimate of seconds that resuming saved, and
    ``answered`` the tokens of the answer that are told again because a crash cut it off.
    """

    home: Home
    tokens: Tokens
    decision: Decision
    tier: str
    seconds: float
    saved: float
    request: str = ""
    answered: int = 0


class PromptCache:
    """Live caches in memory above a store, with the surface of ``LRUPromptCache``.

    ``max_size`` sequences and ``max_bytes`` bytes are held in memory, whatever path the
    server takes; without ``max_bytes`` an eighth of the machine's memory.

    ``store`` is an open store or its folder; without one this is memory alone. ``provider``
    is the server's ``ModelProvider``, whose model identifies the space by content;
    ``space`` names one space instead, for a server of one model. ``salt`` keeps tenants
    apart. ``exact`` is chunk-aligned mode: what is inserted is not kept, only checkpoints at
    whole prefill steps are. ``agree`` is what ranks of a distributed run agree by.
    """

    def __init__(
        self,
        max_size: int = 10,
        max_bytes: int | None = None,
        *,
        store: Store | str | os.PathLike[str] | None = None,
        provider: Provider | None = None,
        space: Space | None = None,
        salt: str | None = None,
        exact: bool = False,
        agree: Agree | None = None,
    ) -> None:
        self.max_size = max_size
        self.max_bytes = default_bytes() if max_bytes is None else max_bytes
        self.metrics = Metrics()
        self._outcomes = Outcomes(self.metrics)
        self.last: Served | None = None
        self.on_lookup: Callable[[Served | None], None] = lambda _: None
        self.go_on: Callable[[Home, Tokens], Continued | None] = lambda *_: None
        self.rate = 0.0
        self._missed: tuple[Decision, str] | None = None
        self._store = open_store(store) if isinstance(store, str | os.PathLike) else store
        self._mine = self._store is not store
        self._exact = exact
        self._memory = MemoryTier(0 if exact else max_size, self.max_bytes)
        self._agree = agree
        self._home: Callable[[Any], Home]
        if space is not None:
            self._home = FixedHome(space)
        elif provider is not None:
            self._home = ModelHomes(provider, self._store, salt=salt, exact=exact)
        else:
            self._home = NoHome()

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes that live caches hold in memory."""
        return self._memory.nbytes

    @property
    def store(self) -> Store | None:
        """The store below, if there is one."""
        return self._store

    def fetch_nearest_cache(
        self, model: Any, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, Sequence[int]]:
        """Caches for the longest resumable prefix of ``tokens``, and the tokens after it.

        The caches are the caller's own; ``None`` on a miss. At least one token is left, for
        prompts that have one. With a draft model its caches follow the target's.
        """
        self.last = None
        taken = self.guarded("lookup", lambda: self._fetch(model, tokens), None)
        self.guarded("report", lambda: self.on_lookup(self.last), None)
        if taken is None:
            return None, tokens
        return taken[0], tokens[taken[1] :]

    def insert_cache(
        self,
        model: Any,
        tokens: Sequence[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep ``prompt_cache``, which covers ``tokens``, in both tiers.

        Rows that the store lacks are copied out before this returns; a thread writes them.
        Caches that do not stand at the end of ``tokens`` are cut or left out.
        """
        self.guarded(
            "insertion", lambda: self._insert(model, tokens, prompt_cache, cache_type), None
        )

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Drop the least recently used live caches; they stay in the store."""
        unbounded = 1 << 63
        self._memory.trim_to(
            unbounded if n_sequences is None else n_sequences,
            unbounded if n_bytes is None else n_bytes,
        )

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Live sequences and their bytes by what they end with."""
        return self._memory.stats_by_type()

    def checkpoint(
        self, model: Any, tokens: Sequence[int], caches: list[Any], *, origin: str = "interval"
    ) -> None:
        """Store a resume point inside a prompt; ``caches`` go on being used."""

        def store() -> None:
            home = self._home(model)
            if home.space is not None:
                self._snapshot(home, as_tokens(tokens), newest(caches), origin)
                self.metrics.checkpoint()

        self.guarded("checkpoint", store, None)

    def count(self, receipt: Receipt) -> None:
        """Count what becomes of a snapshot that was made elsewhere."""
        self._outcomes.expect(receipt)

    def kinds(self, model: Any) -> tuple[str, ...]:
        """The kinds of the model's caches; empty where they are not known."""
        return self.guarded("identity", lambda: self._home(model).kinds, ())

    def measured(self, tokens: int, seconds: float) -> None:
        """Say that the model read ``tokens`` of a prompt in ``seconds``."""
        if tokens < 1 or seconds <= 0:
            return
        rate = tokens / seconds
        self.rate = rate if not self.rate else 0.7 * self.rate + 0.3 * rate
        last = self.last
        if last is not None and last.home.space is not None:
            with suppress(KvkeepError):
                last.home.space.measured(tokens, seconds)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was accepted is durable or refused; whether it is, within seconds."""
        if self._store is None:
            return True
        return self.guarded("flush", lambda: self._flush(timeout), False)

    def close(self, timeout: float | None = None) -> bool:
        """Let go of the live caches, on the thread that made them, and flush.

        A store that was opened here is closed too.
        """
        self._memory.clear()
        done = self.flush(timeout)
        if self._store is not None and self._mine and done:
            self.guarded("closing", self._store.close, None)
        return done

    def __del__(self) -> None:
        # mlx_lm.server deletes its cache on the generation thread, and has no hook for closing.
        if getattr(self, "_mine", False):
            self.close(FLUSH_SECONDS)

    def gauges(self) -> dict[str, float]:
        """What is held now, by Prometheus name; safe to read from any thread."""
        self._outcomes.settle()
        out: dict[str, float] = {
            "kvkeep_memory_sequences": len(self._memory),
            "kvkeep_memory_bytes": self._memory.nbytes,
            "kvkeep_memory_max_bytes": self.max_bytes,
        }
        store = self._store
        if store is not None:
            with suppress(KvkeepError, OSError):
                waiting, held = store.waiting
                out["kvkeep_queue_snapshots"], out["kvkeep_queue_bytes"] = waiting, held
                out["kvkeep_store_bytes"] = store.used_bytes
                out["kvkeep_store_max_bytes"] = store.max_bytes
        return out

    def guarded(self, doing: str, what: Callable[[], Answer], otherwise: Answer) -> Answer:
        """``what()``, or ``otherwise`` where it fails: counted, and logged the first time."""
        return self._outcomes.guarded(doing, what, otherwise)

    # A lookup

    def _fetch(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        started = time.perf_counter()
        ids = as_tokens(tokens)
        home = self._home(model)
        unfinished = self.guarded("restore", lambda: self.go_on(home, ids), None)
        if unfinished is not None:
            told = Decision(len(ids) - 1, len(ids), len(ids), Reason.LAST_TOKEN)
            seconds = time.perf_counter() - started
            self._note(home, ids, told, "store", seconds, "", len(unfinished.answer))
            return unfinished.caches, len(ids) - 1
        limit = len(ids) - 1
        if self._agree is not None:
            limit = common_offset(lambda n: self._reach(home, ids[: n + 1]), limit, self._agree)
        asked = ids if limit == len(ids) - 1 else ids[: limit + 1]
        found = self._take(home, asked) if limit > 0 else None
        if self._agree is not None and self._agree(found[0].offset if found else 0)[0] != limit:
            found = None
        taken, decision, tier, request = found or self._miss(ids)
        offset = taken.offset if taken is not None else 0
        caches = None
        if taken is not None:
            caches = taken.caches + self._drafted(home, ids, taken)
        self._note(home, ids, decision, tier, time.perf_counter() - started, request)
        return (caches, offset) if caches is not None else None

    def _take(self, home: Home, ids: Tokens) -> tuple[Taken, Decision, str, str] | None:
        """Caches at the furthest offset, from the tier that reaches it."""
        held, entry = self._memory.best(home.key, ids)
        hit = self._resume(home, ids, held)
        if hit is not None and hit.caches is not None:
            taken = Taken(hit.offset, hit.caches, hit.draft, hit.draft_offset)
            return taken, hit.decision, "store", hit.request
        if hit is not None:
            self._missed = hit.decision, hit.request
        if entry is None:
            return None
        top = held == len(ids) - 1
        decision = Decision(held, held, len(ids), Reason.LAST_TOKEN if top else Reason.FULL)
        if hit is not None:
            decision = hit.decision
        return self._memory.take(entry, held), decision, "memory", hit.request if hit else ""

    def _resume(self, home: Home, ids: Tokens, held: int) -> Hit | None:
        space = home.space
        if space is None:
            return None
        return self.guarded("restore", lambda: space.resume(ids, held=held), None)

    def _miss(self, ids: Tokens) -> tuple[None, Decision, str, str]:
        missed, self._missed = self._missed, None
        decision, request = missed or (Decision(0, 0, len(ids), Reason.NO_PREFIX), "")
        return None, decision, "none", request

    def _reach(self, home: Home, ids: Tokens) -> int:
        """How far this rank could resume ``ids``, without restoring anything."""

        def ask() -> int:
            held, _ = self._memory.best(home.key, ids)
            if home.space is None:
                return held
            return max(held, home.space.explain(ids, held + 1).offset)

        return self.guarded("lookup", ask, 0)

    def _drafted(self, home: Home, ids: Tokens, taken: Taken) -> list[Any]:
        """The draft's caches, brought to the target's offset; it reads what it lacks."""
        drafter = home.draft_model() if home.draft_kinds else None
        if drafter is None:
            return []
        from mlx_lm.models.cache import make_prompt_cache

        from kvkeep.hooks.prefill import prefill

        drafted = taken.draft if taken.draft is not None else make_prompt_cache(drafter)
        at = taken.draft_offset if taken.draft is not None else 0
        if at < taken.offset:
            prefill(drafter, ids[at : taken.offset].tolist(), drafted)
        return drafted

    def _note(
        self,
        home: Home,
        ids: Tokens,
        decision: Decision,
        tier: str,
        seconds: float,
        request: str,
        answered: int = 0,
    ) -> None:
        reading = decision.offset / self.rate if self.rate else 0.0
        saved = max(0.0, reading - seconds)
        self.last = Served(home, ids, decision, tier, seconds, saved, request, answered)
        self.metrics.look_up(
            Lookup(
                str(decision.reason),
                tier,
                len(ids),
                decision.matched,
                decision.offset,
                seconds,
                reading,
            )
        )

    # An insertion

    def _insert(
        self, model: Any, tokens: Sequence[int], caches: Sequence[Any], cache_type: str
    ) -> None:
        if self._exact:
            return
        home, ids = self._home(model), as_tokens(tokens)
        target, draft = home.split(newest(caches))
        try:
            live = self._checked(home, ids, target)
        except UnknownCache as error:
            self._outcomes.warn("insertion", "kept in memory only: %s", error)
            self._memory.insert(Entry(home.key, ids, own(target), None, cache_type))
            return
        except Refused as error:
            self.metrics.snapshot("refused")
            self._outcomes.warn("refusal", "not kept: %s", error)
            return
        ids = ids[: live.offset]
        receipt = None
        if home.space is not None:
            origin = ORIGINS.get(cache_type, "output")
            receipt = self._snapshot(home, ids, [*target, *draft], origin)
        if self._memory.max_size < 1:
            return
        mine = own(target)
        owned = read_caches(mine, len(ids))
        drafted = self._draft_entry(draft, len(ids))
        self._memory.insert(Entry(home.key, ids, mine, owned, cache_type, drafted, receipt))

    def _checked(self, home: Home, ids: Tokens, caches: list[Any]) -> Live:
        """The caches described, if they stand where ``ids`` end; a draft's target may lag by one.

        Raises ``Refused``.
        """
        live = read_caches(caches, len(ids))
        if not home.welcomes(live.recipe.kinds):
            raise Refused(f"This server's caches are {home.kinds}, and not {live.recipe.kinds}")
        lag = len(ids) - live.offset
        if lag > (1 if home.draft_kinds else 0):
            raise OffsetMismatch(f"The caches stand at {live.offset:,} of {len(ids):,} tokens")
        return live

    def _draft_entry(self, draft: list[Any], tokens: int) -> Live | None:
        if not draft:
            return None
        try:
            live = read_caches(own(draft), tokens)
        except Refused:
            return None
        return live if live.offset <= tokens else None

    def _snapshot(self, home: Home, ids: Tokens, caches: list[Any], origin: str) -> Receipt | None:
        """The receipt of the store; ``None`` where it refused."""
        space = home.space
        assert space is not None
        request = self.last.request if self.last is not None else None

        def store() -> Receipt | None:
            try:
                return space.snapshot(ids, caches, origin, request=request, wait=False)
            except Refused as error:
                self.metrics.snapshot("refused")
                self._outcomes.warn("refusal", "not stored: %s", error)
                return None

        receipt = self.guarded("snapshot", store, None)
        if receipt is not None:
            self.count(receipt)
        return receipt

    def _flush(self, timeout: float | None) -> bool:
        assert self._store is not None
        done = self._store.flush(timeout)
        self._outcomes.settle()
        return done


def default_bytes() -> int:
    """The cap of live caches that nobody set: a fraction of this machine's memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1 << 30, pages // SHARE_OF_MEMORY)
