"""Rebuilding live caches: verified bytes go once, from the map into MLX-owned memory.

Chunks are verified and copied by a few threads while the read transaction is open; the
arrays themselves are made and handed over on the caller's thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvkeep.codecs.base import Meta, Placement
from kvkeep.errors import CorruptFrame, Damaged, NewerFormat
from kvkeep.persistence.encoding import MOST_GAIN
from kvkeep.persistence.environment import Transaction
from kvkeep.persistence.frame import Frame
from kvkeep.persistence.memory import Slab
from kvkeep.persistence.tensors import TensorSpec
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.ranges import covers, merged
from kvkeep.prefixstore.recipe import assemble
from kvkeep.prefixstore.records import PointRecord, check_of
from kvkeep.prefixstore.trie import Held, Rows


class BrokenChunk(Exception):
    """A stored frame cannot be used. ``newer`` is one of a newer format: kept, not damaged."""

    def __init__(self, chunk: int, reason: str, *, newer: bool = False) -> None:
        super().__init__(reason)
        self.chunk = chunk
        self.newer = newer


@dataclass(frozen=True)
class Rebuilt:
    """The caches, and the stored bytes that were read for them."""

    caches: list[Any]
    bytes_read: int


def rebuild(
    txn: Transaction, space: bytes, held: Held, point: PointRecord | None, p: int
) -> Rebuilt:
    """The caches of ``held`` at offset ``p``, exactly as snapshot where ``point`` is given.

    Raises ``BrokenChunk`` for the first frame that cannot be used, and ``Damaged`` where
    what was rebuilt does not stand at ``p``.
    """
    recipe = held.recipe
    metas: list[Meta | None] = [None] * len(recipe.layers)
    state: Frame | None = None
    if point is not None and point.state:
        expect = {"space": space, "recipe": recipe.id, "offset": p}
        state, _ = _open(txn, point.state, point.check, expect)
        metas = list(_metas(state, len(recipe.layers), point.state))
    params = [dict(layer.params) for layer in recipe.layers]
    placements = [
        layer.codec.place(params[i], metas[i], p) for i, layer in enumerate(recipe.layers)
    ]
    jobs = _jobs(held, placements)
    _check_claim(txn, held, placements, jobs)
    slab = Slab(
        [
            TensorSpec(f"{i}/{spec.name}", spec.dtype, spec.sized(placements[i].capacity))
            for i, layer in enumerate(recipe.layers)
            for spec in layer.rows
        ]
        + (list(state.specs.values()) if state is not None else [])
    )
    done = list(_pool().map(lambda job: _fill(txn, space, held, placements, slab, *job), jobs))
    if state is not None and point is not None:
        for name in state.specs:
            slab.views[name][...] = _read(state, name, point.state)
    arrays = slab.take()
    leaves = [
        layer.codec.build(
            params[i],
            metas[i],
            p,
            {spec.name: arrays[f"{i}/{spec.name}"] for spec in layer.rows},
            _state_tensors(state, i, arrays),
            layer.boundary,
        )
        for i, layer in enumerate(recipe.layers)
    ]
    for layer, leaf in zip(recipe.layers, leaves, strict=True):
        offset = getattr(leaf, "offset", p)
        if offset != p:
            raise Damaged(f"Layer {layer.path} ({layer.kind}) came back at {offset}, not {p}")
    return Rebuilt(assemble(recipe, leaves), sum(done))


def _jobs(held: Held, placements: list[Placement]) -> list[tuple[int, Rows]]:
    """The chunks to read, with their families."""
    jobs = []
    for index, family in enumerate(held.recipe.families):
        wanted = merged(
            (s.position, s.position + s.length)
            for i in family.layers
            for s in placements[i].segments
        )
        coverage = held.coverage(index)
        if not covers(coverage, wanted):
            raise Damaged(f"Rows of family {index} are missing; the policy should have known")
        jobs += [
            (index, rows)
            for rows in held.chunks.get(index, ())
            if any(rows.start < b and a < rows.stop for a, b in wanted)
        ]
    return jobs


def _check_claim(
    txn: Transaction,
    held: Held,
    placements: list[Placement],
    jobs: list[tuple[int, Rows]],
) -> None:
    """Nothing is allocated for rows that the stored bytes cannot expand to."""
    stored = sum(len(_value(txn, rows.chunk)) for _, rows in jobs)
    due = sum(
        spec.bytes_per_token * segment.length
        for layer, placement in zip(held.recipe.layers, placements, strict=True)
        for spec in layer.rows
        for segment in placement.segments
    )
    if due > stored * MOST_GAIN:
        raise Damaged(f"A recipe claims {due:,} bytes of rows where {stored:,} are stored")


def _fill(
    txn: Transaction,
    space: bytes,
    held: Held,
    placements: list[Placement],
    slab: Slab,
    family: int,
    rows: Rows,
) -> int:
    """Copy one chunk's rows to where they belong; the bytes read."""
    start, stop, chunk, check = rows
    expect = {"space": space, "recipe": held.recipe_id, "family": family, "start": start}
    frame, size = _open(txn, chunk, check, expect)
    for i in held.recipe.families[family].layers:
        for spec in held.recipe.layers[i].rows:
            name = f"{i}/{spec.name}"
            found = frame.specs.get(name)
            end = frame.extra.get("stop")
            length = end - start if type(end) is int else -1
            if (
                found is None
                or length < 0
                or (found.dtype, found.shape) != (spec.dtype, spec.sized(length))
                or length < stop - start
            ):
                raise BrokenChunk(chunk, f"tensor {name} is not what the recipe says")
            lead = (slice(None),) * spec.axis
            for segment in placements[i].segments:
                a = max(start, segment.position)
                b = min(stop, segment.position + segment.length)
                if a < b:
                    slot = segment.slot + a - segment.position
                    out = slab.views[name][(*lead, slice(slot, slot + b - a))]
                    try:
                        frame.copy_into(name, out, spec.axis, a - start, b - start)
                    except CorruptFrame as error:
                        raise BrokenChunk(chunk, error.problem) from error
    return size


