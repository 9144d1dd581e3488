"""Pins: stored beginnings of prompts that eviction leaves alone.

A pin sits on a node that ends where the pinned tokens end, and holds every node from there to
the root. A *soft* pin has a deadline, and gives way before a snapshot is refused for want of
room. A *hard* pin has none, and stays until it is taken out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgpack

from kvkeep.errors import CorruptFrame, KvkeepError, NewerFormat
from kvkeep.persistence.environment import Transaction
from kvkeep.persistence.packing import unpack_plain
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.publish import split
from kvkeep.prefixstore.records import detach, unpack
from kvkeep.prefixstore.shelf import mark_of
from kvkeep.prefixstore.sizes import format_size
from kvkeep.prefixstore.tokens import Tokens
from kvkeep.prefixstore.trie import walk

MOST_HARD = 3 / 4
"""The part of the budget that hard pins may hold: a store that is all pins can take nothing."""


class NothingToPin(KvkeepError):
    """Nothing of these tokens is stored."""

    exit_code = 3
    remedy = "Store them first, and flush; then pin them."


class TooMuchPinned(KvkeepError):
    """Hard pins would hold more of the budget than they may."""

    exit_code = 6
    remedy = "Pin it for a time instead, unpin something else, or raise max_bytes."


@dataclass(frozen=True)
class Pin:
    """A pin: its id, its space, the tokens that it holds, and the bytes of these.

    ``until`` is its deadline in seconds since the epoch; ``None`` for a hard pin.
    """

    id: str
    space: str
    tokens: int
    bytes: int
    created: float
    until: float | None


def add_pin(
    ledger: Ledger, space: bytes, tokens: Tokens, seconds: float | None, budget: int
) -> Pin:
    """Pin what is stored of ``tokens``, for ``seconds`` or for good.

    Raises ``NothingToPin`` or ``TooMuchPinned``; the caller then aborts the transaction.
    """
    txn = ledger.txn
    ledger.space = space
    path = walk(txn, space, tokens)
    if not path.nodes:
        raise NothingToPin("Nothing that begins like these tokens is stored")
    node = path.nodes[-1]
    if path.matched < node.stop:
        node = split(ledger, detach(node), path.matched)
    now = time.time_ns()
    until = now + int(seconds * 1e9) if seconds is not None else 0
    txn.put("pins", layout.u64(node.id), msgpack.packb([until, now]))
    if seconds is None:
        held = bytes_of(txn, protected(txn)[0])
        if held > budget * MOST_HARD:
            raise TooMuchPinned(
                f"Pins without a deadline would hold {format_size(held)} of {format_size(budget)}"
            )
    return _described(txn, node.id, until, now)


def remove_pin(txn: Transaction, node: int) -> bool:
    """Take a pin out, by the id of its node; whether there was one."""
    return txn.delete("pins", layout.u64(node))


def pinned_on(txn: Transaction, space: bytes, tokens: Tokens) -> int | None:
    """The node of the deepest pin within ``tokens``."""
    path = walk(txn, space, tokens)
    ends = [node.id for node in path.nodes if node.stop <= path.matched]
    return next((n for n in reversed(ends) if txn.get("pins", layout.u64(n)) is not None), None)


def all_pins(txn: Transaction) -> Iterator[Pin]:
    """Every pin whose deadline has not passed."""
    for node, until, created in list(_records(txn)):
        if mark_of(txn, node) is not None:
            yield _described(txn, node, until, created)


def protected(txn: Transaction) -> tuple[set[int], set[int]]:
    """The nodes that hard pins hold, and those that only soft ones do."""
    hard: set[int] = set()
    soft: set[int] = set()
    for node, until, _ in list(_records(txn)):
        (soft if until else hard).update(_upward(txn, node))
    return hard, soft - hard


def drop_lapsed(txn: Transaction) -> None:
    """Take out pins whose deadline has passed."""
    pinning = {layout.u64(node) for node, _, _ in list(_records(txn))}
    for key in list(txn.keys("pins")):
        if key not in pinning:
            txn.delete("pins", key)


def bytes_of(txn: Transaction, nodes: set[int]) -> int:
    """Bytes that nodes and what they own take."""
    total = 0
    for node in nodes:
        mark = mark_of(txn, node)
        data = txn.get("nodes", mark.key) if mark is not None else None
        if mark is None or data is None:
            continue
        total += layout.footprint(len(data))
        with suppress(CorruptFrame, NewerFormat):
            found = unpack(mark.key, data)
            total += sum(map(layout.footprint, found.refs["size"].tolist()))
            total += sum(layout.footprint(p.size) for p in found.points if p.state)
    return total


def _records(txn: Transaction) -> Iterator[tuple[int, int, int]]:
    """Node, deadline (0 for none) and time of each pin in force. A damaged one pins nothing."""
    now = time.time_ns()
    for key, value in txn.items("pins"):
        with suppress(CorruptFrame):
            match unpack_plain(value):
                case (int(until), int(created)) if until == 0 or until > now:
                    yield layout.from_u64(key), until, created


def _described(txn: Transaction, node: int, until: int, created: int) -> Pin:
    mark = mark_of(txn, node)
    data = txn.get("nodes", mark.key) if mark is not None else None
    stop = mark.start if mark is not None else 0
    if mark is not None and data is not None:
        with suppress(CorruptFrame, NewerFormat):
            stop = unpack(mark.key, data).stop
    return Pin(
        id=f"{node:x}",
        space=mark.key[:16].hex() if mark is not None else "",
        tokens=stop,
        bytes=bytes_of(txn, set(_upward(txn, node))),
        created=created / 1e9,
        until=until / 1e9 if until else None,
    )


def _upward(txn: Transaction, node: int) -> Iterator[int]:
    """A node and all above it, by id."""
    while node != layout.ROOT:
        mark = mark_of(txn, node)
        if mark is None:
            return
        yield node
        node = layout.from_u64(mark.key[16:24])
