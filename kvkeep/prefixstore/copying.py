"""New rows on their way out of the live arrays, into the frames that will be written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.codecs.base import Segment
from kvkeep.persistence.frame import Draft
from kvkeep.persistence.memory import hosts
from kvkeep.persistence.tensors import TensorSpec
from kvkeep.prefixstore.recipe import Live
from kvkeep.prefixstore.threads import run_all

if TYPE_CHECKING:
    import mlx.core as mx

SMALL = 512 << 10
"""Bytes that are copied before another thread has woken up to help."""

PIECES = 8
"""Pieces, or more, that a copy is done in, so that all threads end at about the same time."""


@dataclass(frozen=True)
class RowDraft:
    """The rows of one family for ``[start, stop)``, copied out and not yet sealed."""

    family: int
    start: int
    stop: int
    draft: Draft


@dataclass(frozen=True)
class _Tensor:
    """One row tensor of a layer: where its rows lie, and which positions in which slots."""

    name: str
    axis: int
    plane: Any
    held: Sequence[Segment]


def copy_rows(
    live: Live, missing: Sequence[Sequence[tuple[int, int]]], extra: Mapping[str, Any]
) -> tuple[RowDraft, ...]:
    """The rows of the ranges in ``missing``, which has a list of chunks for each family.

    ``extra`` goes with every frame. Belongs on the thread that may evaluate the live arrays.
    """
    if not any(missing):
        return ()
    planes, held = _planes(live, missing)
    rows: list[tuple[RowDraft, list[_Tensor]]] = []
    for index, family in enumerate(live.recipe.families):
        if not missing[index]:
            continue
        layers = [(i, spec) for i in family.layers for spec in live.recipe.layers[i].rows]
        # What is alike in all layers side by side, so that it is compressed together.
        layers.sort(key=lambda row: (row[1].dtype, row[1].shape, row[1].name))
        names = [f"{i}/{spec.name}" for i, spec in layers]
        tensors = [
            _Tensor(name, spec.axis, planes[name], held[i])
            for name, (i, spec) in zip(names, layers, strict=True)
        ]
        axes = [tensor.axis for tensor in tensors]
        specs = {
            length: [
                TensorSpec(name, spec.dtype, spec.sized(length))
                for name, (_, spec) in zip(names, layers, strict=True)
            ]
            for length in {stop - start for start, stop in missing[index]}
        }
        for start, stop in missing[index]:
            more = {"family": index, "start": start, "stop": stop, "axes": axes}
            draft = Draft(specs[stop - start], {**extra, **more})
            rows.append((RowDraft(index, start, stop, draft), tensors))
    pieces = -(-PIECES // len(rows))
    jobs = [(row, some) for row, tensors in rows for some in _parts(tensors, pieces)]
    if sum(row.draft.nbytes for row, _ in rows) <= SMALL:
        for job in jobs:
            _copy(job)
    else:
        run_all(_copy, jobs)
    return tuple(row for row, _ in rows)


def _parts(tensors: Sequence[_Tensor], count: int) -> Iterable[Sequence[_Tensor]]:
    step = max(1, -(-len(tensors) // count))
    return (tensors[at : at + step] for at in range(0, len(tensors), step))


def _copy(job: tuple[RowDraft, Sequence[_Tensor]]) -> None:
    row, tensors = job
    for tensor in tensors:
        out = row.draft.views[tensor.name]
        lead = (slice(None),) * tensor.axis
        for segment in tensor.held:
            a = max(row.start, segment.position)
            b = min(row.stop, segment.position + segment.length)
            if a < b:
                slot = segment.slot + a - segment.position
                there = (*lead, slice(a - row.start, b - row.start))
                out[there] = tensor.plane[(*lead, slice(slot, slot + b - a))]


def _planes(
    live: Live, missing: Sequence[Sequence[tuple[int, int]]]
) -> tuple[dict[str, Any], dict[int, Sequence[Segment]]]:
    """Zero-copy views on the live arrays, by layer and name, and what lies where in a layer's.

    Short-lived, see ``host``.
    """
    found: dict[str, mx.array] = {}
    held: dict[int, Sequence[Segment]] = {}
    for family, ranges in zip(live.recipe.families, missing, strict=True):
        if not ranges:
            continue
        start, stop = min(a for a, _ in ranges), max(b for _, b in ranges)
        for i in family.layers:
            codec, cache, facts = live.leaves[i]
            planes, held[i] = codec.view(cache, facts, start, stop)
            found.update({f"{i}/{name}": array for name, array in planes.items()})
    return hosts(found), held
