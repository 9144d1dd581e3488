"""What the events of a store add up to: totals, and the same by space, model, kind and hour.

One pass over the ring fills cells, one for each space, reason and hour; everything else is a
sum over cells, so that all parts of a report agree.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count as numbers
from typing import NamedTuple, TypeVar

from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import browse, layout
from kvkeep.prefixstore.event import LOOKUP, STORE, Event
from kvkeep.prefixstore.events import Gaps, asked_spaces, rates, read_events
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.ledger import counter
from kvkeep.prefixstore.nearby import stored_spaces
from kvkeep.prefixstore.totals import Totals, sum_of

HOUR = 3600
WORST = 5
NO_NAME = "(no name)"

Key = TypeVar("Key", bound=Hashable)


class Cell(NamedTuple):
    """What the events of one total have in common. ``reason`` is empty but for lookups."""

    space: str
    reason: str
    hour: int


@dataclass(frozen=True)
class Filter:
    """Which spaces a report is about: all, those of one salt, those that are named.

    ``salt`` is the digest of a tenant's salt; empty for spaces without one, ``None`` for all.
    """

    salt: str | None = None
    space: str | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return self.salt is None and self.space is None

    def allows(self, identity: Identity | None, space: str) -> bool:
        """Whether events of ``space`` count; of one that nobody described, only without salt."""
        if self.space is not None and not space.startswith(self.space):
            return False
        return self.salt is None or (identity is not None and identity.salt == self.salt)


@dataclass(frozen=True)
class SpaceFacts:
    """A space of a report: what it is, what it keeps, how fast its model reads.

    ``kinds`` are those that are stored, or of the model's cache list where nothing is.
    ``kept_bytes`` is what is stored now, of which lookups resumed ``needed_bytes``. ``rate`` is
    in tokens a second, 0 where unknown.
    """

    id: str
    label: str
    kinds: tuple[str, ...]
    kept_bytes: int = 0
    needed_bytes: int = 0
    rate: float = 0.0


@dataclass
class Report:
    """What lookups saved and lost since a time.

    ``used_bytes`` of ``max_bytes`` are kept now; ``quarantined`` records were found damaged,
    ``None`` in a report that leaves spaces out. ``worst`` are the lookups that lost the most
    tokens. ``gaps`` says what the numbers cannot vouch for.
    """

    since: float
    until: float
    total: Totals
    by_space: dict[str, Totals]
    by_model: dict[str, Totals]
    by_kind: dict[str, Totals]
    by_reason: dict[str, Totals]
    by_hour: dict[int, Totals]
    spaces: dict[str, SpaceFacts]
    used_bytes: int
    max_bytes: int
    quarantined: int | None
    worst: list[Event] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)

    @property
    def labels(self) -> dict[str, str]:
        """The models of the spaces, as they were named."""
        return {space: facts.label for space, facts in self.spaces.items()}

    @property
    def needed_bytes(self) -> int:
        """Bytes kept now on paths that lookups of this report resumed."""
        return sum(facts.needed_bytes for facts in self.spaces.values())


def build(
    txn: Transaction,
    max_bytes: int,
    since: float = 0.0,
    only: Filter | None = None,
    each: Callable[[Event], None] | None = None,
    worst: int = WORST,
) -> Report:
    """The report of the events from ``since`` on; ``each`` sees every one that counts.

    ``worst`` is how many of the lookups that lost most are named.
    """
    only = only if only is not None else Filter()
    known = known_spaces(txn)
    gaps = Gaps()
    cells: dict[Cell, Totals] = {}
    resumed: dict[int, int] = {}
    losses: list[tuple[int, int, Event]] = []
    order = numbers()
    allowed: dict[bytes, str | None] = {}
    for _, event in read_events(txn, since, gaps):
        space = allowed.get(event.space, "")
        if space == "":
            name = event.space.hex()
            space = name if only.allows(known.get(event.space), name) else None
            allowed[event.space] = space
        if space is None:
            continue
        lookup = event.what == LOOKUP
        cell = Cell(space, event.reason if lookup else "", int(event.time // HOUR) * HOUR)
        totals = cells.get(cell)
        if totals is None:
            totals = cells[cell] = Totals()
        totals.add(event)
        if lookup:
            if event.lost and worst:
                push = heapq.heappush if len(losses) < worst else heapq.heappushpop
                push(losses, (event.lost, next(order), event))
            if event.resumed and event.tier == STORE:
                resumed[event.node] = max(resumed.get(event.node, 0), event.resumed)
        if each is not None:
            each(event)
    if not only.everything:
        gaps.trimmed = gaps.lost = 0
    facts = _facts(txn, known, only, resumed, {cell.space for cell in cells})
    used = sum(space.kept_bytes for space in facts.values())
    return Report(
        since=since,
        until=time.time(),
        total=sum_of(cells.values()),
        by_space=_pivot(cells, lambda cell: cell.space),
        by_model=_pivot(cells, lambda cell: facts[cell.space].label or NO_NAME),
        by_kind=_pivot(cells, lambda cell: ",".join(facts[cell.space].kinds)),
        by_reason=_pivot({c: t for c, t in cells.items() if c.reason}, lambda cell: cell.reason),
        by_hour=dict(sorted(_pivot(cells, lambda cell: cell.hour).items())),
        spaces=facts,
        used_bytes=counter(txn, "used") if only.everything else used,
        max_bytes=max_bytes,
        quarantined=txn.count("quarantine") if only.everything else None,
        worst=[event for _, _, event in sorted(losses, reverse=True)],
        gaps=gaps,
    )


def known_spaces(txn: Transaction) -> dict[bytes, Identity]:
    """Every space that is stored, or that events speak of."""
    return asked_spaces(txn) | {identity.id: identity for identity in stored_spaces(txn)}


def layout_kinds(identity: Identity | None) -> tuple[str, ...]:
    """The different kinds of a space's cache list, sorted."""
    kinds: set[str] = set()
    depth, word = 0, ""
    for character in dict(identity.fields).get("layout", "") if identity is not None else "":
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            kinds.add(word)
            word = ""
        else:
            word += character
    return tuple(sorted(kinds | {word} - {""})) or ("unknown",)


