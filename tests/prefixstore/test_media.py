"""Prompts with images: never taken for each other, never resumed inside one."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import kvkeep
from kvkeep import Reason
from kvkeep.errors import BadTokens
from kvkeep.prefixstore.tokens import as_tokens, insides

PLACEHOLDER = 50
PROMPT = [1, 2, 3, *[PLACEHOLDER] * 6, 4, 5]


def key(content):
    return kvkeep.media_tokens(PROMPT, [(3, 9, content)])


def caches(tokens):
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, tokens, 4)), mx.ones((1, 1, tokens, 4)))
    return [cache]


@pytest.fixture
def space(tmp_path):
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        yield store.space(identity={}, layout=caches(1))


def test_the_same_placeholders_with_another_image_never_match(space):
    assert space.snapshot(key(b"a cat"), caches(11)).stored
    same, other = space.explain(key(b"a cat")), space.explain(key(b"a dog"))
    assert (same.matched, same.offset) == (11, 10)
    assert (other.matched, other.offset) == (3, 3)
    assert space.explain(PROMPT).matched == 3


def test_an_image_is_resumed_whole_or_not_at_all(space):
    tokens = key(b"a cat")
    assert space.snapshot(tokens[:7], caches(7)).stored
    decision = space.explain(tokens)
    assert (decision.matched, decision.offset) == (7, 3)
    assert decision.reason is Reason.INSIDE_MEDIA
    assert space.resume(tokens).rest == tokens[3:]
    assert space.snapshot(tokens, caches(11)).stored
    assert space.explain([*tokens[:9], 77, 78]).offset == 9


def test_runs_of_text_are_not_images():
    assert insides(as_tokens([5, 5, 5, -1, 3])) == ()
    assert insides(as_tokens([-5, -5, -5, 2, -7, -7, -8, -8, -8])) == ((1, 3), (5, 6), (7, 9))


def test_position_and_content_make_the_id_and_a_range_must_fit():
    here = kvkeep.media_tokens(PROMPT, [(3, 9, b"x")])
    there = kvkeep.media_tokens(PROMPT, [(2, 9, b"x")])
    assert len(set(here[3:9])) == 1
    assert here[3] != there[3]
    assert min(here) < 0
    assert np.array(here).dtype == np.int64
    with pytest.raises(BadTokens, match="Media at"):
        kvkeep.media_tokens(PROMPT, [(5, 30, b"x")])
