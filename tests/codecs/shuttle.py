"""Copies a live cache out by position, and back in: what a store does, in memory.

Everything passes through unsigned numpy arrays, so that a comparison compares bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.codecs.base import Codec, Description, Meta, dtype_name

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def bits(array: mx.array) -> np.ndarray:
    """The elements as unsigned integers of the same size, copied out."""
    return np.array(array.view(_UNSIGNED[array.itemsize]))


def from_bits(data: np.ndarray, dtype: str) -> mx.array:
    """The array of MLX dtype ``dtype`` whose bits are ``data``."""
    return mx.array(data).view(mx.bool_ if dtype == "bool" else getattr(mx, dtype))


@dataclass(frozen=True)
class Parcel:
    """A cache that was copied out. Rows lie in the order of ``positions``."""

    facts: Description
    meta: Meta
    positions: list[int]
    rows: Mapping[str, np.ndarray]
    tensors: Mapping[str, tuple[str, np.ndarray]]


def take(codec: Codec, cache: Any) -> Parcel:
    """Copy ``cache`` out."""
    facts = codec.describe(cache)
    state = codec.state(cache)
    planes = codec.planes(cache)
    slots = [s.slot + i for s in facts.held for i in range(s.length)]
    return Parcel(
        facts,
        dict(state.meta),
        [s.position + i for s in facts.held for i in range(s.length)],
        {r.name: np.take(bits(planes[r.name]), slots, axis=r.axis) for r in facts.rows},
        {name: (dtype_name(x), bits(x)) for name, x in state.tensors.items()},
    )


def give(codec: Codec, parcel: Parcel, p: int, *, snapshot: bool) -> Any:
    """Rebuild at ``p``, exactly as in a snapshot or from rows alone.

    Slots that hold no position are set to all ones (NaN as a float), so that a codec that reads
    them is found out.
    """
    facts = parcel.facts
    meta = parcel.meta if snapshot else None
    placement = codec.place(facts.params, meta, p)
    where = {position: row for row, position in enumerate(parcel.positions)}
    planes = {}
    for spec in facts.rows:
        rows = np.moveaxis(parcel.rows[spec.name], spec.axis, 0)
        full = np.iinfo(rows.dtype).max
        plane = np.full((placement.capacity, *rows.shape[1:]), full, rows.dtype)
        for segment in placement.segments:
            for i in range(segment.length):
                plane[segment.slot + i] = rows[where[segment.position + i]]
        plane = np.ascontiguousarray(np.moveaxis(plane, 0, spec.axis))
        assert plane.shape == spec.sized(placement.capacity)
        planes[spec.name] = from_bits(plane, spec.dtype)
    tensors = {}
    if snapshot:
        tensors = {name: from_bits(data, dtype) for name, (dtype, data) in parcel.tensors.items()}
    return codec.build(facts.params, meta, p, planes, tensors, facts.boundary)