def _pivot(cells: Mapping[Cell, Totals], key: Callable[[Cell], Key]) -> dict[Key, Totals]:
    groups: dict[Key, list[Totals]] = {}
    for cell, totals in cells.items():
        groups.setdefault(key(cell), []).append(totals)
    return {name: sum_of(parts) for name, parts in groups.items()}


def _facts(
    txn: Transaction,
    known: Mapping[bytes, Identity],
    only: Filter,
    resumed: Mapping[int, int],
    seen: Iterable[str],
) -> dict[str, SpaceFacts]:
    """The spaces that are stored in or that events speak of, most bytes first."""
    speeds = rates(txn)
    stored = {identity.id for identity in stored_spaces(txn)}
    wanted = stored | {bytes.fromhex(space) for space in seen}
    facts = []
    for space in wanted:
        identity = known.get(space)
        if not only.allows(identity, space.hex()):
            continue
        label = identity.label if identity is not None else ""
        kinds, kept, needed = _kept(txn, space, resumed) if space in stored else ((), 0, 0)
        kinds, rate = kinds or layout_kinds(identity), speeds.get(space, 0.0)
        facts.append(SpaceFacts(space.hex(), label, kinds, kept, needed, rate))
    return {x.id: x for x in sorted(facts, key=lambda x: (-x.kept_bytes, x.id))}


def _kept(
    txn: Transaction, space: bytes, resumed: Mapping[int, int]
) -> tuple[tuple[str, ...], int, int]:
    """Kinds and bytes of a space, and of these what lies on paths that were resumed."""
    nodes = {node.id: node for node in browse.nodes(txn, space)}
    needed: set[int] = set()
    for node_id, offset in resumed.items():
        at = node_id
        while at in nodes and at not in needed:
            if nodes[at].start < offset:
                needed.add(at)
            at = layout.from_u64(nodes[at].key[16:24])
    kinds = browse.kinds_of(txn, {recipe for node in nodes.values() for recipe in node.recipes})
    total = sum(map(browse.bytes_of, nodes.values()))
    return kinds, total, sum(browse.bytes_of(nodes[at]) for at in needed)