def _open(txn: Transaction, chunk: int, check: int, expect: Mapping[str, Any]) -> tuple[Frame, int]:
    """A verified frame that is the very one meant and what ``expect`` says, and its bytes."""
    data = _value(txn, chunk)
    try:
        frame = Frame.open(data)
    except NewerFormat as error:
        raise BrokenChunk(chunk, error.problem, newer=True) from error
    except CorruptFrame as error:
        raise BrokenChunk(chunk, error.problem) from error
    if check_of(data) != check:
        raise BrokenChunk(chunk, "another frame lies in its place")
    for key, value in expect.items():
        if frame.extra.get(key) != value:
            raise BrokenChunk(chunk, f"the record belongs to another {key}")
    return frame, len(data)


def _value(txn: Transaction, chunk: int) -> memoryview:
    """The stored bytes of a frame, as they are."""
    try:
        data = txn.get("chunks", layout.u64(chunk))
    except Damaged as error:
        raise BrokenChunk(chunk, error.problem) from error
    if data is None:
        raise BrokenChunk(chunk, "the record is missing")
    return data


def _metas(state: Frame, layers: int, chunk: int) -> list[Meta]:
    """What the state says of each layer; its tensors belong to those layers."""
    metas = state.extra.get("meta")
    if type(metas) is not list or len(metas) != layers or any(type(m) is not dict for m in metas):
        raise BrokenChunk(chunk, "the state lists other layers than the recipe")
    owners = {str(i) for i in range(layers)}
    for name in state.specs:
        layer, kind, _ = (*name.split("/", 2), "", "")[:3]
        if layer not in owners or kind != "state":
            raise BrokenChunk(chunk, f"the state holds a tensor {name[:80]!r} of no layer")
    return metas


def _read(state: Frame, name: str, chunk: int) -> Any:
    try:
        return state.read(name)
    except CorruptFrame as error:
        raise BrokenChunk(chunk, error.problem) from error


def _state_tensors(state: Frame | None, layer: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
    if state is None:
        return {}
    prefix = f"{layer}/state/"
    return {
        name.removeprefix(prefix): arrays[name] for name in state.specs if name.startswith(prefix)
    }


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that verify and copy; more than cores, since cold pages make them wait."""
    return ThreadPoolExecutor(min(8, 4 * (os.cpu_count() or 1)), "kvkeep-read")
