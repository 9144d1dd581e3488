"""Names, keys and counters of the LMDB environment. docs/format.md is the public account.

========== ============================== ==========================================
database   key                            value
========== ============================== ==========================================
meta       name                           u64 counter, or bytes
spaces     space id                       msgpack: identity, label, created
recipes    recipe id                      msgpack of ``Recipe.packed``
nodes      space, parent id, first token  node record (``records.py``)
chunks     chunk id                       frame: rows of a family, or a state
uses       node id                        last use, start, node key, rank, hits
lru        rank, depth, node id           node key: the order of eviction
ages       space, last use, depth, id     node key: the order of ageing
states     chunk id                       a state: score, use, place, node, bytes
fading     score, depth, chunk id         nothing: the order in which states are thinned
gone       slot                           digest, reason, time of an evicted prefix
tenants    digest of a salt, or ``-``     quota, used bytes
ttls       space id                       nanoseconds that an unused node lives
pins       node id                        msgpack: deadline, created
pending    job id, chunk id               unpublished bytes, pid, time
quarantine chunk id                       msgpack: reason, time
events     time, number                   msgpack event
prints     path digest                    msgpack: a remembered fingerprint
========== ============================== ==========================================
"""

from __future__ import annotations

import struct
from typing import Any

from kvkeep.errors import CorruptFrame
from kvkeep.prefixstore.eviction.order import Mark

FORMAT = 1

DATABASES = (
    "meta",
    "spaces",
    "recipes",
    "nodes",
    "chunks",
    "uses",
    "lru",
    "ages",
    "states",
    "fading",
    "gone",
    "tenants",
    "ttls",
    "pins",
    "pending",
    "quarantine",
    "events",
    "prints",
)

ROOT = 0
PAGE = 4096

_U64 = struct.Struct(">Q")
_NODE = struct.Struct(">16sQQ")
_USE = struct.Struct(">QQ32sQI")
_RANK = struct.Struct(">QQQ")
_AGE = struct.Struct(">16sQQQ")
_PAIR = struct.Struct(">QQ")
_TOP = (1 << 64) - 1


def u64(number: int) -> bytes:
    """Eight bytes that sort like the number."""
    return _U64.pack(number)


def from_u64(data: Any) -> int:
    """The number of ``u64``."""
    return int(_fields(_U64, data)[0])


def pair(left: int, right: int) -> bytes:
    """Sixteen bytes that sort by ``left``, then ``right``."""
    return _PAIR.pack(left, right)


def from_pair(data: Any) -> tuple[int, int]:
    """The numbers of ``pair``."""
    left, right = _fields(_PAIR, data)
    return left, right


def node_key(space: bytes, parent: int, first_token: int) -> bytes:
    """Where the child of ``parent`` that begins with ``first_token`` lies."""
    return _NODE.pack(space, parent, first_token + (1 << 63))


def children_prefix(space: bytes, parent: int) -> bytes:
    """The common beginning of the keys of all children of ``parent``."""
    return space + u64(parent)


def use_record(mark: Mark) -> bytes:
    """The value of ``uses``. Times are nanoseconds since the epoch."""
    return _USE.pack(mark.when, mark.start, mark.key, mark.rank, mark.hits)


def from_use_record(data: Any) -> Mark:
    """The mark of ``use_record``."""
    when, start, key, rank, hits = _fields(_USE, data)
    return Mark(rank, when, start, hits, key)


def rank_key(rank: int, start: int, item: int) -> bytes:
    """Sorts the lowest rank first and, among equals, the deepest."""
    return _RANK.pack(rank, _TOP - start, item)


def from_rank_key(data: Any) -> tuple[int, int, int]:
    """Rank, start offset and id of a ``rank_key``."""
    rank, depth, item = _fields(_RANK, data)
    return rank, _TOP - depth, item


def age_key(mark: Mark, node: int) -> bytes:
    """Sorts by space, then the least recently used first and, among equals, the deepest."""
    return _AGE.pack(mark.key[:16], mark.when, _TOP - mark.start, node)


def from_age_key(data: Any) -> tuple[int, int]:
    """Last use and node id of an ``age_key``."""
    _, when, _, node = _fields(_AGE, data)
    return when, node


def _fields(form: struct.Struct, data: Any) -> tuple[Any, ...]:
    """The fields of a record of a fixed length. Raises ``CorruptFrame`` for another length."""
    try:
        return form.unpack(data)
    except struct.error as error:
        raise CorruptFrame(f"A record of {len(data)} bytes where {form.size} are due") from error


def footprint(length: int) -> int:
    """Bytes that a value of ``length`` takes in the file: whole pages once it is large."""
    return length if length < PAGE // 2 else (length + 16 + PAGE - 1) // PAGE * PAGE
