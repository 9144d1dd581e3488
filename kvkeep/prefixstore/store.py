"""The store: one folder, one LMDB environment, one writer thread, any number of spaces."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep.caches.scheme import scheme_of
from kvkeep.errors import KvkeepError
from kvkeep.persistence.environment import Environment
from kvkeep.prefixstore import browse, identity, layout, metrics, recount
from kvkeep.prefixstore.budget import settle_budget, shrink
from kvkeep.prefixstore.core import Core
from kvkeep.prefixstore.event import LONGEST, Event
from kvkeep.prefixstore.events import read_events
from kvkeep.prefixstore.evict import Evicted
from kvkeep.prefixstore.ledger import Ledger, counter, policy_name
from kvkeep.prefixstore.opening import find_or_make
from kvkeep.prefixstore.past import Past
from kvkeep.prefixstore.past import find as find_past
from kvkeep.prefixstore.pins import (
    NothingToPin,
    Pin,
    all_pins,
    remove_pin,
)
from kvkeep.prefixstore.prints import remembered
from kvkeep.prefixstore.purge import (
    Purged,
    purge_conversation,
    purge_spaces,
    purge_tenant,
    wipe,
)
from kvkeep.prefixstore.recipe import kind_tree
from kvkeep.prefixstore.repair import repair
from kvkeep.prefixstore.report import WORST, Filter, Report, build, known_spaces
from kvkeep.prefixstore.room import Room, settle_eviction
from kvkeep.prefixstore.shelf import mark_of
from kvkeep.prefixstore.sizes import parse_size
from kvkeep.prefixstore.space import Space
from kvkeep.prefixstore.tokens import as_tokens
from kvkeep.prefixstore.tree import Branch, branches
from kvkeep.prefixstore.trie import walk
from kvkeep.prefixstore.writer import Limits, free_orphans

ALLOW_SHARED = "KVKEEP_ALLOW_SHARED"
DURABILITIES = ("safe", "process")


def open_store(
    path: str | os.PathLike[str],
    max_bytes: int | str | None = None,
    *,
    disk_reserve: int | str = "1GiB",
    read_only: bool = False,
    event_tokens: int = 0,
    eviction: str | None = None,
    state_share: float | None = None,
    allow_shared: bool | None = None,
    durability: str | None = None,
) -> Store:
    """Open the store in folder ``path``, or make one there.

    ``max_bytes`` is the byte budget, a number or a size such as ``"50GB"``. Without it an
    existing store keeps its own, and a new one takes 64 GiB or half of what is free on the
    disk, whichever is less. ``disk_reserve`` bytes of the disk stay free.

    ``eviction`` is the policy by which room is made: ``lru``, ``probation`` or ``size``; a store
    keeps the one it was last given, at first ``lru``. ``state_share`` is the part of the budget
    that recurrent states may keep when room is needed, at first a third. See docs/eviction.md.

    Events hold no text and no tokens. With ``event_tokens`` a lookup keeps so many token ids,
    at most 64, from where its prompt left what is stored, for ``kvkeep why REQUEST`` to show.

    ``durability`` says what outlives what. ``safe``: what ``flush`` waited for survives a power
    loss, and the store is whole after one. ``process``: it survives the end of this process, but
    not of the machine, after which the store is begun anew; nothing waits for the disk. All
    processes that have a store open have one durability: ``process`` gives way to one that is
    ``safe``, and ``safe`` is refused beside one that is not. ``None`` is ``safe``, or what
    others have. See docs/reliability.md.

    A folder that other users own or may write is refused, unless ``allow_shared`` says that
    everyone who can write there may read and change all prompts. Without it the environment
    variable ``KVKEEP_ALLOW_SHARED=1`` says so. A shared store is made for the group (0770).

    Raises ``StoreUnusable`` (``NotAStore``, ``StoreTooNew``, ``StoreReadOnly`` …), or
    ``Damaged``.
    """
    if durability not in (None, *DURABILITIES):
        raise KvkeepError(
            f"{durability!r} is no durability", remedy=f"Name one of {', '.join(DURABILITIES)}."
        )
    folder = Path(path).expanduser()
    shared = os.environ.get(ALLOW_SHARED) == "1" if allow_shared is None else allow_shared
    budget = parse_size(max_bytes) if max_bytes is not None else None
    reserve = parse_size(disk_reserve)
    marker = find_or_make(folder, budget, read_only=read_only, shared=shared)
    if budget is not None:
        marker.check(budget)
    env = Environment(
        folder,
        map_size=marker.map_bytes,
        databases=layout.DATABASES,
        read_only=read_only,
        shared=shared,
        durable=None if durability is None else durability == "safe",
        ours=True,
    )
    try:
        budget = settle_budget(env, budget, marker)
        settle_eviction(env, eviction, state_share)
        store = Store(env, Limits(budget, reserve))
        store._core.events.keeps = min(max(event_tokens, 0), LONGEST)
        return store
    except BaseException:
        env.close()
        raise


class Store:
    """An open store. Safe to use from several threads and processes; a context manager.

    After a fork the child must open the store again. ``close`` flushes.
    """

    def __init__(self, env: Environment, limits: Limits) -> None:
        self.path = env.folder
        self.env = env
        self.max_bytes = limits.max_bytes
        self._core = Core.start(env, limits)
        if not env.read_only:
            free_orphans(env)
            shrink(env, self.max_bytes)
        self._closer = weakref.finalize(self, self._core.close)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def space(
        self,
        *,
        model: Any = None,
        model_path: str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
        adapter: str | os.PathLike[str] | None = None,
        draft_model: str | os.PathLike[str] | None = None,
        kv_scheme: str | None = None,
        salt: str | None = None,
        identity: Mapping[str, Any] | None = None,
        layout: Sequence[Any] | None = None,
        draft_layout: Sequence[Any] | None = None,
        exact: bool = False,
        prefill_step: int = 2048,
        ttl: float | None = None,
        quota: float | str | None = None,
    ) -> Space:
        """The space of a model: nothing stored elsewhere is ever served here.

        With an mlx-lm ``model``, give the ``model_path`` that it was loaded from (a folder or
        a hub id in the local cache); weights, config, tokenizer, adapter and draft model are
        identified by content. ``kv_scheme`` names how keys and values are quantized, such as
        ``"affine:4:64@5000"``; without it that of the caches in ``layout`` is taken, where they
        have one. ``salt`` keeps tenants apart.

        Without an mlx-lm model, ``identity`` names what must be equal, in any JSON form, and
        ``layout`` is a cache list, empty or not, of the kinds that will be stored.

        ``draft_layout`` is the draft model's cache list, empty or not: with it the draft's
        caches are stored and resumed beside the target's (see ``Hit``).

        ``exact=True`` is chunk-aligned mode: a resumed run answers what a cold one answers,
        bit for bit. It stores only whole chunks of ``prefill_step`` tokens and resumes only
        between them, so the model must then be run in such chunks.

        ``ttl`` is the time to live in seconds: what this space did not use for so long is not
        served any more, and goes. ``quota`` is a number of bytes, or a size, that all spaces
        under this ``salt`` may use together; what they used least recently makes room. Both are
        written down and stay until they are given anew; ``float("inf")`` lifts them.

        Raises ``IdentityUnknown`` where the content cannot be read.
        """
        if (model is None) == (identity is None):
            raise KvkeepError(
                "A space is made for a model or for an identity",
                remedy="Pass model=… with model_path=…, or identity={…} with layout=caches.",
            )
        if layout is None and model is not None:
            from mlx_lm.models.cache import make_prompt_cache

            layout = make_prompt_cache(model)
        kinds = kind_tree(layout or ())
        kv_scheme = kv_scheme or scheme_of(layout or ())
        step = prefill_step if exact else 1
        plan = f"chunks of {step}" if exact else ""
        if identity is not None:
            found = _explicit(identity, kinds, kv_scheme, salt, plan)
        else:
            found = _of_model(
                model,
                model_path=model_path,
                tokenizer=tokenizer,
                adapter=adapter,
                draft_model=draft_model,
                layout=kinds,
                kv_scheme=kv_scheme,
                salt=salt,
                plan=plan,
                remember=partial(remembered, self.env),
            )
        draft = None
        if draft_layout is not None:
            drafted = kind_tree(draft_layout)
            part = found.part("draft", drafted, scheme_of(draft_layout))
            draft = Space(self._core, part, drafted, step)
        if ttl is not None or quota is not None:
            for each in (found, draft.identity if draft is not None else found):
                self._core.limit(each, ttl, quota)
        return Space(self._core, found, kinds, step, draft)

    def stored_space(self, space: str) -> Space:
        """The space of that hexadecimal id, to be read from. Raises ``KvkeepError``."""
        with self.env.begin() as txn:
            for info in browse.spaces(txn):
                if info.id == space:
                    fields = tuple(sorted(info.fields.items()))
                    return Space(self._core, identity.Identity(fields, info.label), ())
        raise KvkeepError(f"No space has the id {space}", remedy="`kvkeep ls` shows them.")

    def report(
        self,
        since: float = 0.0,
        *,
        salt: str | None = None,
        space: str | None = None,
        worst: int = WORST,
        each: Callable[[Event], None] | None = None,
    ) -> Report:
        """Totals of what was looked up, stored and evicted from ``since`` on (seconds since the
        epoch), as far back as the ring of events goes.

        With ``salt`` only that tenant's spaces, with ``space`` only those whose hexadecimal
        ids begin so: nothing of any other is in the report. ``worst`` is how many of the
        lookups that lost most it names. ``each`` is called with every event that counts.
        """
        self.flush()
        only = Filter(identity.salt_digest(salt) if salt is not None else None, space)
        with self.env.begin() as txn:
            return build(txn, self.max_bytes, since, only, each, worst)

    def metrics(self, *, salt: str | None = None, space: str | None = None) -> str:
        """What was counted since the store was made, in Prometheus' text format.

        ``salt`` and ``space`` are those of ``report``.
        """
        self.flush()
        only = Filter(identity.salt_digest(salt) if salt is not None else None, space)
        with self.env.begin() as txn:
            return metrics.render(metrics.of_store(txn, self.max_bytes, only))

    def events(
        self,
        since: float = 0.0,
        after: bytes = b"",
        *,
        salt: str | None = None,
        space: str | None = None,
    ) -> tuple[list[Event], bytes]:
        """Events from ``since`` on, and the key of the last one, to go on ``after`` it."""
        only = Filter(identity.salt_digest(salt) if salt is not None else None, space)
        with self.env.begin() as txn:
            known = known_spaces(txn)
            found, last = [], after
            for key, event in read_events(txn, since, after=after):
                last = key
                if only.allows(known.get(event.space), event.space.hex()):
                    found.append(event)
        return found, last

    def labels(self) -> dict[str, str]:
        """The models of all spaces as they were named, by hexadecimal id."""
        with self.env.begin() as txn:
            return {space.hex(): known.label for space, known in known_spaces(txn).items()}

    def past(self, request: str) -> Past:
        """A lookup that is over, by its request id or the beginning of it.

        Raises ``NoSuchRequest``.
        """
        self.flush()
        with self.env.begin() as txn:
            return find_past(txn, request, self._core.quarantine.ids())

    def tree(self, space: Space | str, first: int = 0) -> list[Branch]:
        """The stored prefixes of a space, each before those below it; with the ``first`` token
        ids of each. ``space`` may be its hexadecimal id.
        """
        space_id = space.id if isinstance(space, Space) else bytes.fromhex(space)
        with self.env.begin() as txn:
            return branches(txn, space_id, first)

    def spaces(self) -> list[browse.SpaceInfo]:
        """Every space, with what it keeps."""
        with self.env.begin() as txn:
            return list(browse.spaces(txn))

    def conversations(self) -> list[browse.Conversation]:
        """Every stored sequence that no longer one continues."""
        with self.env.begin() as txn:
            return list(browse.conversations(txn))

    def inspect(self, space: Space | str, tokens: Any) -> browse.PathInfo:
        """Rows and resume points along ``tokens``; ``space`` may be its hexadecimal id."""
        space_id = space.id if isinstance(space, Space) else bytes.fromhex(space)
        ids = as_tokens(tokens)
        with self.env.begin() as txn:
            return browse.inspect(txn, walk(txn, space_id, ids), len(ids))

    def conversation_tokens(self, conversation: str) -> list[int]:
        """The tokens of a conversation by its id; empty where it is unknown."""
        with self.env.begin() as txn:
            return browse.conversation_tokens(txn, conversation)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> recount.Audit:
        """Check and recount every record. Changes nothing."""
        self.flush()
        return recount.verify(self.env, progress)

    def repair(self) -> recount.Audit:
        """Remove what cannot be used; returns the audit that called for it."""
        self._core.check_writable()
        self.flush()
        audit = repair(self.env)
        self._core.quarantine.clear()
        return audit

    def evict(
        self,
        *,
        to: int | str | None = None,
        older_than: float | None = None,
        space: Space | str | None = None,
        pinned: bool = False,
    ) -> Evicted:
        """Give room back: until ``to`` bytes are used, what was unused for ``older_than``
        seconds, what is in ``space``. Without any of them nothing goes.

        With ``to`` alone things go as they do when the budget asks for it; with the others the
        least recently used leaves. What is pinned stays, unless ``pinned`` says otherwise.
        """
        self._core.check_writable()
        if to is None and older_than is None and space is None:
            return Evicted()
        self.flush()
        space_id = space.id if isinstance(space, Space) else bytes.fromhex(space) if space else None
        before = time.time_ns() - int(older_than * 1e9) if older_than is not None else None
        target = (parse_size(to) if to not in (0, "0") else 0) if to is not None else None
        with self.env.begin(write=True) as txn:
            ledger = Ledger(txn)
            room = Room(ledger, self.max_bytes)
            room.ask(target, before, space_id, pinned=pinned)
            room.report()
            ledger.settle()
        return room.gone.total

    def pins(self) -> list[Pin]:
        """Every pin that holds."""
        with self.env.begin() as txn:
            return list(all_pins(txn))

    def pin(self, conversation: str, seconds: float | None = None) -> Pin:
        """Pin a stored conversation by its id: see ``Space.pin``."""
        tokens = self.conversation_tokens(conversation)
        with self.env.begin() as txn:
            mark = mark_of(txn, int(conversation, 16)) if tokens else None
        if mark is None:
            raise NothingToPin(f"No conversation has the id {conversation}")
        return self._core.pin(mark.key[:16], as_tokens(tokens), seconds)

    def unpin(self, pin: str) -> bool:
        """Take a pin out by its id; whether there was one."""
        self._core.check_writable()
        with self.env.begin(write=True) as txn:
            return remove_pin(txn, int(pin, 16))

    @property
    def durability(self) -> str:
        """``safe`` or ``process``: what holds for this store now; see ``kvkeep.open``."""
        return DURABILITIES[0] if self.env.durable else DURABILITIES[1]

    @property
    def eviction(self) -> str:
        """The name of the eviction policy in force."""
        with self.env.begin() as txn:
            return policy_name(txn)

    def purge(
        self,
        *,
        space: Space | str | None = None,
        salt: str | None = None,
        conversation: str | None = None,
    ) -> Purged:
        """Remove a space, all spaces of a ``salt``, or a ``conversation`` by its id, so that
        nothing in the folder tells of it: rows, states, tokens, events and totals go, and
        their bytes in the data file are overwritten with zeros.

        Of a conversation only what no other one shares goes. ``space`` may be a hexadecimal id;
        an empty ``salt`` means the spaces without one. Name exactly one of the three.

        File systems that copy on write, flash memory, backups and swap may keep older bytes;
        and a page that a reader of another process still holds is left to the next purge.
        """
        self._core.check_writable()
        if [space, salt, conversation].count(None) != 2:
            raise KvkeepError("Name exactly one of space, salt and conversation to purge")
        self.flush()
        if conversation is not None:
            gone = purge_conversation(self.env, int(conversation, 16))
        elif space is not None:
            wanted = space.id if isinstance(space, Space) else bytes.fromhex(space)
            gone = purge_spaces(self.env, [wanted])
        else:
            digest = identity.salt_digest(salt or "")
            with self.env.begin() as txn:
                found = [key for key, known in known_spaces(txn).items() if known.salt == digest]
            gone = purge_tenant(self.env, digest, found)
        return replace(gone, wiped=wipe(self.env))

    @property
    def used_bytes(self) -> int:
        """Bytes that stored records take."""
        with self.env.begin() as txn:
            return counter(txn, "used")

    @property
    def waiting(self) -> tuple[int, int]:
        """Snapshots that wait to be written, and the bytes that they hold in memory."""
        return self._core.writer.waiting

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything accepted so far is durable, or refused with a reason.

        Answers whether it is, after ``timeout`` seconds at the latest.
        """
        return self._core.flush(timeout)

    def close(self) -> None:
        """Flush and let go of the folder. Closing twice is fine."""
        self._closer()


_explicit = identity.explicit
_of_model = identity.of_model
