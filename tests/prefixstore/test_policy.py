"""The policy against the slow obvious oracle, and its reasons one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.codecs.base import Reach, merged
from kvkeep.prefixstore.policy import (
    FAULTS,
    Aside,
    Candidate,
    Group,
    LayerLimit,
    Point,
    Reason,
    decide,
)

FULL = Reach()
RING = Reach(window=8, keep=2)
STATE = Reach(window=0, stateful=True)


def positions(ranges):
    return {i for start, stop in ranges for i in range(start, stop)}


def oracle(prompt, matched, candidates, step, forbidden, mended=()):
    """Try every offset, from the top, against every position that each layer reads.

    What has a fault among ``mended`` counts as whole.
    """
    for p in range(min(matched, prompt - 1) // step * step, 0, -step):
        if p in positions(forbidden):
            continue
        for candidate in candidates:
            if p < max((g.floor for g in candidate.groups), default=0):
                continue
            stored = [positions(ranges) for ranges in candidate.coverage]
            for fault, family, ranges in candidate.aside:
                stored[family] |= positions(ranges) if fault in mended else set()
            for point in candidate.points:
                if point.offset == p and point.fault in (None, *mended):
                    needs = [(f, positions(ranges)) for f, ranges in point.needs]
                    if all(wanted <= stored[f] for f, wanted in needs):
                        return p
            if any(g.reach.stateful for g in candidate.groups):
                continue
            if all(reads(g.reach, p) <= stored[g.family] for g in candidate.groups):
                return p
    return 0


def reads(reach, p):
    if reach.window is None:
        return set(range(p))
    kept = set(range(min(reach.keep, p)))
    newest = set(range(max(0, p - (reach.window - reach.keep)), p))
    return set(range(p)) if p <= reach.window else kept | newest


ranges = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 16)).map(lambda r: (r[0], r[0] + r[1])), max_size=4
).map(merged)


faults = st.sampled_from([None, None, *FAULTS])


@st.composite
def recipes(draw):
    reaches = draw(st.lists(st.sampled_from([FULL, RING, Reach(window=5), STATE]), min_size=1))
    groups, coverage = [], []
    floor = draw(st.sampled_from([0, 0, 7, 20]))
    for i, reach in enumerate(reaches):
        family = None
        if not reach.stateful:
            family = len(coverage)
            coverage.append(draw(st.one_of(ranges, st.just(((0, draw(st.integers(1, 45))),)))))
        groups.append(Group((str(i),), f"kind{i}", reach, floor, family))
    points = []
    for offset in sorted(draw(st.sets(st.integers(1, 45), max_size=4))):
        needs = tuple(
            (f, draw(st.one_of(ranges, st.just(((0, offset),))))) for f in range(len(coverage))
        )
        points.append(Point(offset, needs, draw(faults)))
    asides = st.builds(Aside, st.sampled_from(FAULTS), st.integers(0, len(coverage) - 1), ranges)
    aside = draw(st.lists(asides, max_size=2)) if coverage else []
    return Candidate(tuple(groups), tuple(coverage), tuple(points), tuple(aside))


@settings(max_examples=600, deadline=None)
@given(
    st.integers(1, 50),
    st.data(),
    st.lists(recipes(), max_size=3),
    st.sampled_from([1, 1, 4]),
    ranges,
    st.sampled_from([1, 1, 12]),
)
def test_the_policy_answers_what_trying_every_offset_answers(
    prompt, data, candidates, step, forbidden, minimum
):
    matched = data.draw(st.integers(0, prompt))
    if step > 1:  # points are stored only between whole steps
        candidates = [
            replace(c, points=tuple(p for p in c.points if p.offset % step == 0))
            for c in candidates
        ]
    choice = decide(prompt, matched, candidates, minimum, step, forbidden)
    best, corrupt, either = (
        p if p >= minimum else 0
        for p in (
            oracle(prompt, matched, candidates, step, forbidden, mended)
            for mended in ((), FAULTS[:1], FAULTS)
        )
    )
    assert choice.decision.offset == best
    assert (choice.decision.reason is Reason.CORRUPT) == (corrupt > best)
    assert (choice.decision.reason is Reason.NEWER_FORMAT) == (either > corrupt == best)
    assert choice.decision.offset <= max(0, min(matched, prompt - 1))
    assert (choice.candidate is None) == (choice.decision.offset == 0)
    if choice.point is not None:
        assert choice.point.offset == choice.decision.offset


@given(st.sampled_from([FULL, RING, Reach(window=5), Reach(window=0)]), st.integers(0, 60))
def test_a_reach_reads_what_the_oracle_says(reach, p):
    wanted = set() if reach.window == 0 else reads(reach, p)
    assert positions(reach.ranges(p)) == wanted


def plain(stop, floor=0):
    return Candidate((Group(("0",), "kv", FULL, floor, 0),), (((0, stop),),))


@pytest.mark.parametrize(
    ("prompt", "matched", "candidates", "minimum", "offset", "reason"),
    [
        (10, 0, [], 1, 0, Reason.NO_PREFIX),
        (1, 1, [plain(1)], 1, 0, Reason.LAST_TOKEN),
        (10, 10, [plain(10)], 1, 9, Reason.LAST_TOKEN),
        (10, 6, [plain(6)], 1, 6, Reason.FULL),
        (10, 6, [plain(4)], 1, 4, Reason.ROWS_MISSING),
        (10, 6, [], 1, 0, Reason.ROWS_MISSING),
        (10, 6, [plain(6, floor=8)], 1, 0, Reason.BELOW_FLOOR),
        (10, 6, [plain(6)], 7, 0, Reason.BELOW_MINIMUM),
        (10, 6, [plain(6)], 6, 6, Reason.FULL),
    ],
)
def test_reasons(prompt, matched, candidates, minimum, offset, reason):
    decision = decide(prompt, matched, candidates, minimum).decision
    assert (decision.offset, decision.reason) == (offset, reason)


def test_state_resumes_only_at_its_points_and_names_the_layers():
    groups = (Group(("0", "2"), "arrays", STATE), Group(("1",), "kv", FULL, 0, 0))
    candidate = Candidate(groups, (((0, 90),),), (Point(30, ((0, ((0, 30),)),)),))
    decision = decide(100, 80, [candidate]).decision
    assert decision.offset == 30
    assert decision.reason is Reason.NO_STATE_AT_OFFSET
    (limit,) = decision.limits
    assert (limit.layers, limit.kind, limit.offset) == (("0", "2"), "arrays", 30)


def put_aside(fault, start, stop, end=90):
    """Rows of all of ``[0, end)``, of which some are put aside."""
    coverage = tuple(r for r in ((0, start), (stop, end)) if r[0] < r[1])
    group = Group(("0",), "kv", FULL, 0, 0)
    return Candidate((group,), (coverage,), (), (Aside(fault, 0, ((start, stop),)),))


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_are_put_aside_name_the_fault_and_not_that_they_are_missing(fault):
    decision = decide(100, 80, [put_aside(fault, 30, 40)]).decision
    assert (decision.offset, decision.reason) == (30, fault)
    assert decision.limits == (LayerLimit(("0",), "kv", 30, fault),)
    assert decide(100, 30, [put_aside(fault, 30, 40)]).decision.reason is Reason.FULL
    assert decide(100, 80, [put_aside(fault, 30, 40), plain(90)]).decision.reason is Reason.FULL


def test_a_fault_that_keeps_nothing_from_being_resumed_is_not_the_reason():
    missing = Candidate(
        (Group(("0",), "kv", FULL, 0, 0), Group(("1",), "kv", FULL, 0, 1)),
        (((0, 30),), ((0, 30), (40, 90))),
        (),
        (Aside(Reason.CORRUPT, 1, ((30, 40),)),),
    )
    decision = decide(100, 80, [missing]).decision
    assert (decision.offset, decision.reason) == (30, Reason.ROWS_MISSING)
    assert [limit.reason for limit in decision.limits] == [Reason.ROWS_MISSING, Reason.CORRUPT]


def test_a_state_that_is_put_aside_names_the_fault():
    points = (Point(20), Point(40, fault=Reason.CORRUPT))
    candidate = Candidate((Group(("0",), "arrays", STATE),), (), points)
    decision = decide(100, 80, [candidate]).decision
    assert (decision.offset, decision.reason) == (20, Reason.CORRUPT)
    assert [(limit.offset, limit.reason) for limit in decision.limits] == [(20, Reason.CORRUPT)]
    assert decide(100, 39, [candidate]).decision.reason is Reason.NO_STATE_AT_OFFSET


def test_what_damage_made_too_short_to_be_worth_it_is_damaged():
    decision = decide(100, 80, [put_aside(Reason.CORRUPT, 5, 8)], minimum=10).decision
    assert (decision.offset, decision.reason) == (0, Reason.CORRUPT)
    decision = decide(100, 7, [put_aside(Reason.CORRUPT, 5, 8)], minimum=10).decision
    assert (decision.offset, decision.reason) == (0, Reason.BELOW_MINIMUM)


def test_a_longer_recipe_that_cannot_be_cut_never_shadows_a_shorter_one():
    long = Candidate((Group(("0",), "arrays", STATE),), (), (Point(90),))
    choice = decide(100, 60, [long, plain(50)])
    assert (choice.decision.offset, choice.candidate) == (50, 1)


def test_an_exact_point_wins_over_rows_alone():
    candidate = Candidate(
        (Group(("0",), "kv-rotating", RING, 0, 0),), (((0, 30),),), (Point(20, ((0, ((4, 20),)),)),)
    )
    choice = decide(40, 20, [candidate])
    assert choice.point is not None
    assert choice.decision.reason is Reason.FULL
