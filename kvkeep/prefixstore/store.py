"""The store: one folder, one LMDB environment, one writer thread, any number of spaces."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from kvkeep.errors import KvkeepError, NotAStore, StoreReadOnly, StoreTooNew
from kvkeep.persistence.environment import Environment
from kvkeep.prefixstore import browse, identity, layout, recount
from kvkeep.prefixstore.events import EventLog, read_events
from kvkeep.prefixstore.evict import Evicted, evict
from kvkeep.prefixstore.ledger import Ledger, counter
from kvkeep.prefixstore.quarantine import Quarantine
from kvkeep.prefixstore.recipe import kind_tree
from kvkeep.prefixstore.report import Report, count
from kvkeep.prefixstore.sizes import parse_size
from kvkeep.prefixstore.space import Space
from kvkeep.prefixstore.tokens import as_tokens
from kvkeep.prefixstore.trie import walk
from kvkeep.prefixstore.writer import Limits, Writer, free_orphans

MARKER = "store.json"
DEFAULT_BUDGET = 64 << 30
MAP_HEADROOM = 4
MAP_MINIMUM = 64 << 30


def open_store(
    path: str | os.PathLike[str],
    max_bytes: int | str | None = None,
    *,
    disk_reserve: int | str = "1GiB",
    read_only: bool = False,
) -> Store:
    """Open the store in folder ``path``, or make one there.

    ``max_bytes`` is the byte budget, a number or a size such as ``"50GB"``. Without it an
    existing store keeps its own, and a new one takes 64 GiB or half of what is free on the
    disk, whichever is less. ``disk_reserve`` bytes of the disk stay free.

    Raises ``StoreUnusable`` (``NotAStore``, ``StoreTooNew``, ``StoreReadOnly`` …).
    """
    folder = Path(path).expanduser()
    budget = parse_size(max_bytes) if max_bytes is not None else None
    marker = _marker(folder, budget, read_only)
    env = Environment(
        folder, map_size=marker["map_bytes"], databases=layout.DATABASES, read_only=read_only
    )
    try:
        return Store(folder, env, budget, marker, parse_size(disk_reserve), read_only)
    except BaseException:
        env.close()
        raise


class Store:
    """An open store. Safe to use from several threads and processes; a context manager.

    After a fork the child must open the store again. ``close`` flushes.
    """

    def __init__(
        self,
        path: Path,
        env: Environment,
        budget: int | None,
        marker: Mapping[str, Any],
        disk_reserve: int,
        read_only: bool,
    ) -> None:
        self.path = path
        self.env = env
        self.read_only = read_only
        self.quarantine = Quarantine(env)
        self._known: set[bytes] = set()
        self.max_bytes = self._settle_budget(budget, marker)
        self.writer = Writer(env, Limits(self.max_bytes, disk_reserve), self.quarantine)
        self.events = EventLog(env, (lambda _: None) if read_only else self.writer.call)
        if not read_only:
            free_orphans(env)
            self._shrink()
        self._closer = weakref.finalize(self, _finish, self.events, self.writer, env, read_only)

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
    ) -> Space:
        """The space of a model: nothing stored elsewhere is ever served here.

        With an mlx-lm ``model``, give the ``model_path`` that it was loaded from (a folder or
        a hub id in the local cache); weights, config, tokenizer, adapter and draft model are
        identified by content. ``kv_scheme`` names how keys and values are quantized, such as
        ``"affine:4:64@5000"``. ``salt`` keeps tenants apart.

        Without an mlx-lm model, ``identity`` names what must be equal, in any JSON form, and
        ``layout`` is a cache list, empty or not, of the kinds that will be stored.

        ``draft_layout`` is the draft model's cache list, empty or not: with it the draft's
        caches are stored and resumed beside the target's (see ``Hit``).

        ``exact=True`` is chunk-aligned mode: a resumed run answers what a cold one answers,
        bit for bit. It stores only whole chunks of ``prefill_step`` tokens and resumes only
        between them, so the model must then be run in such chunks.

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
                remember=self._remember,
            )
        draft = None
        if draft_layout is not None:
            drafted = kind_tree(draft_layout)
            draft = Space(self, found.part("draft", drafted), drafted, step)
        return Space(self, found, kinds, step, draft)

    def report(self, since: float = 0.0) -> Report:
        """Totals of the lookups and snapshots from ``since`` (seconds since the epoch) on."""
        self.flush()
        with self.env.begin() as txn:
            total, by_space = count(read_events(txn, since))
            labels = {info.id: info.label for info in browse.spaces(txn)}
            used = counter(txn, "used")
            aside = txn.count("quarantine")
        return Report(since, total, by_space, labels, used, self.max_bytes, aside)

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
        self._writable()
        self.flush()
        audit = recount.repair(self.env)
        self.quarantine.clear()
        return audit

    def evict(
        self,
        *,
        to: int | str | None = None,
        older_than: float | None = None,
        space: Space | str | None = None,
    ) -> Evicted:
        """Drop leaves, least recently used first: down to ``to`` bytes, those unused for
        ``older_than`` seconds, those of ``space``. Without any of them nothing goes.
        """
        self._writable()
        if to is None and older_than is None and space is None:
            return Evicted()
        self.flush()
        space_id = space.id if isinstance(space, Space) else bytes.fromhex(space) if space else None
        before = time.time_ns() - int(older_than * 1e9) if older_than is not None else None
        target = (parse_size(to) if to not in (0, "0") else 0) if to is not None else None
        with self.env.begin(write=True) as txn:
            ledger = Ledger(txn)
            gone = evict(ledger, to=target, before=before, space=space_id)
            ledger.settle()
        return gone

    @property
    def used_bytes(self) -> int:
        """Bytes that stored records take."""
        with self.env.begin() as txn:
            return counter(txn, "used")

    def flush(self) -> None:
        """Return once everything accepted so far is durable, or refused with a reason."""
        if not self.read_only:
            self.writer.call(self.events.write)
            self.writer.flush()

    def close(self) -> None:
        """Flush and let go of the folder. Closing twice is fine."""
        self._closer()

    def register(self, found: identity.Identity) -> None:
        """Write down a space that something is stored in."""
        self._writable()
        if found.id in self._known:
            return
        record = {"fields": found.fields, "label": found.label, "created": time.time()}
        with self.env.begin(write=True) as txn:
            if txn.get("spaces", found.id) is None:
                txn.put("spaces", found.id, msgpack.packb(record))
        self._known.add(found.id)

    def _writable(self) -> None:
        if self.read_only:
            raise StoreReadOnly("The store was opened for reading only")

    def _settle_budget(self, budget: int | None, marker: Mapping[str, Any]) -> int:
        if budget is not None and budget > marker["map_bytes"] // 2:
            raise KvkeepError(
                f"This store was laid out for at most {marker['map_bytes'] // 2:,} bytes",
                remedy="Name a smaller max_bytes, or make a new store with the larger one.",
            )
        with self.env.begin() as txn:
            recorded = counter(txn, "budget") or marker["budget"]
        if budget is None or budget == recorded or self.read_only:
            return int(recorded)
        with self.env.begin(write=True) as txn:
            txn.put("meta", b"budget", layout.u64(budget))
        return budget

    def _shrink(self) -> None:
        """Bring an over-full store down to its budget before anything is served."""
        if self.used_bytes > self.max_bytes:
            self.evict(to=self.max_bytes)

    def _remember(self, file: Path, compute: Callable[[], str]) -> str:
        """A file's fingerprint, kept by its path, size and time of change."""
        stat = file.stat()
        mark = [str(file), stat.st_size, stat.st_mtime_ns]
        key = msgpack.packb(mark)[-500:]
        with self.env.begin() as txn:
            data = txn.get("prints", key)
            if data is not None:
                kept, digest = msgpack.unpackb(data)
                if kept == mark:
                    return str(digest)
        digest = compute()
        if not self.read_only:
            with self.env.begin(write=True) as txn:
                txn.put("prints", key, msgpack.packb([mark, digest]))
        return digest


