"""Evicted prefixes in the table ``gone``; see ``eviction.gone`` for what is remembered."""

from __future__ import annotations

import struct
import time

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.eviction.gone import digest_of, slot_of
from kvkeep.prefixstore.records import Node, unpack
from kvkeep.prefixstore.shelf import mark_of
from kvkeep.prefixstore.tokens import Tokens

TELLING = 4
"""Tokens behind a parting that are part of the digest, or fewer at the end of what went."""

EVICTED, EXPIRED = 0, 1

_RECORD = struct.Struct(">16sBQ")


def remember(txn: Transaction, node: Node, cut: int, *, expired: bool = False) -> None:
    """Note that what ``node`` holds from offset ``cut`` on goes."""
    runs = [node.tokens[: cut - node.start + TELLING]]
    at = layout.from_u64(node.key[16:24])
    while at != layout.ROOT:
        mark = mark_of(txn, at)
        data = txn.get("nodes", mark.key) if mark is not None else None
        if mark is None or data is None:
            return
        try:
            above = unpack(mark.key, data)
        except (CorruptFrame, NewerFormat):
            return
        runs.append(above.tokens.copy())
        at = layout.from_u64(above.key[16:24])
    digest = digest_of(node.space, reversed(runs))
    record = _RECORD.pack(digest, EXPIRED if expired else EVICTED, time.time_ns())
    txn.put("gone", layout.u64(slot_of(digest)), record)


def what_became(txn: Transaction, space: bytes, tokens: Tokens, matched: int) -> int | None:
    """How what came after ``matched`` tokens of this prompt went; ``None`` where nobody knows."""
    if matched >= len(tokens) or not txn.count("gone"):
        return None
    digest = digest_of(space, [tokens[: matched + TELLING]])
    data = txn.get("gone", layout.u64(slot_of(digest)))
    if data is None or len(data) != _RECORD.size:
        return None
    found, how, _ = _RECORD.unpack(data)
    return int(how) if found == digest else None
