"""What the nodes of a store own, noted in arrays: 40 bytes for a node and 32 for a frame.

A store may have millions of both; as Python objects they would take ten times as much.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.prefixstore import layout
from kvkeep.prefixstore.records import Node, Stored

_FIELDS = ("id", "parent", "first", "start", "tokens")
_NODE = np.dtype([(name, "u8") for name in _FIELDS])
_FRAME = np.dtype([(name, "u8") for name in (*Stored._fields, "node")])


class Owned:
    """Nodes, numbered as they were added, and the frames that they refer to."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._nodes, self._frames = array("Q"), array("Q")
        for node in nodes:
            self.add(node)

    def add(self, node: Node) -> None:
        """Note a node and its frames."""
        number = len(self._nodes) // len(_FIELDS)
        for frame in node.frames():
            self._frames.extend((*frame, number))
        place = layout.from_pair(node.key[16:])
        self._nodes.extend((node.id, *place, node.start, len(node.tokens)))

    def frames(self) -> NDArray[Any]:
        """The fields of ``Stored`` and the ``node`` of each frame, in order of ids."""
        frames = np.frombuffer(self._frames, _FRAME)
        return frames[np.argsort(frames["id"], kind="stable")]

    def orphans(self) -> Iterator[int]:
        """The nodes whose parents are not among the nodes."""
        nodes = np.frombuffer(self._nodes, _NODE)
        known = np.append(nodes["id"], np.uint64(layout.ROOT))
        yield from map(int, np.flatnonzero(~np.isin(nodes["parent"], known)))

    def where(self, node: int) -> str:
        """What a node is called by the place that it is filed under."""
        _, parent, first, _, _ = self._of(node)
        return where(layout.pair(parent, first))

    def run(self, node: int) -> str:
        """What a node is called by its tokens."""
        number, _, _, start, tokens = self._of(node)
        return f"tokens {start:,}-{start + tokens:,} of node {number:x}"

    def _of(self, node: int) -> array[int]:
        return self._nodes[node * len(_FIELDS) : (node + 1) * len(_FIELDS)]


def where(place: bytes) -> str:
    """What a node is called that is filed under ``place``, the key without its space."""
    return f"node {place.hex()}"
