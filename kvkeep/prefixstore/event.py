"""One record of what a store did: a lookup, a snapshot, a restore or an eviction.

A record holds numerator and denominator together, so that every total is a sum over the same
records. It holds no prompt text, and no token ids unless the store was opened to keep them.

The packed form is a list of the fields in order. Fields are only ever appended: an older
record lacks the last ones, a newer one has more, and both are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import msgpack

LOOKUP, SNAPSHOT, RESTORE, EVICT = "lookup", "snapshot", "restore", "evict"
"""What a record is about. A lookup that resumed and its restore are one record; ``restore``
is one that no lookup counts, such as a draft model's."""

STORE, MEMORY = "store", "memory"
"""Tiers: rebuilt from the store's bytes, or handed over by a server that still had it."""

LONGEST = 64
"""Characters of a request id, and ids of tokens kept after a parting."""


@dataclass(frozen=True, slots=True)
class Event:
    """One record. Tokens count positions, bytes are stored bytes, times are seconds.

    ``time`` is since the epoch, ``seconds`` how long it took; of a lookup ``rebuild`` of these
    went into rebuilding. ``kinds`` limited the lookup, ``layers`` are the layers that limited
    it most (``0-2,4``): alone they could have resumed ``limit`` tokens, by ``rule``.
    ``rate`` is the measured prefill rate in tokens a second at that time; 0 where unknown.
    ``node`` is the id of the deepest node on the path. Of an eviction, ``known`` are the tokens
    and ``nodes`` the nodes that went. ``asked`` are the token ids that the
    prompt had where it parted: empty unless the store keeps them.
    """

    what: str
    time: float
    space: bytes
    reason: str
    prompt: int = 0
    matched: int = 0
    resumed: int = 0
    new: int = 0
    known: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    kinds: str = ""
    layers: str = ""
    limit: int = 0
    rule: str = ""
    origin: str = ""
    tier: str = ""
    request: str = ""
    rate: float = 0.0
    node: int = 0
    rebuild: float = 0.0
    nodes: int = 0
    asked: tuple[int, ...] = ()

    @property
    def offset(self) -> int:
        """Where a lookup resumed, or where a snapshot's resume point lies."""
        return self.new + self.known if self.what == SNAPSHOT else self.resumed

    @property
    def stem(self) -> str:
        """The reason without what completes it: ``space_changed``."""
        return self.reason.partition(":")[0]

    @property
    def lost(self) -> int:
        """Tokens of a lookup that were not resumed."""
        return self.prompt - self.resumed

    @property
    def saved(self) -> float | None:
        """Seconds that reading the resumed tokens would have taken; ``None`` where unknown."""
        return self.resumed / self.rate if self.rate else None

    def pack(self) -> bytes:
        """The record as msgpack."""
        return bytes(msgpack.packb([getattr(self, name) for name in _NAMES]))

    @staticmethod
    def unpack(data: Any) -> Event | None:
        """The event; ``None`` where the record is damaged, or its numbers cannot be."""
        try:
            values = msgpack.unpackb(data, use_list=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            return None
        if type(values) is not tuple or len(values) < _REQUIRED:
            return None
        kinds = tuple(map(type, values[: len(_TYPES)]))
        if kinds != _TYPES[: len(kinds)] and not all(map(_fits, kinds, _TYPES)):
            return None
        event = Event(*values[: len(_TYPES)])
        return event if _possible(event) else None


_NAMES = tuple(field.name for field in fields(Event))
_TYPES = tuple(
    {"str": str, "float": float, "bytes": bytes, "int": int}.get(str(field.type), tuple)
    for field in fields(Event)
)
_REQUIRED = 4


def _fits(found: type, due: type) -> bool:
    return found is due or (found is int and due is float)


def _possible(event: Event) -> bool:
    """Whether the numbers may be summed: finite, not negative, parts within their wholes."""
    times = event.time + event.seconds + event.rebuild + event.rate
    if event.what == LOOKUP and not 0 <= event.resumed <= event.matched <= event.prompt:
        return False
    counts = (event.new, event.known, event.nbytes, event.nodes, event.resumed, event.prompt)
    least = min(*counts, event.seconds, event.rebuild, event.rate, event.time)
    return math.isfinite(times) and least >= 0 and all(type(token) is int for token in event.asked)


def request_id(name: str | None) -> str:
    """A request's name as it is kept: printable, and not too long; empty without one."""
    if not name:
        return ""
    return "".join(c if c.isprintable() else "?" for c in str(name)[:LONGEST])
