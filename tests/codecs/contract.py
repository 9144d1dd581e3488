"""What every codec promises. A kind supplies examples and inherits the tests.

``CodecContract`` holds for every kind, ``RowContract`` for kinds with rows, and
``InPlaceContract`` for kinds that write the next token into room that they already have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache as remembered
from typing import Any, ClassVar

import mlx.core as mx
import msgpack
import numpy as np
import pytest

from kvkeep.codecs import CODECS, codec_for, codec_named
from kvkeep.codecs.base import Codec, Description, Segment, merged
from kvkeep.errors import BatchCache, EmptyCache, MalformedCache
from tests.codecs.shuttle import bits, give, take

PLANS = ((1,) * 20, (5, 1, 1), (1, 1, 7, 1), (40, 1, 3))
"""How many tokens each further update brings."""


@remembered
def _table(name: str, heads: int, width: int, dtype: mx.Dtype) -> mx.array:
    numbers = np.random.default_rng([ord(c) for c in name])
    table = mx.array(numbers.standard_normal((1, heads, 1024, width), np.float32)).astype(dtype)
    mx.eval(table)
    return table


@dataclass(frozen=True)
class Rows:
    """Keys and values that depend on the position alone."""

    heads: int = 2
    k_width: int = 8
    v_width: int = 4
    k_dtype: mx.Dtype = mx.bfloat16
    v_dtype: mx.Dtype = mx.bfloat16
    v_heads: int | None = None

    def at(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        k = _table("k", self.heads, self.k_width, self.k_dtype)
        v = _table("v", self.v_heads or self.heads, self.v_width, self.v_dtype)
        return k[:, :, start:stop], v[:, :, start:stop]


@dataclass(frozen=True)
class Example:
    """A live cache: a blank one, the updates it gets, and what is done to it then."""

    blank: Callable[[], Any]
    counts: tuple[int, ...]
    rows: Rows = field(default_factory=Rows)
    after: Callable[[Any], Any] | None = None
    regrows: bool = False
    """Whether the live cache, too, is cut or copied by its next token."""


def flat(value: Any) -> Iterator[Any]:
    """Arrays and scalars inside nested tuples, lists and dicts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for inner in value:
            yield from flat(inner)
    else:
        yield value


def fingerprint(cache: Any) -> list[Any]:
    """Every attribute: identity and bits of arrays, the values of others."""
    return [
        (id(x), x.dtype, x.shape, bits(x).tobytes()) if isinstance(x, mx.array) else (type(x), x)
        for x in flat(vars(cache))
    ]


def same_bits(left: Any, right: Any) -> int:
    """Assert that both hold the same arrays bit for bit, and count the elements compared."""
    pairs = list(zip(flat(left), flat(right), strict=True))
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.array_equal(bits(a), bits(b))
    return sum(a.size for a, _ in pairs if a is not None)


def _by_slot(facts: Description) -> list[Segment]:
    """The segments in the order in which attention sums."""
    return sorted(facts.held, key=lambda segment: segment.slot)


