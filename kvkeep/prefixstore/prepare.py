"""The caller's half of a snapshot: what is new is copied out, and nothing else is touched.

Runs on the caller's thread, because MLX arrays may be evaluated only there. Rows go straight
from the live arrays into the frames that will be written (``copying.py``); no buffer of the
cache is held when this returns (I10).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.codecs.base import State, dtype_name
from kvkeep.errors import EmptyCache, OffsetMismatch
from kvkeep.persistence.environment import Transaction
from kvkeep.persistence.frame import Draft
from kvkeep.persistence.memory import hosts, need_mlx
from kvkeep.persistence.tensors import TensorSpec
from kvkeep.prefixstore.copying import RowDraft, copy_rows
from kvkeep.prefixstore.publish import Snapshot
from kvkeep.prefixstore.ranges import (
    Range,
    Ranges,
    covers,
    intersect,
    merged,
    pieces,
    subtract,
    total,
)
from kvkeep.prefixstore.recipe import Layer, Live, read_caches
from kvkeep.prefixstore.tokens import Tokens, common_prefix
from kvkeep.prefixstore.trie import check_path, held_on, walk

STATE_NAME = "{layer}/state/{name}"


@dataclass(frozen=True)
class Prepared:
    """A snapshot that no longer needs the live caches."""

    snapshot: Snapshot
    rows: tuple[RowDraft, ...]
    state: Draft | None
    tokens_new: int
    tokens_known: int

    @property
    def nbytes(self) -> int:
        """Bytes held in memory until it is written."""
        state = self.state.nbytes if self.state is not None else 0
        return sum(row.draft.nbytes for row in self.rows) + state

    def coverage(self, recipe: bytes, shared: int) -> dict[int, Ranges]:
        """The rows that this will have stored of the first ``shared`` tokens, by family."""
        if self.snapshot.recipe.id != recipe:
            return {}
        out: dict[int, list[Range]] = {}
        for row in self.rows:
            if row.start < shared:
                out.setdefault(row.family, []).append((row.start, min(row.stop, shared)))
        return {family: merged(ranges) for family, ranges in out.items()}


def prepare(
    txn: Transaction,
    space: bytes,
    tokens: Tokens,
    caches: Sequence[Any],
    origin: str,
    queued: Sequence[Prepared],
    quarantined: frozenset[int],
) -> Prepared:
    """Describe ``caches``, find the rows that nobody stored before, and copy those out.

    ``queued`` snapshots of the same space count as stored. Raises ``Refused`` before
    anything is copied, ``Damaged`` or ``NewerFormat`` where nothing can be stored behind such a
    record, and ``StoreClosed`` where MLX does not work after a fork.
    """
    need_mlx()
    live = read_caches(caches, len(tokens))
    offset = min(live.offset, len(tokens))
    if offset == 0:
        raise EmptyCache("There are no tokens to store")
    tokens = tokens[:offset]
    exact = offset == live.offset
    states = [codec.state(cache) if exact else None for codec, cache, _ in live.leaves]
    needs = _needs(live, states, offset)

    path = walk(txn, space, tokens)
    check_path(path)
    known: dict[int, Ranges] = {}
    for held in held_on(txn, path, quarantined):
        if held.recipe_id == live.recipe.id:
            known = {family: held.coverage(family) for family in held.chunks}
    matched = path.matched
    for other in queued:
        shared = common_prefix(other.snapshot.tokens, tokens)
        matched = max(matched, shared)
        for family, ranges in other.coverage(live.recipe.id, shared).items():
            known[family] = merged((*known.get(family, ()), *ranges))

    missing = [
        subtract(_held(live, family, offset), known.get(family, ()))
        for family in range(len(live.recipe.families))
    ]
    new = merged(((matched, offset), *(r for ranges in missing for r in ranges)))
    cuts = [node.start for node in path.nodes] + [node.stop for node in path.nodes] + [matched]
    snapshot = Snapshot(space, tokens.copy(), live.recipe, needs, origin, time.time())
    return Prepared(
        snapshot,
        _copy_rows(live, snapshot, missing, cuts),
        _copy_state(snapshot, states),
        total(new),
        offset - total(new),
    )


def _needs(
    live: Live, states: Sequence[State | None], offset: int
) -> tuple[tuple[int, Ranges], ...]:
    """The rows that a resume at ``offset`` reads; refuses caches that do not hold them."""
    out = []
    for index, family in enumerate(live.recipe.families):
        wanted: list[tuple[int, int]] = []
        for i in family.layers:
            codec, _, facts = live.leaves[i]
            state = states[i]
            wanted += codec.needs(facts.params, state.meta if state is not None else None, offset)
        needs = merged(wanted)
        if not covers(_held(live, index, offset), needs):
            raise _mismatch(live, offset, live.recipe.layers[family.layers[0]])
        out.append((index, needs))
    if offset < live.offset:
        for layer, (_, _, facts) in zip(live.recipe.layers, live.leaves, strict=True):
            if facts.reach.stateful or (facts.floor or 0) > offset:
                raise _mismatch(live, offset, layer)
    return tuple(out)


def _mismatch(live: Live, offset: int, layer: Layer) -> OffsetMismatch:
    return OffsetMismatch(
        f"The caches cover {live.offset:,} tokens and {offset:,} were given; "
        f"layer {layer.path} ({layer.kind}) cannot be cut there"
    )


def _held(live: Live, family: int, offset: int) -> Ranges:
    """The positions whose rows every layer of the family holds."""
    held: Ranges = ((0, offset),)
    for i in live.recipe.families[family].layers:
        segments = live.leaves[i][2].held
        held = intersect(held, merged((s.position, s.position + s.length) for s in segments))
    return held


def _copy_rows(
    live: Live, snapshot: Snapshot, missing: Sequence[Ranges], cuts: Sequence[int]
) -> tuple[RowDraft, ...]:
    wanted = [
        list(pieces(ranges, family.chunk_tokens, cuts))
        for ranges, family in zip(missing, live.recipe.families, strict=True)
    ]
    return copy_rows(live, wanted, {"space": snapshot.space, "recipe": snapshot.recipe.id})


def _copy_state(snapshot: Snapshot, states: Sequence[State | None]) -> Draft | None:
    tensors = {
        STATE_NAME.format(layer=i, name=name): array
        for i, state in enumerate(states)
        if state is not None
        for name, array in state.tensors.items()
    }
    metas = [dict(state.meta) if state is not None else {} for state in states]
    if not tensors and not any(metas):
        return None
    specs = [TensorSpec(n, dtype_name(a), tuple(a.shape)) for n, a in tensors.items()]
    specs.sort(key=lambda spec: (spec.dtype, spec.shape, spec.name.rpartition("/")[2]))
    extra = {
        "space": snapshot.space,
        "recipe": snapshot.recipe.id,
        "offset": len(snapshot.tokens),
        "meta": metas,
    }
    draft = Draft(specs, extra)
    for name, view in hosts(tensors).items():
        draft.views[name][...] = view
    return draft