_explicit = identity.explicit
_of_model = identity.of_model


def _finish(events: EventLog, writer: Writer, env: Environment, read_only: bool) -> None:
    try:
        if not read_only and env.usable:
            writer.call(events.write)
            writer.flush()
    finally:
        if env.usable:
            writer.close()
        env.close()


def _marker(folder: Path, budget: int | None, read_only: bool) -> dict[str, Any]:
    """The contents of ``store.json``, which is made where the folder is new or empty."""
    file = folder / MARKER
    try:
        if file.exists():
            marker = json.loads(file.read_text())
            if not isinstance(marker, dict) or marker.get("kvkeep") is None:
                raise NotAStore(f"{file} does not describe a kvkeep store")
            if int(marker["kvkeep"]) > layout.FORMAT:
                raise StoreTooNew(
                    f"{folder} has store format {marker['kvkeep']}; this kvkeep reads "
                    f"{layout.FORMAT}"
                )
            return {"map_bytes": int(marker["map_bytes"]), "budget": int(marker["budget"])}
        if folder.exists() and not folder.is_dir():
            raise NotAStore(f"{folder} is a file")
        if folder.exists() and any(folder.iterdir()):
            raise NotAStore(f"{folder} holds other files and no {MARKER}")
        if read_only:
            raise NotAStore(f"{folder} holds no store")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _make_marker(file, budget)
    except PermissionError as error:
        raise StoreReadOnly(f"{error.filename} cannot be used: {error.strerror}") from error
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise NotAStore(f"{file} cannot be read: {error}") from error


def _make_marker(file: Path, budget: int | None) -> dict[str, Any]:
    if budget is None:
        disk = os.statvfs(file.parent)
        budget = min(DEFAULT_BUDGET, disk.f_bavail * disk.f_frsize // 2)
    marker = {"map_bytes": max(MAP_MINIMUM, MAP_HEADROOM * budget), "budget": budget}
    made = file.with_suffix(f".{os.getpid()}")
    made.write_text(json.dumps({"kvkeep": layout.FORMAT, **marker}, indent=1) + "\n")
    made.chmod(0o600)
    try:
        os.link(made, file)
    except FileExistsError:
        return _marker(file.parent, budget, read_only=False)
    finally:
        made.unlink()
    return marker
