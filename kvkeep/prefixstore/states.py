"""States are thinned apart from rows, in an order of their own.

A state sums up a whole prefix and serves one offset only, so most of those inside a
conversation are never read again; and one may be as large as the rows of thousands of tokens.
Each has a *score*, and the lowest goes first. The score of a state that was used at ``when`` is

    floor + (when - floor) / 2 ** halvings

where ``floor`` is the score of the state that went last. So a state with one halving lives half
as long in a full store as one with none, which lives as long as least recently used allows:

========= =============================================================================
halvings  resume point
========= =============================================================================
0         the last three of a path: mostly the end of an answer, the end of its prompt,
          and one strictly below that, which an exact replay of the prompt needs
1         earlier ends, boundaries and junctions; an interval that was resumed at
2, 3, 4   intervals: every fourth, every other second, and the rest
========= =============================================================================

Intervals so lose every second first, then every second of what is left, as they age.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvkeep.errors import CorruptFrame
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.shelf import batched_keys

LAST = 3
INTERVAL = "interval"

_RECORD = struct.Struct(">QQQQQB?")


class StateMark(NamedTuple):
    """What is kept of a state: its score, last use, offset, node, bytes, halvings.

    ``proven`` once a lookup resumed there.
    """

    score: int
    when: int
    offset: int
    node: int
    size: int
    halvings: int
    proven: bool


class States:
    """The states of a store in one transaction. ``floor`` is for its owner to write down."""

    def __init__(self, txn: Transaction, floor: int) -> None:
        self.floor = floor
        self._txn = txn

    def get(self, chunk: int) -> StateMark | None:
        """The mark of a state, by the id of its chunk."""
        return state_of(self._txn, chunk)

    def put(self, chunk: int, mark: StateMark) -> None:
        """Keep a state's mark, scored anew."""
        self.floor = self.floor or mark.when
        old = self.get(chunk)
        life = max(0, mark.when - self.floor) >> mark.halvings
        mark = mark._replace(score=min(self.floor, mark.when) + life)
        if mark == old:
            return
        self._take_out(chunk, old)
        self._txn.put("states", layout.u64(chunk), _RECORD.pack(*mark))
        self._txn.put("fading", layout.rank_key(mark.score, mark.offset, chunk), b"\0")

    def drop(self, chunk: int) -> None:
        """Forget a state."""
        self._take_out(chunk, self.get(chunk))
        self._txn.delete("states", layout.u64(chunk))

    def ascending(self) -> Iterator[tuple[int, StateMark]]:
        """All states, lowest score first. They may be dropped meanwhile."""
        for key in batched_keys(self._txn, "fading"):
            score, _, chunk = layout.from_rank_key(key)
            mark = self.get(chunk)
            if mark is not None and mark.score == score:
                yield chunk, mark

    def use(self, chunk: int, when: int) -> None:
        """A lookup resumed at a state."""
        mark = self.get(chunk)
        if mark is not None:
            halvings = min(mark.halvings, 1)
            when = max(when, mark.when)
            self.put(chunk, mark._replace(when=when, halvings=halvings, proven=True))

    def rank(self, points: Sequence[tuple[int, str]]) -> None:
        """Give the states of a path, as chunk and origin in order of offset, their halvings."""
        intervals = 0
        for place, (chunk, origin) in enumerate(points):
            intervals += origin == INTERVAL
            mark = self.get(chunk)
            if mark is None:
                continue
            if place >= len(points) - LAST:
                halvings = 0
            elif origin != INTERVAL or mark.proven:
                halvings = 1
            else:
                halvings = 4 - min(2, _twos(intervals))
            if halvings != mark.halvings:
                self.put(chunk, mark._replace(halvings=halvings))

    def _take_out(self, chunk: int, mark: StateMark | None) -> None:
        if mark is not None:
            self._txn.delete("fading", layout.rank_key(mark.score, mark.offset, chunk))


def state_of(txn: Transaction, chunk: int) -> StateMark | None:
    """The mark of a state; ``None`` where it has none."""
    data = txn.get("states", layout.u64(chunk))
    if data is None:
        return None
    if len(data) != _RECORD.size:
        raise CorruptFrame(f"A state's record of {len(data)} bytes where {_RECORD.size} are due")
    return StateMark(*_RECORD.unpack(data))


def _twos(number: int) -> int:
    """How often ``number`` can be halved."""
    return (number & -number).bit_length() - 1