def worth_trying(low: int, high: int) -> list[int]:
    """Offsets in ``[low, high]``: all of a few, or the ends, the middle and the growth steps."""
    if high - low < 24:
        return list(range(low, high + 1))
    steps = {x for n in range(256, high, 256) for x in (n - 1, n, n + 1)}
    ends = {low, low + 1, (low + high) // 2, high - 1, high}
    return sorted(x for x in steps | ends if low <= x <= high)


class CodecContract:
    codec: ClassVar[Codec]
    attributes: ClassVar[tuple[str, ...]]
    examples: ClassVar[Mapping[str, Example]]
    empty: ClassVar[Mapping[str, Callable[[], Any]]]
    batches: ClassVar[Mapping[str, Callable[[], Any]]]
    malformed: ClassVar[Mapping[str, tuple[Callable[[], Any], str]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, table in {
            "example": self.examples,
            "no_tokens": self.empty,
            "batch": self.batches,
            "broken": self.malformed,
        }.items():
            if name in metafunc.fixturenames:
                assert table, f"{metafunc.cls.__name__} supplies nothing for {name}"
                metafunc.parametrize(name, list(table.values()), ids=list(table))

    def feed(self, example: Example, cache: Any, start: int, count: int) -> Any:
        """Update ``cache`` with the tokens of ``[start, start + count)``; what it returns."""
        return cache.update_and_fetch(*example.rows.at(start, start + count))

    def run(self, example: Example, counts: tuple[int, ...]) -> Any:
        """A blank cache after these updates."""
        cache = example.blank()
        start = getattr(cache, "offset", 0)
        for count in counts:
            self.feed(example, cache, start, count)
            start += count
        return cache

    def live(self, example: Example) -> Any:
        cache = self.run(example, example.counts)
        return cache if example.after is None else example.after(cache)

    def offset(self, example: Example, cache: Any) -> int:
        return cache.offset

    def expected(self, live: Any) -> dict[str, Any]:
        """The attributes that a cache rebuilt from a snapshot of ``live`` must have."""
        return {name: getattr(live, name) for name in self.attributes}

    def follow(self, example: Example, start: int, caches: list[Any], plan: tuple[int, ...]) -> int:
        """Feed all caches alike, and count the elements that they returned alike."""
        compared = 0
        for count in plan:
            first, *others = [self.feed(example, cache, start, count) for cache in caches]
            compared += sum(same_bits(first, other) for other in others)
            start += count
        return compared

    def test_exactly_this_codec_claims_it(self, example: Example) -> None:
        live = self.live(example)
        assert codec_for(live) is self.codec
        assert codec_named(self.codec.kind, self.codec.version) is self.codec
        assert CODECS[self.codec.kind] is self.codec
        assert not self.codec.matches(type("Derived", (type(live),), {})(*_arguments(live)))

    def test_facts_are_plain_data(self, example: Example) -> None:
        live = self.live(example)
        facts, meta = self.codec.describe(live), self.codec.state(live).meta
        assert (facts.kind, facts.version) == (self.codec.kind, self.codec.version)
        for data in (dict(facts.params), dict(meta)):
            assert msgpack.unpackb(msgpack.packb(data)) == data
        for spec in facts.rows:
            assert spec.shape[spec.axis] == 0
            assert spec.shape[0] == 1

    def test_round_trip_at_the_offset(self, example: Example) -> None:
        live = self.live(example)
        facts = self.codec.describe(live)
        rebuilt = give(
            self.codec, take(self.codec, live), self.offset(example, live), snapshot=True
        )
        assert type(rebuilt) is type(live)
        again = self.codec.describe(rebuilt)
        assert replace(again, held=()) == replace(facts, held=())
        assert {name: getattr(rebuilt, name) for name in self.attributes} == self.expected(live)
        compared = same_bits(self.codec.state(live).tensors, self.codec.state(rebuilt).tensors)
        for left, right in zip(_by_slot(facts), _by_slot(again), strict=True):
            assert (left.position, left.length) == (right.position, right.length)
            for name in self.codec.planes(live):
                old, new = self.codec.planes(live)[name], self.codec.planes(rebuilt)[name]
                old = old[:, :, left.slot : left.slot + left.length]
                new = new[:, :, right.slot : right.slot + right.length]
                compared += same_bits(old, new)
        assert compared > 0

    @pytest.mark.parametrize("plan", PLANS, ids=str)
    def test_continues_like_the_live_cache(self, example: Example, plan: tuple[int, ...]) -> None:
        live, undisturbed = self.live(example), self.live(example)
        start = self.offset(example, live)
        rebuilt = give(self.codec, take(self.codec, live), start, snapshot=True)
        assert self.follow(example, start, [undisturbed, live, rebuilt], plan) > 0
        for name in self.attributes:
            assert getattr(rebuilt, name) == getattr(undisturbed, name)

    def test_the_live_cache_is_not_touched(self, example: Example) -> None:
        live = self.live(example)
        mx.eval([x for x in flat(vars(live)) if isinstance(x, mx.array)])
        before = fingerprint(live)
        take(self.codec, live)
        assert fingerprint(live) == before
        assert len(before) > 1

    def test_refuses_an_empty_cache(self, no_tokens: Callable[[], Any]) -> None:
        with pytest.raises(EmptyCache):
            self.codec.describe(no_tokens())

    def test_refuses_a_batch(self, batch: Callable[[], Any]) -> None:
        with pytest.raises(BatchCache, match="extract"):
            self.codec.describe(batch())

    def test_refuses_contradictions(self, broken: tuple[Callable[[], Any], str]) -> None:
        make, problem = broken
        with pytest.raises(MalformedCache, match=problem):
            self.codec.describe(make())


class RowContract(CodecContract):
    def trimmed(self, example: Example, live: Any, p: int) -> Any:
        """``live`` cut to ``p`` by mlx-lm, or ``None`` where mlx-lm's cut is not right."""
        return None

    def test_rows_are_where_the_facts_say(self, example: Example) -> None:
        live = self.live(example)
        facts = self.codec.describe(live)
        planes = self.codec.planes(live)
        assert list(planes) == [spec.name for spec in facts.rows]
        assert facts.offset == live.offset
        positions = [s.position + i for s in facts.held for i in range(s.length)]
        slots = [s.slot + i for s in facts.held for i in range(s.length)]
        assert positions == sorted(set(positions))
        assert len(slots) == len(set(slots))
        assert 0 <= positions[0] <= positions[-1] == facts.offset - 1
        for spec in facts.rows:
            assert planes[spec.name].shape == spec.sized(planes[spec.name].shape[2])
            assert max(slots) < planes[spec.name].shape[2]
        one = [plane[:, :, :1].nbytes for plane in planes.values()]
        assert facts.bytes_per_token == sum(one) > 0

    def test_the_floor_is_what_is_held(self, example: Example) -> None:
        facts = self.codec.describe(self.live(example))
        held = {s.position + i for s in facts.held for i in range(s.length)}
        tried = 0
        for p in range(1, facts.offset + 1):
            needs = self.codec.needs(facts.params, None, p)
            assert needs == merged(facts.reach.ranges(p))
            whole = held.issuperset(i for start, stop in needs for i in range(start, stop))
            allowed = p >= (facts.boundary or 0)
            # The first `keep` positions stay, so that p <= keep would do, too.
            if p > facts.reach.keep:
                assert (whole and allowed) == (p >= facts.floor)
                tried += 1
        assert 0 <= facts.floor <= facts.offset
        assert tried >= facts.offset - facts.reach.keep

    def test_resumes_at_every_legal_offset(self, example: Example) -> None:
        live = self.live(example)
        parcel = take(self.codec, live)
        tried = compared = 0
        for p in worth_trying(max(1, parcel.facts.floor), live.offset):
            cold = self.run(example, (p - getattr(example.blank(), "offset", 0),))
            cut = self.trimmed(example, self.live(example), p)
            for plan in PLANS:
                caches = [give(self.codec, parcel, p, snapshot=False)]
                assert caches[0].offset == p
                caches += [c for c in (_again(cold), _again(cut)) if c is not None]
                compared += self.follow(example, p, caches, plan)
                tried += 1
        assert tried >= len(PLANS)
        assert compared > 0


class InPlaceContract(RowContract):
    def roomy(self) -> tuple[Example, Any]:
        """A cache of large rows with room for the next token."""
        raise NotImplementedError

    def test_the_first_token_does_not_copy_the_cache(self, example: Example) -> None:
        live = self.live(example)
        parcel = take(self.codec, live)
        rebuilt = [
            give(self.codec, parcel, p, snapshot=False)
            for p in worth_trying(max(1, parcel.facts.floor), live.offset)
        ]
        if not example.regrows:
            rebuilt.append(give(self.codec, parcel, live.offset, snapshot=True))
        assert rebuilt
        for cache in rebuilt:
            shapes = [plane.shape for plane in self.codec.planes(cache).values()]
            self.feed(example, cache, cache.offset, 1)
            assert [plane.shape for plane in self.codec.planes(cache).values()] == shapes

    @pytest.mark.parametrize("holding", [False, True])
    def test_a_snapshot_holds_no_buffer(self, holding: bool) -> None:
        example, live = self.roomy()
        self.feed(example, live, live.offset, 1)
        planes = self.codec.planes(live)
        mx.eval(list(planes.values()))
        size = max(plane.nbytes for plane in planes.values())
        del planes
        take(self.codec, live)
        held = [plane[:, :, :8] for plane in self.codec.planes(live).values()] if holding else []
        mx.eval(held)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        self.feed(example, live, live.offset, 1)
        mx.eval(list(self.codec.planes(live).values()))
        copied = mx.get_peak_memory() - before >= size
        # With a view still held MLX copies the plane: the measure can tell.
        assert copied == holding


def _arguments(cache: Any) -> tuple[Any, ...]:
    if hasattr(cache, "max_size"):
        return (cache.max_size,)
    if hasattr(cache, "chunk_size"):
        return (cache.chunk_size,)
    if hasattr(cache, "window_size"):
        return (cache.window_size,)
    return (len(cache.cache),) if hasattr(cache, "cache") else ()


def _again(cache: Any) -> Any:
    """A second cache in the same state, so that several plans can follow from it."""
    if cache is None:
        return None
    copy = type(cache).__new__(type(cache))
    for name, value in vars(cache).items():
        setattr(copy, name, _fresh(value))
    return copy


def _fresh(value: Any) -> Any:
    if isinstance(value, tuple | list):
        inner = [_fresh(x) for x in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    return mx.array(value) if isinstance(value, mx.array) else value
