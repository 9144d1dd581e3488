"""The reuse policy: facts in, a decision out. No I/O, no clock, no state.

A resume at ``p`` is legal when, for every layer of one recipe, the rows that the layer
reads at ``p`` are stored, ``p`` is not below the recipe's floor, and kinds with state have
a resume point exactly at ``p``. The policy answers the largest legal
``p <= min(matched, prompt_tokens - 1)`` over all recipes on the path, and names what kept
it from going further. See docs/policy.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kvkeep.codecs.base import Reach
from kvkeep.prefixstore.ranges import Ranges, covers, merged


class Reason(StrEnum):
    """Why a lookup resumed what it did and not more. Values are a public interface."""

    FULL = "full"
    LAST_TOKEN = "last_token"
    CHUNK_ALIGNED = "chunk_aligned"
    INSIDE_MEDIA = "inside_media"
    NO_PREFIX = "no_prefix"
    BELOW_FLOOR = "below_floor"
    NO_STATE_AT_OFFSET = "no_state_at_offset"
    ROWS_MISSING = "rows_missing"
    BELOW_MINIMUM = "below_minimum"
    CORRUPT = "corrupt"
    NEWER_FORMAT = "newer_format"
    SPACE_CHANGED = "space_changed"
    STORE_FAILED = "store_failed"
    EVICTED = "evicted"
    EXPIRED = "expired"


FAULTS = (Reason.CORRUPT, Reason.NEWER_FORMAT)
"""Why something that is stored must not be used. Where several faults keep a resume from going
further, the first of these that does so by itself names it."""


@dataclass(frozen=True)
class Group:
    """Layers of one recipe that share a kind, a reach, a floor and a row family."""

    layers: tuple[str, ...]
    kind: str
    reach: Reach
    floor: int = 0
    family: int | None = None


@dataclass(frozen=True)
class Point:
    """A resume point: its offset, and the rows that each family must have to resume there.

    ``fault`` is what keeps its state from being used.
    """

    offset: int
    needs: tuple[tuple[int, Ranges], ...] = ()
    fault: Reason | None = None


class Aside(NamedTuple):
    """Positions of a family whose rows are stored and must not be used."""

    fault: Reason
    family: int
    ranges: Ranges


@dataclass(frozen=True)
class Candidate:
    """One recipe on the path, with the rows and resume points stored for it.

    ``coverage[i]`` are the positions of family *i* whose rows are stored and can be used,
    ``aside`` those that cannot. Points are sorted by offset.
    """

    groups: tuple[Group, ...]
    coverage: tuple[Ranges, ...]
    points: tuple[Point, ...] = ()
    aside: tuple[Aside, ...] = ()

    @property
    def floor(self) -> int:
        """The minimum-resumable offset: the maximum over the layers."""
        return max((g.floor for g in self.groups), default=0)

    @property
    def stateful(self) -> bool:
        """Whether any layer resumes only at a snapshot."""
        return any(g.reach.stateful for g in self.groups)

    def without(self, fault: Reason) -> Candidate:
        """The recipe as it would be if nothing of it had ``fault``."""
        if fault not in {*(a.fault for a in self.aside), *(p.fault for p in self.points)}:
            return self
        coverage = list(self.coverage)
        for aside in self.aside:
            if aside.fault is fault:
                coverage[aside.family] = merged((*coverage[aside.family], *aside.ranges))
        return replace(
            self,
            coverage=tuple(coverage),
            points=tuple(replace(p, fault=None) if p.fault is fault else p for p in self.points),
            aside=tuple(a for a in self.aside if a.fault is not fault),
        )


@dataclass(frozen=True)
class LayerLimit:
    """How far these layers alone could have resumed, and what stopped them there."""

    layers: tuple[str, ...]
    kind: str
    offset: int
    reason: Reason


@dataclass(frozen=True)
class Decision:
    """What a lookup may resume.

    ``matched`` tokens of ``prompt_tokens`` are stored; ``offset`` of them can be resumed;
    ``reason`` and ``limits`` say why not more. ``detail`` completes the reason where it has
    a part that varies, such as the field of a space that changed.
    """

    offset: int
    matched: int
    prompt_tokens: int
    reason: Reason
    limits: tuple[LayerLimit, ...] = ()
    detail: str = ""

    @property
    def why(self) -> str:
        """The reason as one word, such as ``space_changed:weights``."""
        return f"{self.reason}:{self.detail}" if self.detail else str(self.reason)

    def __str__(self) -> str:
        kinds = ", ".join(sorted({limit.kind for limit in self.limits}))
        tail = f" ({kinds})" if kinds else ""
        return f"resumed {self.offset:,} of {self.prompt_tokens:,}: {self.why}{tail}"


@dataclass(frozen=True)
class Choice:
    """A decision, and which candidate and resume point carry it out.

    ``point`` is ``None`` where rows alone rebuild the caches, away from a snapshot.
    """

    decision: Decision
    candidate: int | None = None
    point: Point | None = None


@dataclass(frozen=True)
class Weighed:
    """One recipe by itself: where it resumes, and what keeps its layers from ``limit``.

    ``point`` is the resume point that lies there, ``None`` between points.
    """

    offset: int
    point: Point | None
    limits: tuple[LayerLimit, ...]


def decide(
    prompt_tokens: int,
    matched: int,
    candidates: Sequence[Candidate],
    minimum: int = 1,
    step: int = 1,
    forbidden: Ranges = (),
) -> Choice:
    """The largest offset that is really resumable, and why it is not larger.

    ``matched`` is the common prefix of the prompt and the stored path. ``minimum`` is the
    smallest offset that is worth a restore; below it the answer is a miss. Offsets are
    multiples of ``step``, the prefill step of chunk-aligned mode, and never lie in
    ``forbidden``, the insides of images.
    """
    top = min(matched, prompt_tokens - 1)
    grid = _Grid(step, forbidden)
    limit = grid.below(top)
    if limit <= 0:
        reason = grid.reason(matched, top) if matched > 0 else Reason.NO_PREFIX
        return Choice(Decision(0, matched, prompt_tokens, reason))

    offset, index, point = _best(candidates, limit, grid)
    fault = None
    if offset >= limit:
        reason = grid.reason(matched, top)
        limits: tuple[LayerLimit, ...] = ()
    else:
        fault, limits = _faulted(candidates, max(offset, minimum - 1), limit, grid)
        limits = limits or _limits(candidates, index, limit)
        named = (layer.reason for layer in limits if layer.reason not in FAULTS)
        reason = fault or next(named, Reason.ROWS_MISSING)
    if 0 < offset < minimum:
        return Choice(Decision(0, matched, prompt_tokens, fault or Reason.BELOW_MINIMUM, limits))
    decision = Decision(offset, matched, prompt_tokens, reason, limits)
    return Choice(decision, index if offset else None, point)


def weigh(
    prompt_tokens: int,
    matched: int,
    candidate: Candidate,
    step: int = 1,
    forbidden: Ranges = (),
) -> Weighed:
    """What ``decide`` finds of one candidate, for explanations."""
    grid = _Grid(step, forbidden)
    limit = grid.below(min(matched, prompt_tokens - 1))
    offset, point = _resumes(candidate, limit, grid) if limit > 0 else (0, None)
    return Weighed(offset, point, _limits_of(candidate, limit) if offset < limit else ())


@dataclass(frozen=True)
class _Grid:
    """The offsets that are allowed at all, whatever is stored."""

    step: int
    forbidden: Ranges

    def below(self, p: int) -> int:
        """The largest allowed offset that is not above ``p``."""
        before = -1
        while p > 0 and p != before:
            before, p = p, p // self.step * self.step
            for start, stop in self.forbidden:
                if start <= p < stop:
                    p = start - 1
        return max(p, 0)

    def reason(self, matched: int, top: int) -> Reason:
        """Why a resume that had all it asked for did not go beyond ``below(top)``."""
        if self.below(top) == top:
            return Reason.LAST_TOKEN if matched > top else Reason.FULL
        return Reason.CHUNK_ALIGNED if top % self.step else Reason.INSIDE_MEDIA


def reachable(reach: Reach, coverage: Ranges, limit: int) -> int:
    """The largest ``p <= limit`` whose rows are all in ``coverage``; 0 where there is none."""
    if reach.window == 0:
        return limit
    for start, stop in reversed(coverage):
        p = min(limit, stop)
        if p <= start:
            continue
        if covers(coverage, reach.ranges(p)):
            return p
        if start == 0 and reach.window is not None:
            return min(p, reach.window)
    return 0


def _best(
    candidates: Sequence[Candidate], limit: int, grid: _Grid
) -> tuple[int, int, Point | None]:
    """The largest legal offset, the candidate that has it, and its resume point there."""
    best: tuple[int, bool, int, Point | None] = (0, False, -1, None)
    for index, candidate in enumerate(candidates):
        offset, point = _resumes(candidate, limit, grid)
        if offset and (offset, point is not None) > best[:2]:
            best = (offset, point is not None, index, point)
    return best[0], *best[2:]


def _faulted(
    candidates: Sequence[Candidate], offset: int, limit: int, grid: _Grid
) -> tuple[Reason | None, tuple[LayerLimit, ...]]:
    """The fault without which more than ``offset`` could be resumed, and the limits it set."""
    for fault, mended in _mended(candidates):
        more, index, _ = _best(mended, limit, grid)
        if more > offset:
            return fault, _limits_of(candidates[index], limit)
    return None, ()


def _mended(candidates: Sequence[Candidate]) -> Iterator[tuple[Reason, Sequence[Candidate]]]:
    """The candidates with ever less wrong with them, by the fault that is gone last."""
    mended = candidates
    for fault in FAULTS:
        before, mended = mended, [c.without(fault) for c in mended]
        if any(new is not old for new, old in zip(mended, before, strict=True)):
            yield fault, mended


def _resumes(candidate: Candidate, limit: int, grid: _Grid) -> tuple[int, Point | None]:
    """The largest legal offset of one recipe, and the resume point there if it needs one."""
    point = _last_point(candidate, limit, grid)
    interior = _interior(candidate, limit, grid)
    if point is not None and point.offset >= interior:
        return point.offset, point
    return interior, None


def _last_point(candidate: Candidate, limit: int, grid: _Grid) -> Point | None:
    floor = candidate.floor
    for point in reversed(candidate.points):
        fits = floor <= point.offset <= limit and grid.below(point.offset) == point.offset
        if fits and point.fault is None and _whole(candidate, point):
            return point
    return None


def _whole(candidate: Candidate, point: Point) -> bool:
    return all(covers(candidate.coverage[family], needs) for family, needs in point.needs)


def _interior(candidate: Candidate, limit: int, grid: _Grid) -> int:
    if candidate.stateful:
        return 0
    p, before = limit, -1
    while p and p != before:
        before = p
        for group in candidate.groups:
            p = grid.below(reachable(group.reach, _coverage(candidate, group), p))
    return p if p >= candidate.floor else 0


def _coverage(candidate: Candidate, group: Group) -> Ranges:
    return candidate.coverage[group.family] if group.family is not None else ()


def _limits(candidates: Sequence[Candidate], chosen: int, limit: int) -> tuple[LayerLimit, ...]:
    """What stopped the recipe whose rows reach furthest; among equals, the chosen one."""
    if not candidates:
        return ()
    order = sorted(range(len(candidates)), key=lambda index: index != chosen)
    return _limits_of(candidates[max(order, key=lambda i: _rows(candidates[i], limit))], limit)


def _rows(candidate: Candidate, limit: int) -> int:
    """How far the stored rows alone would go, whatever the floor and the state say."""
    return min(reachable(g.reach, _coverage(candidate, g), limit) for g in candidate.groups)


def _limits_of(candidate: Candidate, limit: int) -> tuple[LayerLimit, ...]:
    out: list[LayerLimit] = []
    for group in candidate.groups:
        if limit < group.floor:
            out.append(LayerLimit(group.layers, group.kind, 0, Reason.BELOW_FLOOR))
            continue
        at = _alone(candidate, group, limit)
        if at < limit:
            reason = Reason.NO_STATE_AT_OFFSET if group.reach.stateful else Reason.ROWS_MISSING
            for fault, (mended,) in _mended([candidate]):
                if _alone(mended, group, limit) > at:
                    reason = fault
                    break
            out.append(LayerLimit(group.layers, group.kind, at, reason))
    return tuple(sorted(out, key=lambda x: x.offset))


def _alone(candidate: Candidate, group: Group, limit: int) -> int:
    """How far this group could have resumed if it were the only one."""
    if group.reach.stateful:
        points = (p.offset for p in candidate.points if p.offset <= limit and p.fault is None)
        return max(points, default=0)
    return reachable(group.reach, _coverage(candidate, group), limit)
