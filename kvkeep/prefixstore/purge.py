"""Removing what was stored of a space or a conversation, with everything that tells of it.

``evict`` gives room back and leaves the rest as it is; this is for what must no longer be
there: rows, states, tokens, events, totals, and the record of the space. LMDB marks deleted
pages as free and leaves their bytes; ``Environment.wipe`` overwrites those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.environment import Environment, Transaction
from kvkeep.persistence.frame import Frame
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.bookkeeping import rebuild
from kvkeep.prefixstore.event import Event
from kvkeep.prefixstore.events import ASKED, RATE, TOTALS
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.records import Node, detach, unpack
from kvkeep.prefixstore.recount import bytes_in_use, owned_by_nodes
from kvkeep.prefixstore.shelf import mark_of
from kvkeep.prefixstore.trie import has_children

BATCH = 512
"""Nodes that go in one transaction; deepest first, so that each leaves a whole trie."""


@dataclass(frozen=True)
class Purged:
    """What was removed, and the bytes of the file that were overwritten."""

    spaces: int = 0
    nodes: int = 0
    tokens: int = 0
    bytes: int = 0
    events: int = 0
    wiped: int = 0


def purge_spaces(env: Environment, spaces: Iterable[bytes]) -> Purged:
    """Remove everything of the spaces with these ids. Raises ``StoreUnusable``."""
    gone = Purged()
    for space in spaces:
        with env.begin() as txn:
            found = [(node.start, node.key) for node in _readable(txn, space)]
        gone = _drop(env, found, gone, whole=True)
        with env.begin() as txn:
            strays = _strays(txn, space)
        with env.begin(write=True) as txn:
            for chunk in strays:
                Ledger(txn).drop_chunk(chunk)
            _drop_unreadable(txn, space)
            known = txn.delete("spaces", space)
            for name in (TOTALS, RATE, ASKED):
                known |= txn.delete("meta", name + space)
            txn.delete("ttls", space)
            _forget_evicted(txn)
            events = _drop_events(txn, space)
        gone = replace(gone, spaces=gone.spaces + known, events=gone.events + events)
    return gone


def purge_tenant(env: Environment, salt: str, spaces: Iterable[bytes]) -> Purged:
    """Remove the spaces of a tenant, by the digest of its salt, and its quota."""
    gone = purge_spaces(env, spaces)
    if salt:
        with env.begin(write=True) as txn:
            txn.delete("tenants", salt.encode())
    return gone


def purge_conversation(env: Environment, leaf: int) -> Purged:
    """Remove a stored sequence, as far as no other one shares it.

    ``leaf`` is the id of its last node. Removes nothing where that leads further.
    """
    with env.begin() as txn:
        own = _own_path(txn, leaf)
    if not own:
        return Purged()
    gone = _drop(env, [(node.start, node.key) for node in own], Purged(), whole=False)
    with env.begin(write=True) as txn:
        _forget_evicted(txn)
        events = _drop_events(txn, own[0].space, {node.id for node in own})
    return replace(gone, events=events)


def wipe(env: Environment) -> int:
    """Overwrite what was deleted; bytes written."""
    for _ in range(2):  # LMDB can go back one commit: what that one needs must be clean as well
        with env.begin(write=True) as txn:
            Ledger(txn).settle()
    return env.wipe()


def _own_path(txn: Transaction, leaf: int) -> list[Node]:
    """The leaf and the nodes above it that lead to nothing else, deepest first."""
    mark = mark_of(txn, leaf)
    if mark is None:
        return []
    space = mark.key[:16]
    by_id = {node.id: node for node in _readable(txn, space)}
    own: list[Node] = []
    at = leaf
    while at in by_id:
        below = list(txn.keys("nodes", prefix=layout.children_prefix(space, at)))
        if below != [node.key for node in own[-1:]]:
            break
        own.append(by_id[at])
        at = layout.from_u64(by_id[at].key[16:24])
    return own


def _drop(env: Environment, found: list[tuple[int, bytes]], gone: Purged, *, whole: bool) -> Purged:
    """Delete nodes by start and key, deepest first, with all that they own.

    Unless the ``whole`` space goes, a node stays that something was hung below meanwhile.
    """
    keys = [key for _, key in sorted(found, reverse=True)]
    for first in range(0, len(keys), BATCH):
        with env.begin(write=True) as txn:
            ledger = Ledger(txn)
            for key in keys[first : first + BATCH]:
                node = _node(key, txn.get("nodes", key))
                if node is None or (not whole and has_children(txn, node.space, node.id)):
                    continue
                gone = replace(
                    gone,
                    nodes=gone.nodes + 1,
                    tokens=gone.tokens + len(node.tokens),
                    bytes=gone.bytes + ledger.drop_node(node),
                )
            ledger.settle()
    return gone


def _node(key: bytes, data: memoryview | None) -> Node | None:
    try:
        return detach(unpack(key, data)) if data is not None else None
    except (CorruptFrame, NewerFormat):
        return None


def _readable(txn: Transaction, space: bytes = b"") -> Iterator[Node]:
    for key, data in txn.items("nodes", prefix=space):
        node = _node(key, data)
        if node is not None:
            yield node


def _strays(txn: Transaction, space: bytes) -> list[int]:
    """Frames of the space that no node leads to, and damaged ones that say nothing of it."""
    owned = {chunk for node in _readable(txn) for chunk in node.chunk_ids()}
    strays = []
    for key in txn.keys("chunks"):
        chunk = layout.from_u64(key)
        data = txn.get("chunks", key) if chunk not in owned else None
        if data is None:
            continue
        try:
            mine = Frame.open(data).extra.get("space") == space
        except NewerFormat:
            mine = False
        except CorruptFrame:
            mine = txn.get("quarantine", key) is not None
        if mine:
            strays.append(chunk)
    return strays


def _drop_unreadable(txn: Transaction, space: bytes) -> None:
    """What is left of the space's nodes: damaged records, or of a newer format."""
    left = list(txn.keys("nodes", prefix=space))
    for key in left:
        txn.delete("nodes", key)
    if left:
        ledger = Ledger(txn)
        rebuild(ledger, used=bytes_in_use(txn, owned_by_nodes(txn), whole=False))
        ledger.settle()


def _forget_evicted(txn: Transaction) -> None:
    """Digests of evicted prompts do not say whose they are: all go."""
    for key in list(txn.keys("gone")):
        txn.delete("gone", key)


def _drop_events(txn: Transaction, space: bytes, nodes: Collection[int] = ()) -> int:
    """Delete events of the space: all, or those of these nodes and those that keep tokens."""
    gone = []
    for key, value in txn.items("events"):
        event = Event.unpack(value)
        if event is None or (
            event.space == space and (not nodes or event.node in nodes or event.asked)
        ):
            gone.append(key)
    for key in gone:
        txn.delete("events", key)
    return len(gone)
