"""Where the rows of a recipe go: one target for each tensor, filled chunk by chunk.

A restore copies thousands of small blocks, so what is the same for all chunks is worked out
once, and what is stored together is decoded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.codecs.base import Placement, Segment
from kvkeep.errors import CorruptFrame
from kvkeep.persistence.frame import Frame
from kvkeep.prefixstore.recipe import Recipe


@dataclass(frozen=True)
class Target:
    """One row tensor: what it is in a frame, and the memory and slots that it goes to."""

    dtype: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    view: Any
    segments: tuple[Segment, ...]


def fill(targets: Mapping[str, Target], frame: Frame, start: int, stop: int, length: int) -> None:
    """Copy positions ``[start, stop)`` from ``frame``, which holds ``length`` from ``start``.

    Raises ``CorruptFrame`` where the frame holds other tensors than the ``targets`` by name.
    """
    if frame.specs.keys() != targets.keys():
        raise CorruptFrame("a chunk holds other tensors than the recipe says")
    for stack in frame.stacks:
        decoded = frame.decode(stack)
        for number, name in enumerate(stack.names):
            target = targets[name]
            shape = (*target.before, length, *target.after)
            if stack.shape != shape or stack.spec.dtype != target.dtype:
                raise CorruptFrame(f"tensor {name} is not what the recipe says")
            lead = (slice(None),) * len(target.before)
            for position, slot, count in target.segments:
                a, b = max(start, position), min(stop, position + count)
                if a < b:
                    slot += a - position
                    out = target.view[(*lead, slice(slot, slot + b - a))]
                    decoded.copy_into(out, number, (*lead, slice(a - start, b - start)))


def targets_of(
    recipe: Recipe, placements: Sequence[Placement], views: Mapping[str, Any]
) -> list[dict[str, Target]]:
    """The targets of each family of ``recipe`` by tensor, in the memory ``views``."""
    return [
        {
            f"{i}/{spec.name}": Target(
                spec.dtype,
                spec.shape[: spec.axis],
                spec.shape[spec.axis + 1 :],
                views[f"{i}/{spec.name}"],
                tuple(placements[i].segments),
            )
            for i in family.layers
            for spec in recipe.layers[i].rows
        }
        for family in recipe.families
    ]
