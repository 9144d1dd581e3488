"""How the bytes of one tensor are stored: as they are, or compressed without loss.

``PLANES`` splits 16-bit elements into a run of their low bytes and a run of their high bytes
before zstd. The high bytes of keys and values hold the sign and most of the exponent, which
repeat; the low bytes hold the mantissa, which does not, and zstd passes over it quickly.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from kvkeep.errors import CorruptFrame
from kvkeep.persistence.tensors import TensorSpec

if TYPE_CHECKING:
    Host = np.ndarray[Any, np.dtype[Any]]

RAW = 0
ZSTD = 1
PLANES = 2
ENCODINGS = (RAW, ZSTD, PLANES)

LEVEL = 1
SMALLEST = 4096
"""Tensors below this many bytes stay raw."""

SAMPLE = 64 * 1024
LEAST_GAIN = 1.12
"""A tensor stays raw unless it shrinks by this factor, first its sample, then all of it."""

MOST_GAIN = 1024
"""No stored tensor may expand by more than this, which bounds what a hostile frame can claim."""

_local = threading.local()


def encode(spec: TensorSpec, raw: Host) -> tuple[int, bytes | None]:
    """The encoding chosen for ``raw``, the tensor's flat bytes, and the stored bytes.

    ``(RAW, None)`` where compression gains too little.
    """
    if len(raw) < SMALLEST:
        return RAW, None
    encoding = PLANES if spec.dtype in ("bfloat16", "float16") else ZSTD
    if len(raw) > 2 * SAMPLE:
        middle = (len(raw) - SAMPLE) // 2 // spec.itemsize * spec.itemsize
        sample = raw[middle : middle + SAMPLE]
        if len(_compress(encoding, sample)) * LEAST_GAIN > SAMPLE:
            return RAW, None
    stored = _compress(encoding, raw)
    if len(stored) * LEAST_GAIN > len(raw) or len(stored) * MOST_GAIN < len(raw):
        return RAW, None
    return encoding, stored


def decode(spec: TensorSpec, encoding: int, stored: Host) -> Host:
    """The tensor ``spec`` from its stored bytes, in memory of its own unless raw.

    Raises ``CorruptFrame`` before allocating where the stored bytes claim another size.
    """
    if encoding == RAW:
        return stored.view(spec.host_dtype).reshape(spec.shape)
    try:
        parameters = zstandard.get_frame_parameters(stored[:32].tobytes())
        if parameters.content_size != spec.nbytes:
            raise CorruptFrame(f"{spec.name}: the compressed bytes are of another size")
        plain = _decompressor().decompress(stored.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptFrame(f"{spec.name}: the compressed bytes cannot be read ({error})") from error
    if len(plain) != spec.nbytes:
        raise CorruptFrame(f"{spec.name}: the compressed bytes are of another size")
    flat = np.frombuffer(plain, np.uint8)
    if encoding == PLANES:
        low, high = flat.reshape(2, -1)
        joined = high.astype(np.uint16)
        np.left_shift(joined, 8, out=joined)
        np.bitwise_or(joined, low, out=joined)
        flat = joined.view(np.uint8)
    return flat.view(spec.host_dtype).reshape(spec.shape)


def _compress(encoding: int, raw: Host) -> bytes:
    if encoding == PLANES:
        words = raw.view("<u2")
        planes = np.empty((2, len(words)), np.uint8)
        planes[0] = words
        np.right_shift(words, 8, out=planes[1], casting="unsafe")
        raw = planes.reshape(-1)
    return _compressor().compress(raw.data)


def _compressor() -> zstandard.ZstdCompressor:
    """This thread's own: the objects must not be shared between threads."""
    found: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if found is None:
        found = _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found
