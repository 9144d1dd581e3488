"""Frames put together by hand, to say what the writer never says."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import xxhash

from kvkeep.persistence.frame import HEAD, MAGIC, VERSION


def build(
    table: Any,
    extra: Any = None,
    payload: bytes = b"",
    *,
    header: bytes | None = None,
    version: int = VERSION,
    flags: int = 0,
    zero: int = 0,
) -> bytes:
    """A frame with a right checksum around whatever is given."""
    if header is None:
        header = msgpack.packb([table, {} if extra is None else extra])
    padding = bytes(-(HEAD.size + len(header)) % 64)
    head = HEAD.pack(MAGIC, version, flags, len(header), zero, len(payload), 0)[:24]
    rest = header + padding + payload
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + rest)) + rest


def row(
    name: Any = "t",
    dtype: Any = "uint8",
    shape: Any = (64,),
    encoding: Any = 0,
    offset: Any = 0,
    size: Any = 64,
) -> list[Any]:
    """A row of one tensor, or of a stack where ``name`` is a list."""
    return [name if isinstance(name, list) else [name], dtype, shape, encoding, offset, size]


def floats(spec: Any, seed: int = 0) -> Any:
    """Normal numbers of 16 bits, in the host dtype: what keys and values look like."""
    values = np.random.default_rng(seed).normal(size=spec.shape).astype(np.float32)
    if spec.dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(spec.host_dtype)
