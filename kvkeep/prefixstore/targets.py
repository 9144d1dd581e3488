"""Where the rows of a recipe go: one target for each tensor, filled chunk by chunk.

A restore copies thousands of small blocks, so what is the same for all chunks is worked out
once.
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

    name: str
    dtype: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    view: Any
    segments: tuple[Segment, ...]

    def fill(self, frame: Frame, start: int, stop: int, length: int) -> None:
        """Copy positions ``[start, stop)`` from ``frame``, which holds ``length`` from ``start``.

        Raises ``CorruptFrame`` where the frame holds another tensor than this.
        """
        spec = frame.specs.get(self.name)
        if (
            spec is None
            or spec.dtype != self.dtype
            or spec.shape != (*self.before, length, *self.after)
        ):
            raise CorruptFrame(f"tensor {self.name} is not what the recipe says")
        axis = len(self.before)
        lead = (slice(None),) * axis
        for position, slot, count in self.segments:
            a, b = max(start, position), min(stop, position + count)
            if a < b:
                slot += a - position
                out = self.view[(*lead, slice(slot, slot + b - a))]
                frame.copy_into(self.name, out, axis, a - start, b - start)


def targets_of(
    recipe: Recipe, placements: Sequence[Placement], views: Mapping[str, Any]
) -> list[list[Target]]:
    """The targets of each family of ``recipe``, in the memory ``views``."""
    return [
        [
            Target(
                f"{i}/{spec.name}",
                spec.dtype,
                spec.shape[: spec.axis],
                spec.shape[spec.axis + 1 :],
                views[f"{i}/{spec.name}"],
                tuple(placements[i].segments),
            )
            for i in family.layers
            for spec in recipe.layers[i].rows
        ]
        for family in recipe.families
    ]
