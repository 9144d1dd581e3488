r"""Reading msgpack that somebody may have damaged or made up.

>>> unpack_plain(b"\x92\x01\xa1x")
(1, 'x')
>>> unpack_plain(b"\xdd\xff\xff\xff\xff")
Traceback (most recent call last):
kvkeep.errors.CorruptFrame: Packed bytes cannot be read (4294967295 exceeds max_array_len(5))
  Run `kvkeep verify` to see what is affected; reads stop before the damage.
"""

from __future__ import annotations

from typing import Any

import msgpack

from kvkeep.errors import CorruptFrame

MOST_ITEMS = 1 << 14
"""Items of one array or map. What is reserved for nested ones before their items are seen adds
up: no more than 512 times this many pointers, 64 MiB."""


def unpack_plain(data: Any, most_items: int = MOST_ITEMS) -> Any:
    """The one value that ``data`` packs, of msgpack's own types; arrays as tuples.

    Raises ``CorruptFrame`` for anything else, for an array or a map of more than ``most_items``,
    and for one that claims more items than there are bytes. What the value means is not checked.
    """
    size = min(len(data), most_items)
    try:
        return msgpack.unpackb(
            data,
            use_list=False,
            raw=False,
            strict_map_key=True,
            ext_hook=_no_extension,
            max_array_len=size,
            max_map_len=size,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptFrame(f"Packed bytes cannot be read ({error})") from error


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} of {len(data)} bytes")
