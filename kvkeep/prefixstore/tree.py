"""The stored prefixes of a space as a tree: what each edge holds, and how many share it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import browse, layout
from kvkeep.prefixstore.records import Node


@dataclass
class Branch:
    """An edge of the trie, with what hangs on it and below it.

    It holds tokens ``[start, stop)``. ``bytes`` are its own rows and states, ``below`` those
    of everything under it, itself included; ``conversations`` end there or below. ``points``
    are its resume points, as offset and origin. ``depth`` is 0 for a branch from the root.
    ``first`` are the first of its token ids.
    """

    id: int
    parent: int
    depth: int
    start: int
    stop: int
    bytes: int
    below: int
    conversations: int
    points: tuple[tuple[int, str], ...]
    last_use: float
    first: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the edge itself."""
        return self.stop - self.start


def branches(txn: Transaction, space: bytes, first: int = 0) -> list[Branch]:
    """Every readable edge of a space, each before those below it; heavier branches first.

    ``first`` is how many token ids of each edge are given. Edges whose parent cannot be read
    are left out.
    """
    below: dict[int, list[Node]] = {}
    for node in browse.nodes(txn, space):
        below.setdefault(layout.from_u64(node.key[16:24]), []).append(node)
    ordered = list(_down(below))
    found: dict[int, Branch] = {}
    for node, depth in ordered:
        found[node.id] = Branch(
            id=node.id,
            parent=layout.from_u64(node.key[16:24]),
            depth=depth,
            start=node.start,
            stop=node.stop,
            bytes=browse.bytes_of(node),
            below=browse.bytes_of(node),
            conversations=int(node.id not in below),
            points=tuple((p.offset, p.origin) for p in node.points),
            last_use=browse.last_use(txn, node),
            first=tuple(node.tokens[:first].tolist()),
        )
    for node, _ in reversed(ordered):
        parent = found.get(found[node.id].parent)
        if parent is not None:
            parent.below += found[node.id].below
            parent.conversations += found[node.id].conversations
    return _heaviest_first(found)


def _down(below: dict[int, list[Node]]) -> Iterator[tuple[Node, int]]:
    """Nodes from the root down, without recursion: conversations can be thousands deep."""
    waiting = [(node, 0) for node in below.get(layout.ROOT, ())]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting += [(child, depth + 1) for child in below.get(node.id, ())]


def _heaviest_first(found: dict[int, Branch]) -> list[Branch]:
    children: dict[int, list[Branch]] = {}
    for branch in found.values():
        children.setdefault(branch.parent, []).append(branch)
    for group in children.values():
        group.sort(key=lambda branch: (branch.below, branch.id))
    out: list[Branch] = []
    waiting = list(children.get(layout.ROOT, ()))
    while waiting:
        branch = waiting.pop()
        out.append(branch)
        waiting += children.get(branch.id, ())
    return out
