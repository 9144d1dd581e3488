"""A lookup that is over, by its request id: its event, and what the store can still say of it.

Events hold no tokens. The stored part of the prompt is read from the trie, as long as it is
there; what the prompt had where it parted is known if the store keeps it (``event_tokens``),
or if the request stored its prompt afterwards.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvkeep.errors import KvkeepError
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import browse, layout
from kvkeep.prefixstore.event import LOOKUP, SNAPSHOT, Event
from kvkeep.prefixstore.events import read_events
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.records import Node
from kvkeep.prefixstore.report import known_spaces
from kvkeep.prefixstore.trace import CONTINUES, Near, continuations, near_points
from kvkeep.prefixstore.trie import walk


class NoSuchRequest(KvkeepError):
    """No one lookup that is still remembered has this id."""

    exit_code = 2
    remedy = "`kvkeep report --worst 20` names lookups; the oldest are forgotten."


@dataclass(frozen=True)
class Past:
    """A past lookup.

    ``prefix`` are the tokens that matched, empty where they are no longer stored. ``asked``
    are tokens of the prompt behind them, empty where nobody knows them; ``continues`` what is
    stored there now by others. ``near`` are the resume points around the parting, now.
    """

    event: Event
    identity: Identity | None
    prefix: tuple[int, ...]
    asked: tuple[int, ...]
    continues: tuple[tuple[int, ...], ...]
    near: tuple[Near, ...]


def find(txn: Transaction, request: str, quarantined: Container[int]) -> Past:
    """The lookup whose request id is ``request``, or begins so; with ``…`` before it, ends so.

    Raises ``NoSuchRequest``.
    """
    event, snapshots = _events(txn, request)
    identity = known_spaces(txn).get(event.space)
    nodes = {node.id: node for node in browse.nodes(txn, event.space)}
    prefix = _tokens(nodes, event.node)[: event.matched]
    if len(prefix) < event.matched:
        prefix = ()
    asked = event.asked
    for node, end in snapshots:
        tokens = _tokens(nodes, node)[:end]  # the node may go on with what another one stored
        if not asked and len(tokens) > event.matched and tokens[: event.matched] == prefix:
            asked = tokens[event.matched :][:CONTINUES]
    path = walk(txn, event.space, np.array(prefix, np.int64))
    others = [
        run
        for run in continuations(txn, event.space, path)
        if run[: len(asked)] != asked[: len(run)] or not asked
    ]
    near = tuple(near_points(path, event.matched, quarantined)) if prefix else ()
    return Past(event, identity, prefix, asked, tuple(others) if prefix else (), near)


def _events(txn: Transaction, request: str) -> tuple[Event, list[tuple[int, int]]]:
    """The last lookup of a request, and where it stored something: nodes, and offsets in them."""
    wanted = request.strip("…")
    ends = request.startswith("…")
    found: dict[str, Event] = {}
    stored: dict[str, list[tuple[int, int]]] = {}
    for _, event in read_events(txn):
        named = event.request
        if named and (named.endswith(wanted) if ends else named.startswith(wanted)):
            if event.what == LOOKUP:
                found[event.request] = event
            elif event.what == SNAPSHOT and event.node:
                stored.setdefault(event.request, []).append((event.node, event.prompt))
    if wanted in found:
        found = {wanted: found[wanted]}
    if not wanted or len(found) != 1:
        many = f"{len(found)} requests have ids that begin" if found and wanted else "No request"
        tail = f" with {request!r}" if found and wanted else f" has the id {request!r}"
        raise NoSuchRequest(many + tail)
    (name,) = found
    event = found[name]
    return event, stored.get(name, [])


def _tokens(nodes: Mapping[int, Node], node: int) -> tuple[int, ...]:
    """All tokens from the beginning to the end of a node; empty where one is missing."""
    parts: list[Sequence[int]] = []
    while node != layout.ROOT:
        if node not in nodes:
            return ()
        parts.append(nodes[node].tokens.tolist())
        node = layout.from_u64(nodes[node].key[16:24])
    return tuple(token for part in reversed(parts) for token in part)
