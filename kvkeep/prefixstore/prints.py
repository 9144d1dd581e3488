"""Fingerprints of files, remembered: reading a model's shards anew at each start would be slow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgpack

from kvkeep.errors import CorruptFrame
from kvkeep.persistence.environment import Environment
from kvkeep.persistence.packing import unpack_plain


def remembered(env: Environment, file: Path, compute: Callable[[], str]) -> str:
    """The fingerprint of ``file``, kept by its path, size and time of change."""
    stat = file.stat()
    mark = [str(file), stat.st_size, stat.st_mtime_ns]
    key = msgpack.packb(mark)[-500:]
    with env.begin() as txn:
        data = txn.get("prints", key)
        if data is not None:
            with suppress(CorruptFrame):
                match unpack_plain(data):
                    case (tuple(kept), str(digest)) if list(kept) == mark:
                        return digest
    digest = compute()
    if not env.read_only:
        with env.begin(write=True) as txn:
            txn.put("prints", key, msgpack.packb([mark, digest]))
    return digest
