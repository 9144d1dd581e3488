"""Live cache lists: cloned, made their own, cut to a prefix, and asked how far they reach.

MLX arrays are functional: a second array object on the same buffer costs nothing, and the
first write through either of them gives it a buffer of its own. Two caches must never hold
the same array *object*, because an in-place update changes what that object stands for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvkeep.codecs.base import Codec, Description, Segment, merged
from kvkeep.prefixstore.policy import Candidate, Group, Point
from kvkeep.prefixstore.recipe import Live, assemble

CONVERSION = "to_quantized"
"""Set on tracked caches (``hooks.precision``); a clone is not tracked."""


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Every cache that holds something itself, in order."""
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if inner is None:
            yield cache
        else:
            yield from leaves(inner)


def clone(caches: Sequence[Any]) -> list[Any]:
    """Fresh caches on the same buffers; what one of them writes the other does not see."""
    return [_rewrapped(cache, copy.copy) for cache in caches]


def own(caches: Sequence[Any]) -> list[Any]:
    """Fresh, evaluated caches whose arrays keep no larger buffer alive.

    A row that was taken out of a batch is a view on the whole batch until then. Runs on the
    thread that made the arrays.
    """
    import mlx.core as mx

    fresh = [_rewrapped(cache, mx.contiguous) for cache in caches]
    mx.eval(list(arrays(fresh)))
    return fresh


def arrays(caches: Sequence[Any]) -> Iterator[Any]:
    """Every array of the caches, each once."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    seen: set[int] = set()
    for leaf in leaves(caches):
        flat: list[tuple[str, Any]] = tree_flatten(vars(leaf))  # type: ignore[assignment]
        for _, value in flat:
            if isinstance(value, mx.array) and id(value) not in seen:
                seen.add(id(value))
                yield value


def nbytes(caches: Sequence[Any]) -> int:
    """The bytes that the arrays of ``caches`` hold, with their room to grow."""
    return sum(array.nbytes for array in arrays(caches))


def candidate(live: Live) -> Candidate:
    """What the policy needs to know of live caches: where they stand, and what they hold."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for layer, (_, _, facts) in zip(live.recipe.layers, live.leaves, strict=True):
        held = merged((s.position, s.position + s.length) for s in facts.held)
        key = (layer.kind, layer.reach, facts.floor or 0, held)
        groups.setdefault(key, []).append(layer.path)
    return Candidate(
        groups=tuple(
            Group(tuple(paths), kind, reach, floor, family)
            for family, ((kind, reach, floor, _), paths) in enumerate(groups.items())
        ),
        coverage=tuple(held for _, _, _, held in groups),
        points=(Point(live.offset),),
    )


def cut(live: Live, offset: int, *, consume: bool) -> list[Any]:
    """The caches at ``offset``, which the policy found to be within their reach.

    With ``consume`` they are the live ones where a trim is right, and ``live`` is not used
    again. Without it they are copies of the rows below ``offset``, and ``live`` stays as it is.
    """
    import mlx.core as mx

    out = []
    for codec, cache, facts in live.leaves:
        if consume and _trims_truly(codec, facts):
            cache.trim(live.offset - offset)
            out.append(cache)
        else:
            fresh = _copied(codec, cache, facts, offset)
            mx.eval(list(arrays([fresh])))
            out.append(fresh)
    return assemble(live.recipe, out)


def _rewrapped(cache: Any, each: Callable[[Any], Any]) -> Any:
    import mlx.core as mx
    from mlx.utils import tree_map

    inner = getattr(cache, "caches", None)
    fresh = copy.copy(cache)
    if inner is not None:
        fresh.caches = type(inner)(_rewrapped(child, each) for child in inner)
        return fresh
    fields = {name: value for name, value in vars(cache).items() if name != CONVERSION}
    mapped = tree_map(lambda x: each(x) if isinstance(x, mx.array) else x, fields)
    vars(fresh).clear()
    vars(fresh).update(mapped)
    return fresh


def _trims_truly(codec: Codec, facts: Description) -> bool:
    """Whether the cache's own ``trim`` leaves what a shorter run would have left."""
    if codec.kind in ("kv", "kv-quant", "kv-turboquant", "kv-paged"):
        return True
    window = facts.reach.window
    whole = facts.held[:1] == (Segment(0, 0, facts.offset or 0),)
    return (
        codec.kind in ("kv-rotating", "kv-rotating-quant")
        and whole
        and (facts.offset or 0) < (window or 0)
    )


def _copied(codec: Codec, cache: Any, facts: Description, offset: int) -> Any:
    import mlx.core as mx

    placement = codec.place(facts.params, None, offset)
    planes = codec.planes(cache)
    made = {}
    for spec in facts.rows:
        source, lead = planes[spec.name], (slice(None),) * spec.axis
        parts = [
            source[(*lead, slice(a, b))]
            for segment in sorted(placement.segments, key=lambda s: s.slot)
            for a, b in _slots(facts.held, segment)
        ]
        room = placement.capacity - sum(part.shape[spec.axis] for part in parts)
        if room:
            parts.append(mx.zeros(spec.sized(room), source.dtype))
        made[spec.name] = mx.concatenate(parts, axis=spec.axis)
    return codec.build(facts.params, None, offset, made, {}, facts.boundary)


def _slots(held: Sequence[Segment], wanted: Segment) -> Iterator[tuple[int, int]]:
    """Where the positions of ``wanted`` lie, in their order."""
    stop = wanted.position + wanted.length
    for s in sorted(held, key=lambda s: s.position):
        a, b = max(s.position, wanted.position), min(s.position + s.length, stop)
        if a < b:
            yield s.slot + a - s.position, s.slot + b - s.position
