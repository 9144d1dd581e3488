"""Rebuilding live caches: verified bytes go once, from the map into MLX-owned memory.

Chunks are verified and copied by a few threads while the read transaction is open; the
arrays themselves are made and handed over on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.codecs.base import Meta, Placement
from kvkeep.errors import CorruptFrame, Damaged, NewerFormat
from kvkeep.persistence.encoding import MOST_GAIN
from kvkeep.persistence.environment import Transaction
from kvkeep.persistence.frame import Frame
from kvkeep.persistence.memory import Slab
from kvkeep.persistence.table import Stack
from kvkeep.persistence.tensors import TensorSpec
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.ranges import covers, merged
from kvkeep.prefixstore.recipe import assemble
from kvkeep.prefixstore.records import PointRecord, check_of
from kvkeep.prefixstore.targets import Target, fill, targets_of
from kvkeep.prefixstore.threads import run_ahead, run_all
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
        state = _verified(_value(txn, point.state), point.state, point.check, expect)
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
    targets = targets_of(recipe, placements, slab.views)

    def read(job: tuple[int, Rows]) -> memoryview:
        return _value(txn, job[1].chunk)

    def copy(job: tuple[int, Rows], data: memoryview) -> int:
        family, rows = job
        return _fill(space, held, rows, family, data, targets[family])

    done = run_ahead(read, copy, jobs, txn.parallel_reads)
    if state is not None and point is not None:
        _fill_state(state, slab.views, point.state)
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
    """Nothing is allocated for rows that the stored bytes cannot expand to.

    The sizes are those that the nodes tell: to look at the values would read them.
    """
    stored = min(sum(rows.size for _, rows in jobs), txn.file_bytes())
    due = sum(
        spec.bytes_per_token * segment.length
        for layer, placement in zip(held.recipe.layers, placements, strict=True)
        for spec in layer.rows
        for segment in placement.segments
    )
    if due > stored * MOST_GAIN:
        raise Damaged(f"A recipe claims {due:,} bytes of rows where {stored:,} are stored")


def _fill(
    space: bytes,
    held: Held,
    rows: Rows,
    family: int,
    data: memoryview,
    targets: Mapping[str, Target],
) -> int:
    """Copy one chunk's rows to where they belong; the bytes read."""
    start, stop, chunk, _, check = rows
    expect = {"space": space, "recipe": held.recipe_id, "family": family, "start": start}
    frame = _verified(data, chunk, check, expect)
    end = frame.extra.get("stop")
    if type(end) is not int or end < stop:
        raise BrokenChunk(chunk, "it ends before its rows do")
    try:
        fill(targets, frame, start, stop, end - start)
    except CorruptFrame as error:
        raise BrokenChunk(chunk, error.problem) from error
    return len(data)


def _verified(data: memoryview, chunk: int, check: int, expect: Mapping[str, Any]) -> Frame:
    """The frame in ``data``, whole, the very one meant, and what ``expect`` says."""
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
    return frame


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


def _fill_state(state: Frame, views: Mapping[str, Any], chunk: int) -> None:
    def copy(stack: Stack) -> None:
        decoded = state.decode(stack)
        for number, name in enumerate(stack.names):
            decoded.copy_into(views[name], number, ())

    try:
        run_all(copy, state.stacks)
    except CorruptFrame as error:
        raise BrokenChunk(chunk, error.problem) from error


def _state_tensors(state: Frame | None, layer: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
    if state is None:
        return {}
    prefix = f"{layer}/state/"
    return {
        name.removeprefix(prefix): arrays[name] for name in state.specs if name.startswith(prefix)
    }
