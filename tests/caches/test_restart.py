"""After a restart: our caches resume at every offset, and go on like those that never stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvkeep
from kvkeep.hooks.live_caches import cut
from kvkeep.prefixstore.recipe import read_caches
from tests.caches import first_process as first
from tests.caches.small import model_of


@pytest.mark.parametrize("scheme", ["turbo:8:3", "turbo:4:5", "paged:16", "paged:7"])
def test_every_offset_resumes_in_another_process(scheme, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", first.__name__, scheme, tmp_path / "s", tmp_path / "out.npz"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record, model, compared = np.load(tmp_path / "out.npz"), model_of("llama"), 0
    with kvkeep.open(tmp_path / "s") as store:
        space = first.open_space(store, model, scheme)
        for p in range(1, first.END + 1):
            hit = space.resume(first.TOKENS[: p + 1])
            assert hit.offset == p, hit.decision
            assert {cache.offset for cache in hit.caches} == {p}
            found = first.goes_on(model, hit.caches, p)
            assert np.array_equal(found, record[str(p)]), p
            compared += found.size
        other = store.space(
            identity={"model": "llama"}, layout=first.make(model, "turbo:8:8")
        ).resume(first.TOKENS)
    assert compared == first.END * sum(first.PLAN) * 97
    # Rows of one scheme are never served under another.
    assert other.offset == 0


@pytest.mark.parametrize("scheme", ["turbo:8:3", "paged:16"])
def test_a_cut_of_live_caches_copies_only_where_they_live_on(scheme):
    model = model_of("llama")
    caches, whole = first.make(model, scheme), first.make(model, scheme)
    for some in (caches, whole):
        first.forward(model, some, 0, 48)
    wanted = first.goes_on(model, [trimmed(cache, 15) for cache in whole], 33)
    for consume in (False, True):
        kept = cut(read_caches(caches, 48), 33, consume=consume)
        assert [a is b for a, b in zip(kept, caches, strict=True)] == [consume] * len(caches)
        assert {cache.offset for cache in caches} == {33 if consume else 48}
        assert np.array_equal(first.goes_on(model, kept, 33), wanted)


def trimmed(cache, n):
    assert cache.trim(n) == n
    return cache
