"""The upper tier: live caches in memory, under a cap of bytes and of sequences.

A lookup asks every entry of its space how far it can really be resumed, so that a long entry
that cannot be cut never hides a shorter one. What is taken out is the caller's own:

* an entry that the store below keeps too, and of which at least half is reused, is handed
  over: it leaves the tier, and no byte is held twice;
* of any other entry the caller gets copies of the rows that it reuses, or, where all of it is
  reused, a second set of caches on the same buffers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvkeep.hooks.live_caches import candidate, clone, cut, nbytes
from kvkeep.prefixstore.policy import Candidate, Point, decide
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.recipe import Live, assemble
from kvkeep.prefixstore.tokens import Tokens, common_prefix, insides

TYPES = ("assistant", "user", "system")
"""What mlx-lm calls its entries; others are accepted."""


@dataclass(eq=False)
class Entry:
    """Caches that cover ``tokens``, and a draft model's beside them where there is one.

    ``target`` is ``None`` for caches of a class that no codec knows: they are resumed where
    they stand and nowhere else. ``receipt`` is the store's, where one was asked.
    """

    home: Hashable
    tokens: Tokens
    caches: list[Any]
    target: Live | None
    cache_type: str = "assistant"
    draft: Live | None = None
    receipt: Receipt | None = None
    used: int = 0
    nbytes: int = field(init=False)
    reach: Candidate = field(init=False)

    def __post_init__(self) -> None:
        drafted = [cache for _, cache, _ in self.draft.leaves] if self.draft is not None else []
        self.nbytes = nbytes([*self.caches, *drafted])
        unknown = Candidate((), (), (Point(len(self.tokens)),))
        self.reach = candidate(self.target) if self.target is not None else unknown

    @property
    def backed(self) -> bool:
        """Whether the store below has it too, or is about to."""
        return self.receipt is not None and (not self.receipt.wait(0) or self.receipt.stored)

    def offset(self, tokens: Tokens) -> int:
        """The largest offset below the end of ``tokens`` at which this can be resumed."""
        matched = common_prefix(self.tokens, tokens)
        if self.target is None:
            return matched if matched == len(self.tokens) < len(tokens) else 0
        return decide(len(tokens), matched, [self.reach], 1, 1, insides(tokens)).decision.offset


@dataclass(frozen=True)
class Taken:
    """Caches at ``offset``, and the draft's at theirs; the caller's own."""

    offset: int
    caches: list[Any]
    draft: list[Any] | None = None
    draft_offset: int = 0


class MemoryTier:
    """Entries by use. Belongs to the thread that runs the model; only counts are read elsewhere."""

    def __init__(self, max_size: int, max_bytes: int) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes
        self._entries: list[Entry] = []
        self._clock = count(1)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(entry.nbytes for entry in tuple(self._entries))

    def best(self, home: Hashable, tokens: Tokens) -> tuple[int, Entry | None]:
        """The furthest offset that an entry of ``home`` reaches, and which; 0 and ``None``."""
        found: tuple[int, Entry | None] = (0, None)
        for entry in self._of(home):
            offset = entry.offset(tokens)
            if offset > found[0] or (offset == found[0] > 0 and len(entry.tokens) == offset):
                found = (offset, entry)
        return found

    def take(self, entry: Entry, offset: int) -> Taken:
        """The caches of ``entry`` at ``offset``, which ``best`` answered."""
        entry.used = next(self._clock)
        hand_over = entry.backed and 2 * offset >= len(entry.tokens)
        if hand_over:
            self._entries.remove(entry)
        if entry.target is None or entry.target.offset == offset:
            caches = entry.caches if hand_over else clone(entry.caches)
        else:
            caches = cut(entry.target, offset, consume=hand_over)
        if entry.draft is None:
            return Taken(offset, caches)
        drafted, reached = _drafted(entry.draft, entry.tokens[: offset + 1], hand_over)
        return Taken(offset, caches, drafted, reached)

    def insert(self, entry: Entry) -> bool:
        """Keep ``entry``; whether it is kept. What it covers goes, then the least recent."""
        mine = [e for e in self._of(entry.home) if e is not entry]
        entry.used = next(self._clock)
        if entry.nbytes > self.max_bytes or self.max_size < 1 or not _useful(entry):
            return False
        for other in mine:
            if len(other.tokens) > len(entry.tokens) and _covers(other, entry):
                other.used = entry.used
                return True
        covered = [other for other in mine if _covers(entry, other)]
        self._entries = [e for e in self._entries if e not in covered]
        self._entries.append(entry)
        self.trim_to(self.max_size, self.max_bytes)
        return True

    def trim_to(self, n_sequences: int, n_bytes: int) -> None:
        """Drop the least recently used until both caps hold; negative ones count as 0."""
        self._entries.sort(key=lambda entry: entry.used)
        held, n_sequences, n_bytes = self.nbytes, max(n_sequences, 0), max(n_bytes, 0)
        while self._entries and (len(self._entries) > n_sequences or held > n_bytes):
            held -= self._entries.pop(0).nbytes

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Sequences and bytes by what the entries end with."""
        out = {kind: {"n_sequences": 0, "n_bytes": 0} for kind in TYPES}
        for entry in tuple(self._entries):
            mine = out.setdefault(entry.cache_type, {"n_sequences": 0, "n_bytes": 0})
            mine["n_sequences"] += 1
            mine["n_bytes"] += entry.nbytes
        return out

    def clear(self) -> None:
        """Let go of everything."""
        self._entries.clear()

    def _of(self, home: Hashable) -> Iterator[Entry]:
        return (entry for entry in self._entries if entry.home == home)


def _useful(entry: Entry) -> bool:
    """Whether it can be resumed where its tokens end: it may stand beyond them."""
    end = len(entry.tokens)
    return entry.target is None or decide(end + 1, end, [entry.reach]).decision.offset == end


def _covers(longer: Entry, shorter: Entry) -> bool:
    """Whether ``longer`` can be resumed at the end of ``shorter``, in the same precision."""
    end = len(shorter.tokens)
    if common_prefix(longer.tokens, shorter.tokens) < end:
        return False
    if len(longer.tokens) == end:
        return True
    if longer.target is None or shorter.target is None:
        return False
    if longer.target.recipe.id != shorter.target.recipe.id:
        return False
    return decide(end + 1, end, [longer.reach]).decision.offset == end


def _drafted(draft: Live, tokens: Tokens, consume: bool) -> tuple[list[Any] | None, int]:
    """The draft's caches as far as ``tokens`` allow; none where they cannot be cut so far."""
    matched = min(draft.offset, len(tokens) - 1)
    offset = decide(len(tokens), matched, [candidate(draft)]).decision.offset
    if offset == 0:
        return None, 0
    if offset == draft.offset:
        whole = assemble(draft.recipe, [cache for _, cache, _ in draft.leaves])
        return (whole if consume else clone(whole)), offset
    return cut(draft, offset, consume=consume), offset
