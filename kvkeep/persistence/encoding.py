"""How the bytes of a stack of tensors are stored: as they are, or compressed without loss.

``PLANES`` takes floats apart into planes, one for each byte of an element, lowest first, and
compresses each plane that gains from it. The highest byte of keys and values holds the sign
and most of the exponent, which repeat; the mantissa below does not and stays as it is. The
planes are compressed apart from each other, as zstd would otherwise count their bytes together.
"""

from __future__ import annotations

import struct
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

LEVEL = 1
SMALLEST = 4096
"""Stacks below this many bytes stay raw."""

SAMPLE = 64 * 1024
LEAST_GAIN = 1.12
"""A stack stays raw unless it shrinks by this factor, first its sample, then all of it."""

LEAST_PLANE_GAIN = 1.03
PLANE_SAMPLE = 8 * 1024
PLANE_PARAMETERS = {"strategy": 1, "window_log": 17, "hash_log": 6, "min_match": 7}
"""Nearly no search for matches: planes gain from the counts of their bytes, and matches of a few
bytes cost more than they save. Smaller by 5 to 10 % than level 1, and twice as fast both ways."""

MOST_GAIN = 1024
"""No stored stack may expand by more than this, which bounds what a hostile frame can claim."""

_local = threading.local()


def encodings_of(spec: TensorSpec) -> tuple[int, ...]:
    """The encodings that tensors of this dtype may have."""
    return (RAW, ZSTD, PLANES) if spec.itemsize in (2, 4) else (RAW, ZSTD)


def encode(spec: TensorSpec, raw: Host) -> tuple[int, bytes | None]:
    """The encoding chosen for ``raw``, the stack's flat bytes, and the stored bytes.

    ``(RAW, None)`` where compression gains too little.
    """
    if len(raw) < SMALLEST:
        return RAW, None
    encoding = PLANES if spec.dtype in ("bfloat16", "float16", "float32") else ZSTD
    if len(raw) > 2 * SAMPLE:
        sample = _middle(raw, SAMPLE)
        if len(_compress(spec, encoding, sample)) * LEAST_GAIN > len(sample):
            return RAW, None
    stored = _compress(spec, encoding, raw)
    if len(stored) * LEAST_GAIN > len(raw) or len(stored) * MOST_GAIN < len(raw):
        return RAW, None
    return encoding, stored


class Decoded:
    """A stack of tensors: ``parts`` in its shape, the whole in one or its planes, lowest first."""

    def __init__(self, spec: TensorSpec, parts: list[Host]) -> None:
        self._spec = spec
        self._parts = [part.reshape(spec.shape) for part in parts]

    def read(self, number: int) -> Host:
        """That tensor in its host dtype: a view of the stored bytes where they are raw."""
        if len(self._parts) == 1:
            return self._parts[0][number : number + 1].reshape(self._spec.shape[1:])
        out = np.empty(self._spec.shape[1:], self._spec.host_dtype)
        self.copy_into(out, number, ())
        return out

    def copy_into(self, out: Host, number: int, rows: tuple[slice, ...]) -> None:
        """Write the part ``rows`` of that tensor into ``out``, of its dtype and shape."""
        index: tuple[Any, ...] = (number, *rows)
        if len(self._parts) == 1:
            out[...] = self._parts[0][index]
        else:
            _join([part[index] for part in self._parts], out)


def decode(spec: TensorSpec, encoding: int, stored: Host) -> Decoded:
    """The stack ``spec``, whose first axis counts its tensors.

    Raises ``CorruptFrame``, before allocating, where the stored bytes are of another size.
    """
    if encoding == PLANES:
        return Decoded(spec, _planes(spec, stored))
    plain = stored if encoding == RAW else _expand(spec, stored, spec.nbytes)
    return Decoded(spec, [plain.view(spec.host_dtype)])


def _compress(spec: TensorSpec, encoding: int, raw: Host) -> bytes:
    if encoding == ZSTD:
        return _compressor(ZSTD).compress(raw.data)
    words = raw.view(f"<u{spec.itemsize}")
    planes = []
    for i in range(spec.itemsize):
        plane = np.empty(len(words), np.uint8)
        np.right_shift(words, 8 * i, out=plane, casting="unsafe")
        planes.append(_compress_plane(plane))
    sizes = struct.pack(f"<{len(planes)}I", *map(len, planes))
    return b"".join((sizes, *planes))


def _compress_plane(plane: Host) -> bytes | memoryview:
    compress = _compressor(PLANES).compress
    sample = _middle(plane, PLANE_SAMPLE)
    if len(plane) > 2 * PLANE_SAMPLE and not _gains(compress(sample.data), sample):
        return plane.data
    stored = compress(plane.data)
    return stored if _gains(stored, plane) else plane.data


def _gains(stored: bytes, plane: Host) -> bool:
    return len(stored) * LEAST_PLANE_GAIN <= len(plane)


def _middle(data: Host, size: int) -> Host:
    """About ``size`` bytes from the middle of ``data``, at a multiple of 8."""
    start = max(0, len(data) - size) // 2 // 8 * 8
    return data[start : start + size]


def _planes(spec: TensorSpec, stored: Host) -> list[Host]:
    """The planes of a stack, lowest first; views of ``stored`` where they are raw."""
    table = struct.Struct(f"<{spec.itemsize}I")
    length = spec.nbytes // spec.itemsize
    if len(stored) < table.size:
        raise CorruptFrame(f"{spec.name}: {len(stored)} bytes hold no planes")
    sizes = table.unpack_from(stored.data)
    if table.size + sum(sizes) != len(stored):
        raise CorruptFrame(f"{spec.name}: the planes are of another size")
    planes = []
    at = table.size
    for size in sizes:
        part = stored[at : at + size]
        planes.append(part if size == length else _expand(spec, part, length))
        at += size
    return planes


def _join(planes: list[Host], out: Host) -> None:
    words = out.view(f"<u{out.itemsize}")
    words[...] = planes[-1]
    for plane in planes[-2::-1]:
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)


def _expand(spec: TensorSpec, stored: Host, size: int) -> Host:
    """The ``size`` bytes of one zstd frame; any other size is refused before it is allocated."""
    try:
        claimed = zstandard.get_frame_parameters(stored[:32].tobytes()).content_size
        if claimed != size:
            raise CorruptFrame(f"{spec.name}: compressed bytes claim {claimed}, {size} are due")
        plain = _decompressor().decompress(stored.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        if "not enough memory" in str(error):  # which is no damage
            raise MemoryError(f"{spec.name}: {error}") from error
        raise CorruptFrame(f"{spec.name}: compressed bytes cannot be read ({error})") from error
    return np.frombuffer(plain, np.uint8)


def _compressor(encoding: int) -> zstandard.ZstdCompressor:
    """This thread's own: the objects must not be shared between threads."""
    kept: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if encoding not in kept:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            LEVEL, **(PLANE_PARAMETERS if encoding == PLANES else {})
        )
        kept[encoding] = zstandard.ZstdCompressor(compression_params=parameters)
    return kept[encoding]


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found
