"""``delayed``: a cache whose rows are quantized once it reaches a start.

The holder has nothing of its own but what it was made with: ``bits``, ``group_size``, ``start``,
and how it is read. It holds the storage of now, plain before the conversion and quantized after
it, and its kind is spelled with both: ``delayed(kv,kv-quant)``. So caches of either side belong
to one layout, and a store that was written before the conversion goes on to convert.

Hazards
    The storages of before and after are different data. The quantized one carries the offset
    of the conversion as its boundary; that is the floor. A plan for the end of a chunk is not
    stored: what was read of a chunk so far is a snapshot like any other.

Resume
    Where the inner one can.

>>> import mlx.core as mx
>>> from kvkeep.caches.delayed import DelayedKVCache
>>> cache = DelayedKVCache(bits=4, group_size=32, start=5)
>>> CODEC.spelled(["kv"]), CODEC.spelled(["kv-quant"])
('delayed(kv,kv-quant)', 'delayed(kv,kv-quant)')
>>> dict(CODEC.params(cache))
{'bits': 4, 'group_size': 32, 'start': 5}
>>> CODEC.assemble(CODEC.children(cache), CODEC.params(cache)).start
5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.codecs.base import Composite, Scalar, entry, is_a
from kvkeep.errors import BadScheme, MalformedCache

_SIDES = {
    "kv": "kv,kv-quant",
    "kv-rotating": "kv-rotating,kv-rotating-quant",
    "kv-chunked": "kv-chunked,kv-chunked-quant",
}

_FLAGS = ("dense", "lent")


class Delayed(Composite):
    """``kvkeep.caches.delayed.DelayedKVCache``."""

    kind = "delayed"

    def matches(self, cache: object) -> bool:
        """Whether ``cache`` is a ``DelayedKVCache``."""
        return is_a(cache, "kvkeep.caches.delayed", "DelayedKVCache")

    def children(self, cache: Any) -> tuple[Any, ...]:
        """The storage of now. Raises ``MalformedCache`` where it is not one."""
        if not isinstance(cache.caches, tuple | list) or len(cache.caches) != 1:
            raise MalformedCache("DelayedKVCache holds one cache at a time")
        return tuple(cache.caches)

    def params(self, cache: Any) -> Mapping[str, Scalar]:
        """Width, group size and start; flags where they are set."""
        facts: dict[str, Scalar] = {
            "bits": cache.packed_bits,
            "group_size": cache.group_size,
            "start": cache.start,
        }
        return facts | {name: True for name in _FLAGS if getattr(cache, name)}

    def spelled(self, inner: Sequence[str]) -> str:
        """``delayed`` with the kinds of before and after."""
        held = ",".join(inner).removesuffix("-quant")
        return f"{self.kind}({_SIDES.get(held, ','.join(inner))})"

    def assemble(self, children: Sequence[Any], params: Mapping[str, Scalar]) -> Any:
        """A ``DelayedKVCache`` that holds the one child."""
        if len(children) != 1:
            raise MalformedCache("A DelayedKVCache holds one cache at a time")
        bits, group_size, start = (entry(params, x) for x in ("bits", "group_size", "start"))
        flags = {name: params.get(name) is True for name in _FLAGS}
        try:
            return _cache_class()(bits, group_size, start, source=children[0], **flags)
        except BadScheme as error:
            raise MalformedCache(error.problem) from error


def _cache_class() -> Any:
    from kvkeep.caches.delayed import DelayedKVCache

    return DelayedKVCache


CODEC = Delayed()
