"""No byte of a frame may be wrong unseen, and nothing that a frame claims is believed first."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard

from kvkeep.errors import CorruptFrame, NewerFormat
from kvkeep.persistence.frame import Draft, Frame
from kvkeep.persistence.tensors import TensorSpec
from tests.persistence.frames import build, floats, row

MIB = 1 << 20


def small_frame() -> bytes:
    specs = [TensorSpec("keys", "bfloat16", (1, 1, 64, 40)), TensorSpec("ids", "int64", (3,))]
    draft = Draft(specs, {"start": 3, "space": b"\x01"})
    draft.views["keys"][...] = floats(specs[0])
    draft.views["ids"][...] = (1, -2, 3)
    return bytes(draft.seal())


def test_every_shorter_and_longer_buffer_is_refused() -> None:
    frame = small_frame()
    assert Frame.open(frame).extra["start"] == 3
    for length in range(len(frame)):
        with pytest.raises(CorruptFrame):
            Frame.open(frame[:length])
    for more in (b"\0", bytes(64), frame):
        with pytest.raises(CorruptFrame):
            Frame.open(frame + more)


def test_every_flipped_byte_is_damage() -> None:
    frame = bytearray(small_frame())
    for i in range(len(frame)):
        for mask in (0x01, 0x80, 0xFF):
            frame[i] ^= mask
            with pytest.raises(CorruptFrame):
                Frame.open(frame)
            frame[i] ^= mask
    Frame.open(frame)


@pytest.mark.parametrize("buffer", [b"", b"KVKF", bytes(64), b"KVKX" + bytes(60)])
def test_other_bytes_are_no_frame(buffer: bytes) -> None:
    with pytest.raises(CorruptFrame):
        Frame.open(buffer)


def test_newer_formats_are_told_apart_from_damage() -> None:
    assert Frame.open(build([])).specs == {}
    assert Frame.open(build([], version=1)).specs == {}
    for newer in (
        build([], version=3),
        build([], version=65535),
        build([], flags=1),
        build([], version=1, flags=1),
    ):
        with pytest.raises(NewerFormat, match="Upgrade"):
            Frame.open(newer)
    for never in (build([], version=0), build([], zero=1)):
        with pytest.raises(CorruptFrame):
            Frame.open(never)


def test_what_builds_well_opens() -> None:
    # The base of every case below: with nothing changed, it is a frame.
    assert Frame.open(build([row()], {}, bytes(64))).read("t").shape == (64,)


WRONG_ROWS: dict[str, Any] = {
    "row too short": [["t"], "uint8", [64], 0, 0],
    "row too long": [*row(), 1],
    "row no list": "t",
    "a row of version 1": ["t", *row()[1:]],
    "no name": row(name=[]),
    "names twice": row(name=["t", "t"], shape=[32]),
    "a name in a list": row(name=["t", ["u"]], shape=[32]),
    "names no list": [{"t": 1}, *row()[1:]],
    "fewer names than the size": row(name=["t", "u"], shape=[31]),
    "more names than the size": row(name=["t", "u", "v"], shape=[32]),
    "name no string": row(name=5),
    "name as bytes": row(name=b"t"),
    "name empty": row(name=""),
    "name too long": row(name="n" * 257),
    "dtype unknown": row(dtype="float8"),
    "dtype no string": row(dtype=None),
    "dtype a list": row(dtype=["uint8"]),
    "shape no list": row(shape=64),
    "shape with a float": row(shape=[64.0]),
    "shape with a bool": row(shape=[True, 64]),
    "shape with a list": row(shape=[[64]]),
    "shape negative": row(shape=[-8, -8]),
    "shape too small": row(shape=[63]),
    "shape too large": row(shape=[65]),
    "shape huge": row(shape=[1 << 62, 1 << 62]),
    "shape huge times zero, nothing stored": row(shape=[1 << 62, 0]),
    "shape of nine axes": row(shape=[1] * 8 + [64]),
    "shape of nine axes in a stack": row(name=["t", "u"], shape=[1] * 8 + [32]),
    "encoding unknown": row(encoding=3),
    "encoding negative": row(encoding=-1),
    "encoding a bool": row(encoding=False),
    "planes of bytes": row(encoding=2),
    "planes of 8 bytes": row(dtype="int64", shape=[8], encoding=2),
    "offset negative": row(offset=-64),
    "offset beyond": row(offset=64),
    "offset with a gap": row(offset=64, shape=[0], size=0),
    "offset a float": row(offset=0.0),
    "size negative": row(size=-64),
    "size beyond": row(shape=[128], size=128),
    "size huge": row(shape=[1 << 40], size=1 << 40),
    "compressed larger than plain": row(shape=[32], encoding=1),
    "compressed to nothing": row(encoding=1, size=0),
    "compressed beyond the factor": row(shape=[64 * 1024 + 1], encoding=1),
}


@pytest.mark.parametrize("what", WRONG_ROWS)
def test_wrong_tables_are_refused(what: str) -> None:
    with pytest.raises(CorruptFrame):
        Frame.open(build([WRONG_ROWS[what]], {}, bytes(64)))


@pytest.mark.parametrize(
    "table",
    [
        [row("a"), row("b")],  # the same bytes
        [row("a"), row("b", offset=32)],  # overlapping
        [row("a", offset=64), row("b")],  # out of order
        [row("a"), row("a", offset=64)],  # one name twice
        [row("a")],  # payload that no tensor has
        [row("a"), row("b", offset=128)],  # a gap, and beyond the end
    ],
)
def test_tensors_must_fill_the_payload_in_order(table: Any) -> None:
    with pytest.raises(CorruptFrame):
        Frame.open(build(table, {}, bytes(128)))
    assert len(Frame.open(build([row("a"), row("b", offset=64)], {}, bytes(128))).specs) == 2


def nested(depth: int, opening: bytes) -> bytes:
    return b"\x92\x90\x81\xa1x" + opening * depth + b"\xc0"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x92\x90",  # ends early
        b"\x92\x90\x80\x00",  # goes on
        msgpack.packb([]),
        msgpack.packb([[], {}, 1]),
        msgpack.packb({"tensors": [], "extra": {}}),
        msgpack.packb([{}, {}]),
        msgpack.packb([[], []]),
        msgpack.packb([[], {1: 2}]),
        msgpack.packb([[], {b"bytes": 2}]),
        msgpack.packb([[], {"x": [{b"bytes": 2}]}]),
        msgpack.packb([[], {"x": msgpack.ExtType(5, b"code")}]),
        msgpack.packb([[], {"x": msgpack.Timestamp(1)}]),
        b"\x92\x90\x81\xa1x\xa2\xff\xff",  # text that is not UTF-8
        b"\x92\x90\x81\x90\x00",  # a key that is a list
        b"\x92\xdd\xff\xff\xff\xff\x80",  # four thousand million tensors
        b"\x92\x90\xdf\xff\xff\xff\xff",  # as many keys
        b"\x92\x90\x81\xa1x\xdb\xff\xff\xff\xff",  # a string of 4 GiB
        b"\x92\x90\x81\xa1x\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
        nested(100_000, b"\x91"),
        nested(100_000, b"\x81\xa1k"),
        nested(2_000, b"\xdd\x00\x00\x40\x00"),  # lists that each claim 16,384 entries
    ],
)
def test_hostile_headers_are_refused_without_large_memory(header: bytes) -> None:
    buffer = build(None, header=header)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFrame):
            Frame.open(buffer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 160 * MIB


def refused_on_reading(dtype: str, shape: tuple[int, ...], encoding: int, stored: bytes) -> int:
    """The peak of memory while such a tensor is refused."""
    frame = Frame.open(build([row("t", dtype, shape, encoding, 0, len(stored))], {}, stored))
    out = np.zeros(shape, frame.specs["t"].host_dtype)
    tracemalloc.start()
    try:
        for attempt in (lambda: frame.read("t"), lambda: frame.copy_into("t", out, 0, 0, shape[0])):
            with pytest.raises(CorruptFrame):
                attempt()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bomb(size: int, *, claims: int | None = None) -> bytes:
    """A zstd frame that expands to ``size`` zeros, and claims another size where given."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, write_content_size=claims is None
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    if claims is None:
        stream = compressor.compressobj(size)
        return b"".join(
            [*(stream.compress(bytes(MIB)) for _ in range(size // MIB)), stream.flush()]
        )
    plain = bytearray(bomb(size))
    assert plain[4] & 0xC0 == 0x80  # a content size of 4 bytes
    start = 5 if plain[4] & 0x20 else 6
    plain[start : start + 4] = claims.to_bytes(4, "little")
    return bytes(plain)


def test_a_bomb_is_refused_before_it_expands() -> None:
    stored = bomb(1 << 30)
    assert len(stored) < 100_000
    # As itself it claims too large a tensor, and as a small tensor it is of another size.
    with pytest.raises(CorruptFrame):
        Frame.open(build([row("t", "uint8", (1 << 30,), 1, 0, len(stored))], {}, stored))
    assert refused_on_reading("uint8", (MIB,), 1, stored) < MIB


def test_a_bomb_with_a_false_size_stops_at_that_size() -> None:
    stored = bomb(1 << 28, claims=MIB)
    assert refused_on_reading("uint8", (MIB,), 1, stored) < 8 * MIB


def test_a_bomb_inside_a_plane_is_refused() -> None:
    hostile = bomb(1 << 28)
    low = bytes(MIB // 2)
    sizes = len(low).to_bytes(4, "little") + len(hostile).to_bytes(4, "little")
    assert refused_on_reading("bfloat16", (MIB // 2,), 2, sizes + low + hostile) < 2 * MIB


@pytest.mark.parametrize(
    "stored",
    [
        zstandard.compress(bytes(8191)),
        zstandard.compress(bytes(8193)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8192)),
        zstandard.compress(bytes(8192)) * 2,
        zstandard.compress(bytes(8192)) + b"\0",
        zstandard.compress(np.random.default_rng(0).bytes(4096) + bytes(4096))[:-1],
        b"\x00" * 64,
        b"\x28\xb5\x2f\xfd" + bytes(4),
    ],
)
def test_compressed_bytes_must_be_one_frame_of_the_right_size(stored: bytes) -> None:
    refused_on_reading("uint8", (8192,), 1, stored)


def test_planes_must_add_up() -> None:
    plane = zstandard.compress(bytes(4096))
    n = len(plane)

    def table(*sizes: int) -> bytes:
        return b"".join(size.to_bytes(4, "little") for size in sizes)

    good = Frame.open(
        build([row("t", "uint16", (4096,), 2, 0, 8 + 2 * n)], {}, table(n, n) + plane * 2)
    )
    assert not good.read("t").any()
    for stored in (
        table(n, n) + plane * 3,
        table(n, 0) + plane,
        table(0, 0),
        b"\0" * 9,
        table(n, 0xFFFFFFFF) + plane * 2,
        table(4095, n) + bytes(4095) + plane,
    ):
        refused_on_reading("uint16", (4096,), 2, stored)
