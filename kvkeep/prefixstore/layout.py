"""Names, keys and counters of the LMDB environment. docs/format.md is the public account.

========== ============================== ==========================================
database   key                            value
========== ============================== ==========================================
meta       name                           u64 counter, or bytes
spaces     space id                       msgpack: identity, label, created
recipes    recipe id                      msgpack of ``Recipe.packed``
nodes      space, parent id, first token  node record (``records.py``)
chunks     chunk id                       frame: rows of a family, or a state
uses       node id                        last use, start, node key
lru        last use, depth, node id       node key
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

FORMAT = 1

DATABASES = (
    "meta",
    "spaces",
    "recipes",
    "nodes",
    "chunks",
    "uses",
    "lru",
    "pending",
    "quarantine",
    "events",
    "prints",
)

ROOT = 0
PAGE = 4096

_U64 = struct.Struct(">Q")
_NODE = struct.Struct(">16sQQ")
_USE = struct.Struct(">QQ32s")
_LRU = struct.Struct(">QQQ")
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


def use_record(when: int, start: int, key: bytes) -> bytes:
    """The value of ``uses``: nanoseconds since the epoch, start offset and key of a node."""
    return _USE.pack(when, start, key)


def from_use_record(data: Any) -> tuple[int, int, bytes]:
    """The parts of ``use_record``."""
    when, start, key = _fields(_USE, data)
    return when, start, key


def lru_key(when: int, start: int, node_id: int) -> bytes:
    """Sorts the least recently used first and, among equals, the deepest first."""
    return _LRU.pack(when, _TOP - start, node_id)


def from_lru_key(data: Any) -> tuple[int, int, int]:
    """Last use, start offset and node id of an ``lru_key``."""
    when, depth, node_id = _fields(_LRU, data)
    return when, _TOP - depth, node_id


def _fields(form: struct.Struct, data: Any) -> tuple[Any, ...]:
    """The fields of a record of a fixed length. Raises ``CorruptFrame`` for another length."""
    try:
        return form.unpack(data)
    except struct.error as error:
        raise CorruptFrame(f"A record of {len(data)} bytes where {form.size} are due") from error


def footprint(length: int) -> int:
    """Bytes that a value of ``length`` takes in the file: whole pages once it is large."""
    return length if length < PAGE // 2 else (length + 16 + PAGE - 1) // PAGE * PAGE
