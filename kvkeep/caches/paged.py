"""Paged keys and values: blocks of a fixed number of positions, and a table of them.

A block is a pair of arrays ``[B, H, block_size, D]``; the table lists the blocks in the order of
their positions. An append writes into the last block or adds blocks: nothing that is full is ever
copied or moved. A trim takes blocks off the end of the table.

``fork`` gives a request that goes on from the same prefix a table of the same blocks. A block is
never written where it lies while another table lists it: MLX gives the writer a copy of that
one block, which only the last, half-filled one ever needs.

mlx-lm's models read gathered rows, which have the bits of a plain ``KVCache``'s. Who reads through
``append_decode`` may choose ``read="direct"``: block after block with a running maximum, so that no
copy of all rows is made; its sums are in another order.

There is no batch layout, so ``mlx_lm.server`` takes its path for single requests.

>>> import mlx.core as mx
>>> cache = PagedKVCache(block_size=4)
>>> _ = cache.update_and_fetch(mx.ones((1, 2, 6, 8)), mx.ones((1, 2, 6, 8)))
>>> other = cache.fork(5)
>>> len(cache.table), len(other.table), held_bytes([cache, other]) == cache.nbytes
(2, 2, True)
>>> _ = other.update_and_fetch(mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 8)))
>>> other.table[0] is cache.table[0], other.table[1] is cache.table[1]
(True, False)
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from kvkeep.caches.every_position import EveryPosition
from kvkeep.caches.reads import DenseRead, one_position
from kvkeep.errors import BadScheme, EmptyCache

READS = ("gathered", "direct")


class Block(NamedTuple):
    """Keys and values of ``block_size`` positions, ``[B, H, block_size, D]``. Never written to."""

    keys: mx.array
    values: mx.array

    @property
    def nbytes(self) -> int:
        """Bytes of both, filled or not."""
        return int(self.keys.nbytes + self.values.nbytes)

    @staticmethod
    def of(keys: mx.array, values: mx.array) -> Block:
        """A full block of these rows in buffers of its own, whatever they are views of."""
        every = mx.arange(keys.shape[2])
        return Block(mx.take(keys, every, axis=2), mx.take(values, every, axis=2))

    def written(self, slot: int, keys: mx.array, values: mx.array) -> Block:
        """This block with rows ``[B, H, L, D]`` from ``slot`` on."""
        # Fresh array objects on the same buffers: MLX copies these only while others hold them.
        block = Block(copy.copy(self.keys), copy.copy(self.values))
        stop = slot + keys.shape[2]
        block.keys[..., slot:stop, :] = keys
        block.values[..., slot:stop, :] = values
        return block


@dataclass(frozen=True)
class DirectRead:
    """Blocks in order, the last one cut, for queries of one position."""

    blocks: tuple[tuple[mx.array, mx.array], ...]

    def attend(self, queries: mx.array, scale: float, *, sinks: mx.array | None = None) -> mx.array:
        """Attention of ``queries`` ``[B, Hq, 1, D]``, block by block, summed in float32."""
        batch, heads, length, width = queries.shape
        groups = self.blocks[0][0].shape[1]
        # Query heads that share a key head become rows of one product.
        q = (queries * scale).reshape(batch, groups, heads // groups * length, width)
        # A sink is a logit whose value is 0.
        top = mx.full((batch, groups, q.shape[2], 1), -mx.inf, dtype=mx.float32)
        weight = mx.zeros_like(top)
        if sinks is not None:
            logits = mx.repeat(sinks.astype(mx.float32), length).reshape(1, groups, -1, 1)
            top, weight = mx.broadcast_to(logits, top.shape), mx.ones_like(top)
        total = mx.zeros((*q.shape[:3], self.blocks[0][1].shape[-1]), dtype=mx.float32)
        for keys, values in self.blocks:
            scores = (q @ keys.swapaxes(-1, -2)).astype(mx.float32)
            higher = mx.maximum(top, scores.max(axis=-1, keepdims=True))
            shrink, part = mx.exp(top - higher), mx.exp(scores - higher)
            weight = weight * shrink + part.sum(axis=-1, keepdims=True)
            total = total * shrink + (part.astype(values.dtype) @ values).astype(mx.float32)
            top = higher
        return (total / weight).astype(queries.dtype).reshape(batch, heads, length, -1)


class PagedKVCache(EveryPosition):
    """Keys and values in blocks of ``block_size`` positions, of any head size.

    Raises ``BadScheme`` for a block size that is not positive, and for another ``read`` than
    ``gathered`` or ``direct``.
    """

    kind = "kv-paged"

    def __init__(self, block_size: int = 256, *, read: str = "gathered") -> None:
        check_block_size(block_size)
        if read not in READS:
            raise BadScheme(f"Paged caches have no read {read!r}; valid are {', '.join(READS)}")
        self.block_size = block_size
        self.read = read
        self.table: tuple[Block, ...] = ()
        self.offset = 0
        self.minimum_resumable_offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append ``[B, H, L, D]``; all rows, gathered."""
        self._append(keys, values)
        return self.keys_and_values()

    def append_decode(self, keys: mx.array, values: mx.array) -> DenseRead | DirectRead:
        """Append one position per row; a read of it and all before it."""
        one_position(keys)
        if self.read == "gathered":
            return self.append_window(keys, values)
        self._append(keys, values)
        return DirectRead(tuple(self._rows()))

    def append_window(self, keys: mx.array, values: mx.array) -> DenseRead:
        """Append L positions, causal among themselves; a gathered read of all."""
        mask = self.make_mask(keys.shape[2])
        return DenseRead(*self.update_and_fetch(keys, values), mask)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows gathered, ``[B, H, offset, D]``. Raises ``EmptyCache`` where there are none."""
        rows = list(self._rows())
        if not rows:
            raise EmptyCache("PagedKVCache covers no token")
        if len(rows) == 1:
            return rows[0]
        keys = mx.concatenate([keys for keys, _ in rows], axis=2)
        return keys, mx.concatenate([values for _, values in rows], axis=2)

    def fork(self, positions: int | None = None) -> PagedKVCache:
        """A cache of the first ``positions`` (all without a number) on the same blocks.

        Raises ``ValueError`` where the cache does not hold as many.
        """
        count = self.offset if positions is None else positions
        if not 0 <= count <= self.offset:
            raise ValueError(f"A fork at {count} of a cache that holds {self.offset} positions")
        other = PagedKVCache(self.block_size, read=self.read)
        other.table = self.table[: self._blocks(count)]
        other.offset = count
        other.minimum_resumable_offset = self.minimum_resumable_offset
        return other

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that the cache holds, for ``from_state`` and for ``mx.eval``."""
        return (
            [block.keys for block in self.table],
            [block.values for block in self.table],
            self.offset,
            self.block_size,
            self.read,
            self.minimum_resumable_offset,
        )

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        keys, values, self.offset, self.block_size, self.read, floor = state
        self.table = tuple(Block(k, v) for k, v in zip(keys, values, strict=True))
        self.minimum_resumable_offset = floor

    def bytes_per_token(self) -> int:
        """Physical bytes of one row's token in its block; 0 before the first append."""
        if not self.table:
            return 0
        return self.table[0].nbytes // (self.table[0].keys.shape[0] * self.block_size)

    def trim(self, n: int) -> int:
        """Drop the last ``n`` positions, at most all, and the blocks that held no others."""
        n = min(self.offset, n)
        self.offset -= n
        self.table = self.table[: self._blocks(self.offset)]
        return n

    def empty(self) -> bool:
        """Whether no block is held."""
        return not self.table

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in the table, whoever else lists them."""
        return sum(block.nbytes for block in self.table)

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _append(self, keys: mx.array, values: mx.array) -> None:
        done, length = 0, keys.shape[2]
        while done < length:
            slot = self.offset % self.block_size
            count = min(self.block_size - slot, length - done)
            full = self.table[: self.offset // self.block_size]
            stop = done + count
            rows = keys[..., done:stop, :], values[..., done:stop, :]
            if count == self.block_size:
                block = Block.of(*rows)
            else:
                block = (self.table[-1] if slot else self._blank(*rows)).written(slot, *rows)
            self.table = (*full, block)
            self.offset += count
            done = stop

    def _blank(self, keys: mx.array, values: mx.array) -> Block:
        return Block(
            *(
                mx.zeros((*x.shape[:2], self.block_size, x.shape[3]), dtype=x.dtype)
                for x in (keys, values)
            )
        )

    def _rows(self) -> Iterator[tuple[mx.array, mx.array]]:
        """The occupied rows of every block, in order."""
        left = self.offset
        for block in self.table:
            if left >= self.block_size:
                yield block.keys, block.values
            else:
                yield block.keys[..., :left, :], block.values[..., :left, :]
            left -= self.block_size


def check_block_size(block_size: object) -> None:
    """Raise ``BadScheme`` unless a block has at least one position."""
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise BadScheme(f"Blocks of {block_size!r} positions: valid are 1 and above")


def held_bytes(caches: Iterable[PagedKVCache]) -> int:
    """Bytes of the blocks that these tables list, a block that several list counted once."""
    return sum({id(block): block.nbytes for cache in caches for block in cache.table}.values())
