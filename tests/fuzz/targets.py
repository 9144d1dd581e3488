"""What is fuzzed. A target takes any bytes and may answer with nothing but our own errors.

Bytes behind a checksum get a right one first, or no mutation would reach what lies behind it.
Everything that decodes takes memory within a bound; ``bounded`` watches it.
"""

from __future__ import annotations

import atexit
import os
import re
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

import msgpack
import numpy as np
import xxhash

from kvkeep.codecs.base import Reach, RowSpec
from kvkeep.errors import CorruptFrame, KvkeepError, NewerFormat
from kvkeep.hooks import prompt_file
from kvkeep.persistence import prompt_file_old as _instrumented  # noqa: F401
from kvkeep.persistence.environment import Environment
from kvkeep.persistence.frame import HEAD, MAGIC, VERSION, Draft, Frame
from kvkeep.persistence.pages import check_pages
from kvkeep.persistence.prompt_file import read_prompt_file as _instrumented_too  # noqa: F401
from kvkeep.persistence.tensors import TensorSpec
from kvkeep.prefixstore import layout, opening, records, writer
from kvkeep.prefixstore.event import Event
from kvkeep.prefixstore.events import Rate
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.policy import decide
from kvkeep.prefixstore.recipe import Layer, Recipe
from kvkeep.prefixstore.records import Node, PointRecord
from kvkeep.prefixstore.restore import BrokenChunk, rebuild
from kvkeep.prefixstore.totals import Totals
from kvkeep.prefixstore.trie import facts_of, walk
from tests.persistence import make_golden

MOST_MEMORY = 512 << 20
"""What one input may add to the largest size that this process ever had. Nested msgpack arrays
reserve up to 64 MiB, a stored byte may expand to 1,024."""

SCRATCH = "KVKEEP_FUZZ_SCRATCH"
SPACE = bytes(16)
RECIPE_ID = b"id of the recipe"
CHUNK_CHECK, STATE_CHECK = 0xC1C2C3C4C5C6C7C8, 0xD1D2D3D4D5D6D7D8
"""Stand for what is known only once everything else is put together."""


