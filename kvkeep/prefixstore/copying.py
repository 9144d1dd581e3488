"""New rows on their way out of the live arrays, into the frames that will be written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.codecs.base import Description
from kvkeep.persistence.frame import Draft
from kvkeep.persistence.memory import hosts
from kvkeep.persistence.tensors import TensorSpec
from kvkeep.prefixstore.recipe import Live
from kvkeep.prefixstore.threads import run_all

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
    """One row tensor of a layer: where its rows lie, and the positions that it holds."""

    name: str
    axis: int
    plane: Any
    facts: Description


def copy_rows(
    live: Live, missing: Sequence[Sequence[tuple[int, int]]], extra: Mapping[str, Any]
) -> tuple[RowDraft, ...]:
    """The rows of the ranges in ``missing``, which has a list of chunks for each family.

    ``extra`` goes with every frame. Belongs on the thread that may evaluate the live arrays.
    """
    if not any(missing):
        return ()
    planes = _planes(live)
    rows: list[tuple[RowDraft, list[_Tensor]]] = []
    for index, family in enumerate(live.recipe.families):
        layers = [(i, spec) for i in family.layers for spec in live.recipe.layers[i].rows]
        names = [f"{i}/{spec.name}" for i, spec in layers]
        tensors = [
            _Tensor(name, spec.axis, planes[name], live.leaves[i][2])
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
        for segment in tensor.facts.held:
            a = max(row.start, segment.position)
            b = min(row.stop, segment.position + segment.length)
            if a < b:
                slot = segment.slot + a - segment.position
                there = (*lead, slice(a - row.start, b - row.start))
                out[there] = tensor.plane[(*lead, slice(slot, slot + b - a))]


def _planes(live: Live) -> dict[str, Any]:
    """Zero-copy views on the live arrays, by layer and name. Short-lived, see ``host``."""
    return hosts(
        {
            f"{i}/{name}": array
            for i, (codec, cache, facts) in enumerate(live.leaves)
            if facts.rows
            for name, array in codec.planes(cache).items()
        }
    )
