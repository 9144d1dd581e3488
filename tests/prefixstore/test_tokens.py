"""What two prompts share, and how much is read to find that."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.prefixstore.prepare import Prepared
from kvkeep.prefixstore.tokens import common_prefix

few = st.lists(st.integers(0, 1), max_size=6)


@given(few, few, st.integers(0, 3000))
def test_a_common_prefix_is_what_comparing_one_by_one_finds(left, right, before):
    alike = [7] * before
    left, right = alike + left, alike + right
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    assert common_prefix(np.array(left, np.int64), np.array(right, np.int32)) == shared


class Watched(np.ndarray):
    """Ids that count how many of them are compared."""

    compared = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        plain = [np.asarray(x) for x in inputs]
        if ufunc is np.equal:
            Watched.compared += max(x.size for x in plain)
        return getattr(ufunc, method)(*plain, **options)


@pytest.mark.parametrize("shared", [0, 1, 500, 20_000])
def test_long_prompts_that_part_early_are_not_read_to_their_ends(shared):
    left, right = (np.arange(200_000, dtype=np.int64) for _ in range(2))
    right[shared:] += 1
    Watched.compared = 0
    assert common_prefix(left.view(Watched), right) == shared
    assert shared < Watched.compared <= 5 * shared + 300


rows = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 9)).map(
        lambda r: SimpleNamespace(family=r[0], start=r[1], stop=r[1] + r[2])
    ),
    max_size=8,
)


@given(rows, st.integers(0, 40))
def test_a_queued_snapshot_covers_what_its_rows_do_of_the_shared_tokens(rows, shared):
    snapshot = SimpleNamespace(recipe=SimpleNamespace(id=b"mine"))
    prepared = Prepared(snapshot, tuple(rows), None, 0, 0)
    covered = {
        family: {i for start, stop in ranges for i in range(start, stop)}
        for family, ranges in prepared.coverage(b"mine", shared).items()
    }
    for family in (0, 1):
        due = {i for r in rows if r.family == family for i in range(r.start, min(r.stop, shared))}
        assert covered.get(family, set()) == due
    assert prepared.coverage(b"another", shared) == {}
