"""The stored prefixes as boxes for an icicle chart: the heaviest, and the rest in sums."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.prefixstore.report import SpaceFacts
    from kvkeep.prefixstore.tree import Branch

ROOT = "all"
MOST = 300
"""Boxes of branches in one chart."""


@dataclass
class Box:
    """One box: a space, a branch of it, or all smaller branches of one parent together.

    ``bytes`` are its own with everything below; only the first box, everything, has no
    ``parent``.
    """

    id: str
    parent: str
    label: str
    bytes: int
    conversations: int
    tokens: int = 0
    start: int = 0
    points: int = 0
    merged: int = 0


def boxes(
    spaces: Sequence[SpaceFacts], trees: Mapping[str, Sequence[Branch]], labels: Mapping[str, str]
) -> list[Box]:
    """Everything, the spaces, and what they hold; at most ``MOST`` branches one by one."""
    out: list[Box] = []
    for facts in spaces:
        tree = trees.get(facts.id, ())
        if tree:
            whole = sum(b.below for b in tree if not b.parent)
            through = sum(b.conversations for b in tree if not b.parent)
            out.append(Box(facts.id, ROOT, labels[facts.id], whole, through))
    if out:
        whole, through = sum(b.bytes for b in out), sum(b.conversations for b in out)
        out.insert(0, Box(ROOT, "", "everything", whole, through))
    shown = _heaviest(trees)
    for space, tree in trees.items():
        smaller: dict[str, Box] = {}
        for branch in tree:
            name = f"{space}/{branch.id:x}"
            parent = f"{space}/{branch.parent:x}" if branch.parent else space
            if name in shown:
                label = f"{branch.start:,}–{branch.stop:,}"
                out.append(
                    Box(
                        name,
                        parent,
                        label,
                        branch.below,
                        branch.conversations,
                        branch.tokens,
                        branch.start,
                        len(branch.points),
                    )
                )
            elif not branch.parent or parent in shown:
                box = smaller.setdefault(parent, Box(f"{parent}/rest", parent, "", 0, 0))
                box.bytes += branch.below
                box.conversations += branch.conversations
                box.merged += 1
        for box in smaller.values():
            box.label = f"{box.merged:,} smaller"
            out.append(box)
    return out


def _heaviest(trees: Mapping[str, Sequence[Branch]]) -> set[str]:
    """Names of the branches that are shown one by one: none before its parent."""
    below: dict[str, list[tuple[int, str]]] = {}
    for space, tree in trees.items():
        for branch in tree:
            parent = f"{space}/{branch.parent:x}" if branch.parent else ""
            below.setdefault(parent, []).append((-branch.below, f"{space}/{branch.id:x}"))
    waiting = below.get("", [])
    heapq.heapify(waiting)
    shown: set[str] = set()
    while waiting and len(shown) < MOST:
        _, name = heapq.heappop(waiting)
        shown.add(name)
        for child in below.get(name, ()):
            heapq.heappush(waiting, child)
    return shown