@dataclass(frozen=True)
class Target:
    """A decoder: what it does with bytes, and bytes that it accepts."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


@contextmanager
def bounded() -> Iterator[None]:
    """Raise ``AssertionError`` where the block took more memory than any input may."""
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    assert grown < MOST_MEMORY, f"{grown:,} bytes for one input"


def run(name: str, data: bytes) -> None:
    """One input. Raises what the decoder should not have raised."""
    with bounded(), suppress(KvkeepError):
        TARGETS[name].run(data)


# Frames


def _frame(data: bytes) -> None:
    frame = Frame.open(data)
    for name, spec in frame.specs.items():
        frame.read(name)
        if spec.shape:
            shape = (min(2, spec.shape[0]), *spec.shape[1:])
            frame.copy_into(name, np.empty(shape, spec.host_dtype), 0, 0, shape[0])


def _sealed_frame(data: bytes) -> None:
    """Header and payload as they come, behind lengths and a checksum that are right."""
    with suppress(CorruptFrame):
        _frame(as_frame(data, 1))
    _frame(as_frame(data))


def as_frame(data: bytes, version: int = VERSION) -> bytes:
    """A frame around a header, whose length is in the first two bytes, and a payload."""
    size = min(int.from_bytes(data[:2], "little"), len(data[2:]))
    header, payload = data[2 : 2 + size], data[2 + size :]
    padding = bytes(-(HEAD.size + len(header)) % 64)
    head = HEAD.pack(MAGIC, version, 0, len(header), 0, len(payload), 0)[:24]
    rest = header + padding + payload
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + rest)) + rest


def _frame_seeds() -> list[bytes]:
    return [bytes(_draft(length, dtype).seal()) for length in (3, 400) for dtype in _DTYPES]


def _sealed_frame_seeds() -> list[bytes]:
    out = []
    first = [(make_golden.FOLDER / f"{name}.kvkf").read_bytes() for name in ("raw", "compressed")]
    for frame in [*_frame_seeds(), *first]:
        size = HEAD.unpack_from(frame)[3]
        start = -(-(HEAD.size + size) // 64) * 64
        out.append(struct.pack("<H", size) + frame[HEAD.size : HEAD.size + size] + frame[start:])
    return out


_DTYPES = ("bfloat16", "uint32", "float32")


def _draft(length: int, dtype: str = "bfloat16") -> Draft:
    """A chunk of rows that compress, as a snapshot writes it."""
    specs = [TensorSpec(f"0/{n}", dtype, (1, 2, length, 4)) for n in ("k", "v")]
    extra = {"space": SPACE, "recipe": RECIPE_ID, "family": 0, "start": 0, "stop": length}
    draft = Draft(specs, {**extra, "axes": [2, 2]})
    for view in draft.views.values():
        view[...] = np.arange(view.size).reshape(view.shape) % 7
    return draft


# Records


def _node(data: bytes) -> None:
    digest = struct.pack("<Q", xxhash.xxh3_64_intdigest(data[8:]))
    for record in (data, digest + data[8:]):
        with suppress(CorruptFrame, NewerFormat):
            node = records.unpack(layout.node_key(SPACE, 0, 5), record)
            node.chunk_ids()
            [node.recipes[int(i)] for i in node.refs["recipe"]]
            assert records.unpack(node.key, node.pack()).points == node.points


def _node_seeds() -> list[bytes]:
    return [_stored_node(n, points).pack() for n in (1, 300) for points in (0, 3)]


def _stored_node(length: int, points: int, state: int = 3) -> Node:
    tokens = np.arange(5, 5 + length, dtype=np.int64)
    refs = np.zeros(1, records.REF)
    refs["stop"], refs["chunk"], refs["size"], refs["check"] = length, 2, 1000, CHUNK_CHECK
    node = Node(1, layout.node_key(SPACE, 0, 5), 0, tokens, (RECIPE_ID,), refs)
    for number in range(points):
        needs = ((0, ((0, number + 1),)),)
        point = PointRecord(number + 1, 0, "prompt", 1.5, state, 90, STATE_CHECK, needs)
        node = node.with_point(RECIPE_ID, point)
    return node


def _recipe(data: bytes) -> None:
    recipe = Recipe.unpack(data)
    _ = recipe.families, recipe.kinds
    assert Recipe.unpack(recipe.packed).id == recipe.id
    for layer in recipe.layers:
        _ = layer.codec, layer.floor


def _recipe_seeds() -> list[bytes]:
    return [_plain_recipe().packed, _nested_recipe().packed]


def _plain_recipe() -> Recipe:
    rows = tuple(RowSpec(n, "bfloat16", (1, 2, 0, 4)) for n in ("k", "v"))
    return Recipe((Layer("0", "kv", 1, (), None, Reach(), rows),), ("0",))


def _nested_recipe() -> Recipe:
    rows = tuple(RowSpec(n, "bfloat16", (1, 2, 0, 4)) for n in ("k", "v"))
    layers = (
        Layer("0.0", "kv", 1, (), None, Reach(), rows),
        Layer("0.1", "arrays", 1, (("slots", 2),), None, Reach(0, 0, True), ()),
    )
    return Recipe(layers, (("list", ("0.0", "0.1")),))


def _small_records(data: bytes) -> None:
    for unpack in (Event.unpack, Totals.unpack, Rate.unpack, writer._read_pending):
        unpack(data)
    for read in (layout.from_u64, layout.from_pair, layout.from_use_record):
        with suppress(CorruptFrame):
            read(data)
    for read_key in (layout.from_rank_key, layout.from_age_key):
        with suppress(CorruptFrame):
            read_key(data)
    Identity.unpack(data)


def _small_record_seeds() -> list[bytes]:
    identity = {"fields": (("weights", "ab"), ("salt", "cd")), "label": "x", "created": 1.5}
    totals = Totals()
    event = Event("lookup", 1.0, SPACE, "full", prompt=9, matched=5, resumed=5, asked=(1, 2))
    totals.add(event)
    packed = [event.pack(), totals.pack(), Rate(5.0, 2.0).pack(), writer._pending(9)]
    return [*packed, msgpack.packb(identity), layout.u64(5), layout.pair(1, 2)]


# A whole lookup, on records that somebody made up


@cache
def _scratch() -> Path:
    """A folder for the inputs that must be files, in memory where there is such a place."""
    if SCRATCH in os.environ:
        return Path(os.environ[SCRATCH])
    folder = Path(tempfile.mkdtemp(prefix="kvkeep-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _environment() -> Environment:
    return Environment(_scratch() / "store", map_size=1 << 30, databases=layout.DATABASES)


class _Undo(Exception):
    """Ends a transaction without a commit."""


def _lookup(data: bytes) -> None:
    """Three parts with their lengths before them: recipe, node meta, chunk. Then a resume."""
    recipe, rest = _part(data)
    node, rest = _part(rest)
    chunk, state = _part(rest)
    recipe_id = blake2b(recipe, digest_size=16).digest()
    chunk, state = (as_frame(part.replace(RECIPE_ID, recipe_id)) for part in (chunk, state))
    node = node.replace(RECIPE_ID, recipe_id)
    for check, frame in ((CHUNK_CHECK, chunk), (STATE_CHECK, state)):
        for order in ("little", "big"):
            real = records.check_of(frame).to_bytes(8, order)
            node = node.replace(check.to_bytes(8, order), real)
    node = struct.pack("<Q", xxhash.xxh3_64_intdigest(node[8:])) + node[8:]
    tokens = np.arange(5, 400, dtype=np.int64)
    with suppress(_Undo), _environment().begin(write=True) as txn:
        txn.put("recipes", recipe_id, recipe)
        txn.put("nodes", layout.node_key(SPACE, 0, 5), node)
        for number, part in ((2, chunk), (3, state)):
            txn.put("chunks", layout.u64(number), part)
        path = walk(txn, SPACE, tokens)
        facts = facts_of(txn, path, ())
        choice = decide(len(tokens), path.matched, facts.candidates)
        if choice.candidate is not None:
            held = facts.held[choice.candidate]
            at = choice.decision.offset
            point = next((p for p in held.points if p.offset == at), None)
            with suppress(BrokenChunk):
                rebuild(txn, SPACE, held, point if choice.point is not None else None, at)
        raise _Undo


def _part(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:2], "little")
    return data[2 : 2 + size], data[2 + size :]


def _lookup_seeds() -> list[bytes]:
    out = []
    for recipe, state in ((_plain_recipe(), 0), (_nested_recipe(), 3)):
        draft = Draft(
            [TensorSpec("1/state/0", "float32", (1, 4))],
            {"space": SPACE, "recipe": RECIPE_ID, "offset": 2, "meta": [{}, {"none": [1]}]},
        )
        draft.views["1/state/0"][...] = 1
        parts = [recipe.packed, _stored_node(300, 2, state).pack(), _sealed(_draft(300).seal())]
        parts = [struct.pack("<H", len(part)) + part for part in parts]
        out.append(b"".join(parts) + _sealed(draft.seal()))
    return out


def _sealed(frame: memoryview) -> bytes:
    """The input of ``as_frame`` that makes this frame again."""
    size = HEAD.unpack_from(frame)[3]
    start = -(-(HEAD.size + size) // 64) * 64
    return struct.pack("<H", size) + bytes(frame[HEAD.size : HEAD.size + size]) + frame[start:]


# Files


def _prompt_file(data: bytes) -> None:
    file = _scratch() / "prompt.safetensors"
    file.write_bytes(data)
    caches, _ = prompt_file.load(file)
    for loaded in caches:
        _ = loaded.state


def _prompt_header(data: bytes) -> None:
    """A header in JSON as it comes, before as many bytes as it asks for."""
    ends = [int(end) for end in re.findall(rb'offsets"\s*:\s*\[\d+\s*,\s*(\d{1,6})\]', data)]
    size = min(max(ends, default=0), 1 << 18)
    payload = (bytes(range(256)) * (size // 256 + 1))[:size]
    _prompt_file(struct.pack("<Q", len(data)) + data + payload)


def _prompt_file_seeds() -> list[bytes]:
    folder = Path(__file__).parents[1] / "hooks" / "prompt_files"
    return [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]


def _prompt_header_seeds() -> list[bytes]:
    return [data[8 : 8 + int.from_bytes(data[:8], "little")] for data in _prompt_file_seeds()]


def _marker(data: bytes) -> None:
    file = _scratch() / opening.MARKER
    file.write_bytes(data)
    opening._read(file)


def _marker_seeds() -> list[bytes]:
    return [b'{"kvkeep": 1, "map_bytes": 68719476736, "budget": 1000000}', b"[]"]


def _pages(data: bytes) -> None:
    file = _scratch() / "data.mdb"
    file.write_bytes(data)
    for deep in (False, True):
        check_pages(file, deep=deep)


def _page_seeds() -> list[bytes]:
    folder = _scratch() / "seed"
    out = []
    with Environment(folder, map_size=1 << 24, databases=["a", "b"]) as env:
        for length in (4, 900):
            with env.begin(write=True) as txn:
                for number in range(4):
                    txn.put("a", bytes([number]) * 8, bytes(length))
            out.append((folder / "data.mdb").read_bytes())
        with env.begin(write=True) as txn:
            txn.put("b", b"key", bytes(5000))
        out.append((folder / "data.mdb").read_bytes())
    return out


TARGETS = {
    "frame": Target(_frame, _frame_seeds),
    "sealed_frame": Target(_sealed_frame, _sealed_frame_seeds),
    "node": Target(_node, _node_seeds),
    "recipe": Target(_recipe, _recipe_seeds),
    "small_records": Target(_small_records, _small_record_seeds),
    "lookup": Target(_lookup, _lookup_seeds),
    "prompt_file": Target(_prompt_file, _prompt_file_seeds),
    "prompt_header": Target(_prompt_header, _prompt_header_seeds),
    "marker": Target(_marker, _marker_seeds),
    "pages": Target(_pages, _page_seeds),
}
