"""``kv-paged``: keys and values in blocks of a fixed number of positions.

Shapes
    ``k`` is ``[1, H, T, Dk]``, ``v`` is ``[1, H, T, Dv]``: the occupied rows, in the order of the
    table. Slot *i* holds position *i*. What is free in the last block is never read.

Hazards
    Blocks may be listed by several live caches, so a rebuilt cache owns blocks of its own, which
    are copied out of the planes: for that moment they are held twice. A snapshot joins only the
    blocks in which something is new.

    The direct read sums in another order than the gathered one, so it is a parameter.

Resume
    At every position up to ``offset``, with no block beyond it.

>>> import mlx.core as mx
>>> from kvkeep.caches.paged import PagedKVCache
>>> cache = PagedKVCache(block_size=4)
>>> _ = cache.update_and_fetch(mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 4)))
>>> facts = CODEC.describe(cache)
>>> facts.offset, facts.floor, facts.bytes_per_token, dict(facts.params)
(5, 0, 96, {'block_size': 4, 'read': 'gathered'})
>>> CODEC.place(facts.params, None, 4).capacity, CODEC.place(facts.params, None, 5).capacity
(4, 8)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvkeep.codecs.base import (
    Codec,
    Description,
    Meta,
    Placement,
    Reach,
    Scalar,
    Segment,
    check_planes,
    dtype_name,
    entry,
    is_a,
    row_spec,
    whole,
)
from kvkeep.errors import EmptyCache, MalformedCache

if TYPE_CHECKING:
    import mlx.core as mx


class KVPaged(Codec):
    """``kvkeep.caches.paged.PagedKVCache``."""

    kind = "kv-paged"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``PagedKVCache``."""
        return is_a(cache, "kvkeep.caches.paged", "PagedKVCache")

    def describe(self, cache: Any) -> Description:
        """Rows ``[0, offset)``, floor 0."""
        offset, size = whole(cache, "offset"), whole(cache, "block_size")
        _check_table(cache, offset, size)
        first = cache.table[0]
        return Description(
            kind=self.kind,
            version=self.version,
            params={"block_size": size, "read": _known(cache.read)},
            offset=offset,
            floor=0,
            reach=Reach(),
            rows=(row_spec("k", first.keys), row_spec("v", first.values)),
            held=(Segment(0, 0, offset),),
        )

    def planes(self, cache: Any) -> dict[str, mx.array]:
        """``k`` and ``v``, the blocks of the table joined."""
        return _joined(cache.table)

    def view(
        self, cache: Any, facts: Description, start: int, stop: int
    ) -> tuple[Mapping[str, mx.array], tuple[Segment, ...]]:
        """The blocks of ``[start, stop)`` joined, and no others."""
        size = cache.block_size
        first, last = start // size, -(-stop // size)
        length = min(last * size, cache.offset) - first * size
        return _joined(cache.table[first:last]), (Segment(first * size, 0, length),)

    def place(self, params: Mapping[str, Scalar], meta: Meta | None, p: int) -> Placement:
        """Positions ``[0, p)`` in the slots ``[0, p)`` of as many blocks as they occupy.

        Raises ``MalformedCache`` for blocks of no position.
        """
        size = _size(params)
        return Placement(-(-p // size) * size, (Segment(0, 0, p),))

    def build(
        self,
        params: Mapping[str, Scalar],
        meta: Meta | None,
        p: int,
        planes: Mapping[str, mx.array],
        tensors: Mapping[str, mx.array],
        boundary: int | None,
    ) -> Any:
        """A ``PagedKVCache`` at ``p`` whose blocks are its own."""
        import mlx.core as mx

        size = _size(params)
        cache = _cache_class()(size, read=_known(params.get("read")))
        cache.offset = p
        cache.table = tuple(_block(planes["k"], planes["v"], at, size) for at in range(0, p, size))
        # Evaluated here, so that they let go of the planes and belong to no thread's stream.
        mx.eval(cache.table)
        return cache


def _joined(table: Any) -> dict[str, mx.array]:
    import mlx.core as mx

    return {
        "k": mx.concatenate([block.keys for block in table], axis=2),
        "v": mx.concatenate([block.values for block in table], axis=2),
    }


def _check_table(cache: Any, offset: int, size: int) -> None:
    """Refuse a table that is not that of ``offset`` positions in equal blocks of ``size``."""
    if not size:
        raise MalformedCache("PagedKVCache.block_size is 0")
    if not isinstance(cache.table, tuple | list):
        raise MalformedCache(f"PagedKVCache.table is {type(cache.table).__name__}, no table")
    if not offset and not cache.table:
        raise EmptyCache("PagedKVCache covers no token")
    if len(cache.table) != -(-offset // size):
        raise MalformedCache(
            f"PagedKVCache claims {offset} positions in blocks of {size}, and its table lists "
            f"{len(cache.table)}"
        )
    for number, block in enumerate(cache.table):
        if not isinstance(block, tuple) or len(block) != 2:
            raise MalformedCache(f"PagedKVCache holds no keys and values in block {number}")
        check_planes(cache, block, size)
        shapes = [(dtype_name(x), x.shape) for x in block]
        if (
            shapes != [(dtype_name(x), x.shape) for x in cache.table[0]]
            or block[0].shape[2] != size
        ):
            raise MalformedCache(f"PagedKVCache holds block {number} as {shapes}, unlike others")


def _block(keys: mx.array, values: mx.array, start: int, size: int) -> Any:
    """The block of the slots from ``start`` on, in buffers of its own."""
    from kvkeep.caches.paged import Block

    return Block.of(keys[:, :, start : start + size], values[:, :, start : start + size])


def _size(params: Mapping[str, Scalar]) -> int:
    size = entry(params, "block_size")
    if not size:
        raise MalformedCache("block_size is 0 where an integer of at least 1 is due")
    return size


def _known(read: object) -> str:
    from kvkeep.caches.paged import READS

    if isinstance(read, str) and read in READS:
        return read
    raise MalformedCache(f"read is {read!r}, not one of {', '.join(READS)}")


def _cache_class() -> Any:
    from kvkeep.caches.paged import PagedKVCache

    return PagedKVCache


CODEC = KVPaged()
