"""One real store against an oracle that remembers every snapshot and tries every offset."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvkeep
from kvkeep.errors import OffsetMismatch
from tests.prefixstore import shapes
from tests.prefixstore.shapes import BOUNDARIES, KEEP, RINGS, SHAPES, STATEFUL, WINDOW, make

LONGEST = 56
ROOMY, TIGHT = 1 << 30, 20_000
seen: Counter[str] = Counter()

old = {
    "which": st.sampled_from([0, 0, 1]),
    "base": st.integers(0, 20),
    "share": st.sampled_from([0.3, 0.6, 0.8, 1, 1, 1]),
}
few = st.lists(st.sampled_from([0, 0, 1, 2**40]), max_size=6)
many = st.lists(st.sampled_from([0, 0, 1, 2**40]), min_size=8, max_size=30)
KINDS_OF_STEP = {
    "snapshot": {
        **old,
        "tail": st.one_of(few, many),
        "prefill": st.integers(1, LONGEST),
        "boundary": st.sampled_from(BOUNDARIES),
        "shorter": st.sampled_from([0, 0, 0, 1, 6]),
        "wait": st.booleans(),
    },
    "lookup": {**old, "tail": st.one_of(few, few.map(lambda tail: [*tail, 1]))},
    "evict": {"share": st.sampled_from([0, 0.4, 0.7, 0.9])},
    "reopen": {},
}
steps = st.lists(
    st.sampled_from(["snapshot"] * 8 + ["lookup"] * 10 + ["evict", "reopen"]).flatmap(
        lambda do: st.fixed_dictionaries({"do": st.just(do), **KINDS_OF_STEP[do]})
    ),
    min_size=20,
    max_size=50,
)


@dataclass(frozen=True)
class Taken:
    """A snapshot: its tokens, how its caches were fed, and where they were quantized."""

    tokens: tuple[int, ...]
    prefill: int
    boundary: int | None
    held: frozenset[int]
    whole: bool


@dataclass
class Oracle:
    """What was stored for one shape, and the slow obvious answer."""

    shape: str
    taken: list[Taken] = field(default_factory=list)

    def matched(self, tokens):
        return max((common(t.tokens, tokens) for t in self.taken), default=0)

    def best(self, tokens):
        """The largest legal offset, tried one by one against every snapshot."""
        for p in range(min(self.matched(tokens), len(tokens) - 1), 0, -1):
            if any(self.legal(tokens, p, boundary) for boundary in (None, *BOUNDARIES)):
                return p
        return 0

    def legal(self, tokens, p, boundary):
        same = [t for t in self.taken if t.boundary == boundary]
        if any(t.tokens == tokens[:p] for t in same):
            return True
        if p < (boundary or 0) or self.shape in STATEFUL or not same:
            return False
        reach = [common(t.tokens, tokens[:p]) for t in same]
        rings = {i for t, r in zip(same, reach, strict=True) for i in t.held if i < r}
        return (self.shape == "kept" or max(reach) == p) and self.ring_reads(p) <= rings

    def ring_reads(self, p):
        if self.shape not in RINGS:
            return set()
        keep = KEEP if self.shape == "kept" else 0
        return set(range(p)) if p <= WINDOW else {*range(keep), *range(p - WINDOW + keep, p)}

    def first(self, tokens, boundary):
        """The snapshot whose layout a resume of exactly ``tokens`` brings back, if any."""
        same = [t for t in self.taken if t.tokens == tokens and t.boundary == boundary]
        return next((t for t in same if t.whole), None)


class World:
    """A store of two shapes in a folder, their oracles, and random work on them."""

    def __init__(self, folder, budget, names):
        self.path, self.budget = Path(folder) / "store", budget
        self.oracles = [Oracle(name) for name in names]
        self.evicted = budget == TIGHT
        self.open()

    def open(self):
        self.store = kvkeep.open(self.path, max_bytes=self.budget, disk_reserve=1)
        self.spaces = [
            self.store.space(identity={"shape": oracle.shape}, layout=make(oracle.shape, ()))
            for oracle in self.oracles
        ]

    def reopen(self):
        self.store.close()
        self.open()

    def tokens(self, which, base, share, tail):
        """The beginning of something that was stored before, and new tokens."""
        taken = self.oracles[which].taken
        known = taken[-1 - base % len(taken)].tokens if taken else ()
        return (*known[: round(len(known) * share)], *tail)[:LONGEST]

    def snapshot(self, which, base, share, tail, prefill, boundary, shorter, wait):
        oracle, space = self.oracles[which], self.spaces[which]
        tokens = self.tokens(which, base, share, tail)
        if not tokens:
            return
        prefill = min(prefill, len(tokens))
        caches = make(oracle.shape, tokens, prefill, boundary)
        before = bits(caches)
        quantized = boundary if oracle.shape == "delayed" and len(tokens) >= boundary else None
        if oracle.shape == "arrays":  # nothing in them says how many tokens they cover
            shorter = 0
        covered = tokens[: max(1, len(tokens) - shorter)]
        if len(covered) < len(tokens) and not cuttable(oracle, caches, len(covered), quantized):
            with pytest.raises(OffsetMismatch):
                space.snapshot(covered, caches)
            seen["refused"] += 1
            return
        receipt = space.snapshot(covered, caches)
        if not self.evicted:
            assert not wait or receipt.stored, receipt
        elif not receipt.stored:
            seen["not stored"] += 1
            return
        assert receipt.tokens_new + receipt.tokens_known == len(covered)
        assert all(np.array_equal(a, b) for a, b in zip(before, bits(caches), strict=True))
        held = frozenset(i for i in held_by(caches) if i < len(covered))
        oracle.taken.append(Taken(covered, prefill, quantized, held, covered == tokens))
        seen["snapshots"] += 1

    def lookup(self, which, base, share, tail):
        oracle, space = self.oracles[which], self.spaces[which]
        tokens = self.tokens(which, base, share, tail)
        hit = space.resume(tokens)
        best = oracle.best(tokens)
        assert hit.offset == hit.decision.offset
        assert hit.rest == list(tokens[hit.offset :])
        assert (hit.caches is None) == (hit.offset == 0)
        if self.evicted:
            assert hit.offset <= best
            assert hit.decision.matched <= oracle.matched(tokens)
        else:
            assert hit.offset == best, hit.decision
            assert hit.decision.matched == oracle.matched(tokens)
        if hit.caches is None:
            seen["misses"] += 1
            return
        seen["hits"] += 1
        self.check(oracle, tokens[: hit.offset], hit.caches)
        self.two_readers(space, tokens, hit)

    def check(self, oracle, tokens, caches):
        boundary = next(
            (c.minimum_resumable_offset for c in shapes.flat(caches) if hasattr(c, "bits")), None
        )
        assert oracle.legal(tokens, len(tokens), boundary)
        assert not shapes.problem(oracle.shape, tokens, caches, boundary)
        seen["bytes compared"] += sum(x.nbytes for x in bits(caches))
        first = oracle.first(tokens, boundary)
        if first is None or self.evicted:
            return
        live = make(oracle.shape, tokens, first.prefill, boundary)
        for mine, lived in zip(shapes.flat(caches), shapes.flat(live), strict=True):
            if hasattr(lived, "_idx"):
                slots = lived.keys.shape[2] if len(tokens) > WINDOW else len(tokens)
                laid_out = [shapes.held_by_ring(c)[:slots].tolist() for c in (mine, lived)]
                assert laid_out[0] == laid_out[1]
                seen["rings as laid out"] += len(tokens) > WINDOW

    def two_readers(self, space, tokens, hit):
        """Two readers hold the same hit; what one appends, the other never sees."""
        other = space.resume(tokens)
        assert other.offset == hit.offset
        unchanged = bits(other.caches)
        longer = (*tokens[: hit.offset], 5)
        mine = shapes.append(hit.caches, longer)
        assert all(np.array_equal(a, b) for a, b in zip(unchanged, bits(other.caches), strict=True))
        theirs = shapes.append(other.caches, longer)
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def evict(self, share):
        self.store.flush()
        used = self.store.used_bytes
        gone = self.store.evict(to=int(used * share))
        assert self.store.used_bytes == used - gone.bytes <= used * share
        if gone.bytes:
            seen["evictions"] += 1
            self.evicted = True

    def audit(self):
        assert self.store.used_bytes <= self.budget
        found = self.store.verify()
        assert not found.problems, found.problems
        assert self.store.used_bytes <= self.budget


def common(left, right):
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)


def bits(caches):
    """The bits of every array, without the capacity beyond an offset."""
    found = []
    for leaf in shapes.flat(caches):
        for array in shapes.arrays_of(leaf):
            cut = array[..., : leaf.offset, :] if hasattr(leaf, "offset") else array
            found.append(shapes.bits_of(cut))
    return found


def held_by(caches):
    """The positions that every ring holds."""
    rings = [c for c in shapes.flat(caches) if hasattr(c, "_idx")]
    held = [frozenset(shapes.held_by_ring(ring).tolist()) - {-1} for ring in rings]
    return frozenset.intersection(*held) if held else frozenset()


def cuttable(oracle, caches, length, boundary):
    """Whether caches may be handed in with only the first ``length`` of their tokens."""
    for ring in (c for c in shapes.flat(caches) if hasattr(c, "_idx")):
        lost = ring.offset - ring.keys.shape[2]
        if lost > 0 and length < lost + WINDOW:
            return False
    return oracle.shape not in STATEFUL and length >= (boundary or 0)


@pytest.fixture
def tight(small, monkeypatch):
    """Chunks of 16 tokens, and some snapshots that take more than one transaction."""
    monkeypatch.setattr("kvkeep.prefixstore.writer.ONE_TRANSACTION", 12_000)


def work(names, budget, steps):
    with tempfile.TemporaryDirectory() as folder:
        world = World(folder, budget, names)
        try:
            for step in steps:
                arguments = {k: v for k, v in step.items() if k != "do"}
                getattr(world, step["do"])(**arguments)
                world.audit()
        finally:
            world.store.close()


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_store_answers_what_the_oracle_answers(shape, tight):
    seen.clear()
    names = sorted(SHAPES)
    other = names[names.index(shape) - 1]

    @settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from([ROOMY, ROOMY, TIGHT]), steps)
    def run(budget, steps):
        work([shape, other], budget, steps)

    run()
    assert seen["snapshots"] > 40
    assert seen["hits"] > 20
    assert seen["bytes compared"] > 10_000
    if shape in RINGS:
        assert seen["rings as laid out"] > 3
