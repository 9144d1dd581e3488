"""Live caches in the hands of a server: cloned, cut, and never tied to one another."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.caches import make
from kvkeep.hooks.live_caches import clone, cut, nbytes, own
from kvkeep.prefixstore.recipe import read_caches
from tests.caches.runs import PROMPT, forward
from tests.conformance import wide

SCHEMES = ("affine:4:32", "affine:4:32@9", "affine:4:32@20", "affine:4:32@1000")


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "falcon_h1", "llama4"])
def model(request):
    return wide.build(request.param)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("copied", [clone, own])
def test_a_copy_goes_on_alone(model, scheme, copied):
    """Neither sees what the other appends, nor its conversion."""
    caches = make(model, scheme)
    forward(model, caches, PROMPT[:11])
    copy, third = copied(caches), copied(caches)
    assert nbytes(copy) > 0
    first = [forward(model, caches, PROMPT[a:b]) for a, b in ((11, 25), (25, 26))]
    other = forward(model, third, PROMPT[30:40])
    second = [forward(model, copy, PROMPT[a:b]) for a, b in ((11, 25), (25, 26))]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(other, first[0][: len(other)])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("consume", [False, True])
def test_a_cut_is_what_a_shorter_run_left(scheme, consume):
    model = wide.build("gemma3_text")
    caches, shorter = make(model, scheme), make(model, scheme)
    forward(model, caches, PROMPT[:11])
    forward(model, shorter, PROMPT[:11])
    floor = max(layer.floor for layer in read_caches(caches, 11).recipe.layers)
    assert floor == (11 if scheme.endswith("@9") else 0)
    p = max(floor, 10)
    less = cut(read_caches(caches, 11), p, consume=consume)
    for cache in shorter:
        cache.trim(11 - p)
    assert [type(cache) for cache in less] == [type(cache) for cache in shorter]
    for a, b in ((p, 24), (24, 25)):
        assert np.array_equal(*(forward(model, c, PROMPT[a:b]) for c in (less, shorter)))
    if scheme == "affine:4:32@20":
        assert {cache.converted for cache in less} == {True}
