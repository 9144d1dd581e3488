"""Answers that are not finished, stored so that only the same request goes on with them.

The rows of an answer hang below those of its prompt, which all share, but under other token ids:
each is moved far out of every vocabulary, by numbers that only the request gives. So no prompt
leads there, and nothing else has to know of it: such a path is evicted, purged and verified
like any other. It is removed when the answer is complete.

The model must run one token before it answers, so what can go on is a stored path of which all
but the last token can be resumed. Where that takes a resume point, two are stored for each
checkpoint: one at a token, and one behind it, which brings the token itself.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.errors import CorruptFrame, KvkeepError, NewerFormat, StoreClosed
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.core import Core
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.publish import split
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.records import Node, detach, unpack
from kvkeep.prefixstore.tokens import Tokens, as_tokens, common_prefix
from kvkeep.prefixstore.trie import children, has_children, walk

if TYPE_CHECKING:
    from kvkeep.prefixstore.space import Space

log = logging.getLogger("kvkeep")

VOCABULARY = 1 << 32
"""Ids of an answer are below this one."""

KEPT_POINTS = 2
"""Resume points of an answer that are kept: the last checkpoint's."""


class Disguise:
    """Token ids that stand for those of an answer; ``key`` is what a request is known by."""

    def __init__(self, key: bytes) -> None:
        words = np.frombuffer(hashlib.blake2b(key, digest_size=64).digest(), "<u8")
        high = (words >> np.uint64(2)) | np.uint64(1 << 61)
        self._bases: Tokens = (high // np.uint64(VOCABULARY) * np.uint64(VOCABULARY)).astype(
            np.int64
        )

    def hide(self, answer: Sequence[int]) -> Tokens:
        """The ids under which ``answer`` is stored."""
        return as_tokens(answer) + self._of(0, len(answer))

    def reveal(self, ids: Any, start: int = 0) -> list[int] | None:
        """The answer's own ids, from its token ``start`` on; ``None`` for another request's."""
        plain = as_tokens(ids) - self._of(start, len(ids))
        if ((plain < 0) | (plain >= VOCABULARY)).any():
            return None
        found: list[int] = plain.tolist()
        return found

    def _of(self, start: int, count: int) -> Tokens:
        return self._bases[np.arange(start, start + count) % len(self._bases)]


@dataclass(frozen=True)
class Continued:
    """Caches that cover a prompt and all but the last token of ``answer``."""

    caches: list[Any]
    answer: list[int]


class Unfinished:
    """The answer of one request as far as it is stored. Made by ``Space.unfinished``."""

    def __init__(self, core: Core, space: Space, prompt: Any, key: bytes) -> None:
        self._core, self._space = core, space
        self._prompt = as_tokens(prompt)
        self._disguise = Disguise(key)
        self._name = hashlib.blake2b(space.id + self._prompt.tobytes() + key).digest()
        self._stored = False

    def resume(self) -> Continued | None:
        """Caches to go on with, and the tokens that were answered before; ``None`` if there are
        none. Waits for what was accepted. A failure of the store counts as none.
        """
        end = len(self._prompt)
        if self._name in self._core.finished:
            return None
        for prepared in self._core.writer.queued(self._space.id):
            tokens = prepared.snapshot.tokens
            mine = len(tokens) > end and self._disguise.reveal(tokens[end:]) is not None
            if mine and common_prefix(tokens, self._prompt) == end:
                self._core.writer.settled(prepared)
        try:
            with self._core.env.begin() as txn:
                answer, _ = self._path(txn)
        except StoreClosed:
            raise
        except (KvkeepError, OSError) as error:
            log.warning("kvkeep: an unfinished answer was not looked up: %s", error)
            return None
        if len(answer) < 2:
            return None
        self._stored = True
        hit = self._space.resume(self._hidden(answer), minimum=end + 1, record=False)
        if hit.caches is None:
            return None
        return Continued(hit.caches, answer[: hit.offset - end + 1])

    def checkpoint(self, answer: Sequence[int], caches: Sequence[Any]) -> Receipt:
        """Store ``caches``, which cover the prompt and ``answer``; older checkpoints go.

        As ``Space.snapshot``, and never waits. Raises ``Refused``.
        """
        receipt = self._space.snapshot(self._hidden(answer), caches, "output", wait=False)
        self._stored = True
        self._core.writer.call(self._thin)
        return receipt

    def finished(self) -> None:
        """Remove what is stored of the answer, once what was accepted is written."""
        if self._stored and self._core.env.usable and not self._core.env.read_only:
            self._core.finished.add(self._name)
            self._core.writer.call(self._remove)
        self._stored = False

    def _hidden(self, answer: Sequence[int]) -> Tokens:
        return np.concatenate([self._prompt, self._disguise.hide(answer)])

    def _path(self, txn: Transaction) -> tuple[list[int], list[Node]]:
        """The answer as it is stored, and the nodes that hold it; the first may begin before."""
        end, space = len(self._prompt), self._space.id
        path = walk(txn, space, self._prompt)
        answer: list[int] = []
        if path.matched < end or not path.nodes:
            return answer, []
        last, nodes = path.nodes[-1], []
        if last.stop > end:
            found = self._disguise.reveal(last.tokens[end - last.start :])
            if found is None:
                return [], []
            answer, nodes = found, [detach(last)]
        while True:
            key = self._below(txn, last.id, len(answer))
            data = txn.get("nodes", key) if key is not None else None
            if key is None or data is None:
                return answer, nodes
            try:
                last = detach(unpack(key, data))
            except (CorruptFrame, NewerFormat):
                return answer, nodes
            found = self._disguise.reveal(last.tokens, len(answer))
            if found is None or last.start != end + len(answer):
                return answer, nodes
            answer += found
            nodes.append(last)

    def _below(self, txn: Transaction, parent: int, start: int) -> bytes | None:
        """The key of the node that goes on with token ``start`` of the answer."""
        for key in children(txn, self._space.id, parent):
            first = layout.from_u64(key[24:32]) - (1 << 63)
            if self._disguise.reveal([first], start) is not None:
                return bytes(key)
        return None

    def _thin(self) -> None:
        """Drop all resume points of the answer but the last ones."""
        end = len(self._prompt)
        with self._core.env.begin(write=True) as txn:
            _, nodes = self._path(txn)
            offsets = sorted(p.offset for node in nodes for p in node.points if p.offset > end)
            gone = set(offsets[:-KEPT_POINTS])
            ledger = Ledger(txn)
            for node in nodes:
                kept = node
                for point in node.points:
                    kept = kept.without_point(point) if point.offset in gone else kept
                if kept is not node:
                    ledger.drop_parts(node, kept)
            ledger.settle()

    def _remove(self) -> None:
        """Drop the nodes of the answer, and leave the prompt's as they are."""
        end = len(self._prompt)
        try:
            with self._core.env.begin(write=True) as txn:
                ledger = Ledger(txn, self._space.id)
                _, nodes = self._path(txn)
                if nodes and nodes[0].start < end:
                    split(ledger, nodes[0], end)
                    _, nodes = self._path(txn)
                for node in reversed(nodes):
                    if not has_children(txn, self._space.id, node.id):
                        ledger.drop_node(node)
                ledger.settle()
        finally:
            self._core.finished.discard(self._name)
