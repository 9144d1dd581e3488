from __future__ import annotations

import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from kvkeep.caches.delayed import DelayedKVCache
from kvkeep.codecs import codec_for, composite_named
from kvkeep.codecs.delayed import CODEC
from kvkeep.errors import CorruptFrame, MalformedCache
from kvkeep.prefixstore.recipe import Recipe, assemble, kind_tree, read_caches
from tests.codecs.contract import Rows, same_bits
from tests.codecs.shuttle import give, take

WIDE = Rows(k_width=64, v_width=32)
SOURCES = {
    "kv": KVCache,
    "kv-rotating": lambda: RotatingKVCache(16, 4),
    "kv-chunked": lambda: ChunkedKVCache(16),
}


def delayed(source="kv", start=12, **flags):
    return DelayedKVCache(4, 32, start, source=SOURCES[source](), **flags)


def feed(cache, count):
    if type(cache.caches[0]).__name__.startswith("Chunked"):
        cache.maybe_trim_front()
    return cache.update_and_fetch(*WIDE.at(cache.offset, cache.offset + count))


def rebuilt(cache, p=None):
    inner = CODEC.children(cache)[0]
    codec = codec_for(inner)
    child = give(codec, take(codec, inner), p or cache.offset, snapshot=p is None)
    return CODEC.assemble([child], CODEC.params(cache))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("counts", [(5,), (5, 6), (5, 7), (30,), (12, 1, 1), (3, *(1,) * 30)])
@pytest.mark.parametrize("plan", [(1,) * 12, (5, 1, 9)])
def test_continues_like_the_live_cache(source, counts, plan):
    """Before the conversion, at it and after it; so it converts at the same place."""
    live, undisturbed, compared = delayed(source), delayed(source), 0
    for count in counts:
        feed(live, count)
        feed(undisturbed, count)
    again = rebuilt(live)
    assert again.converted == live.converted == (sum(counts) >= 12)
    for count in plan:
        first, *others = [feed(cache, count) for cache in (undisturbed, live, again)]
        compared += sum(same_bits(first, other) for other in others)
        assert again.kind == undisturbed.kind == f"delayed({source},{source}-quant)"
        assert again.minimum_resumable_offset == undisturbed.minimum_resumable_offset
        assert hasattr(again, "bits") == hasattr(undisturbed, "bits")
    assert again.converted
    assert compared > 0


@pytest.mark.parametrize("source", SOURCES)
def test_kind_and_layout_are_the_same_on_both_sides(source):
    cache = delayed(source)
    kinds = [kind_tree([cache])]
    for count in (5, 20):
        feed(cache, count)
        recipe = read_caches([cache], cache.offset).recipe
        kinds += [kind_tree([cache]), recipe.kinds]
        assert Recipe.unpack(recipe.packed) == recipe
    assert set(kinds) == {(f"delayed({source},{source}-quant)",)}


def test_a_recipe_holds_what_it_was_made_with():
    cache = delayed(start=12, dense=True, lent=True)
    feed(cache, 5)
    recipe = read_caches([cache], 5).recipe
    assert dict(recipe.layers[0].params) == {
        "delayed.bits": 4,
        "delayed.group_size": 32,
        "delayed.start": 12,
        "delayed.dense": True,
        "delayed.lent": True,
    }
    [again] = assemble(recipe, cache.caches)
    assert (again.start, again.dense, again.lent) == (12, True, True)
    assert read_caches([again], 5).recipe == recipe
    other = delayed(start=13, dense=True, lent=True)
    feed(other, 5)
    assert read_caches([other], 5).recipe.id != recipe.id


@pytest.mark.parametrize(
    ("source", "tokens", "expected"),
    [
        ("kv", 5, "e62e3725899744db25a29ddb45a4dace"),
        ("kv", 20, "909d8cc5c5542e09cfe85c0763f38765"),
        ("kv-rotating", 5, "71b9345ad230a7b696962c24f888d2ea"),
        ("kv-rotating", 20, "c9f1748fac09b2da4ddb3b54a9d5042f"),
        ("kv-chunked", 20, "c53228cb12feaa58ea7b2282a3d7de78"),
    ],
)
def test_records_of_a_release_stay_as_they_are(source, tokens, expected):
    """The id of a stored recipe. It is never changed here: stores hold it."""
    cache = delayed(source)
    feed(cache, tokens)
    assert read_caches([cache], tokens).recipe.id.hex() == expected


def test_an_unknown_holder_keeps_its_spelling():
    """A recipe of a later version is shown, and refused only where it would be rebuilt."""
    cache = delayed()
    feed(cache, 5)
    packed = read_caches([cache], 5).recipe.packed.replace(b"\xa7delayed", b"\xa7belated")
    assert Recipe.unpack(packed).kinds == ("belated(kv)",)


@pytest.mark.parametrize("at", [12, 15])
def test_resumes_from_the_boundary_on(at):
    cache = delayed()
    for count in (5, at - 5, 9):
        feed(cache, count)
    inner = cache.caches[0]
    facts = codec_for(inner).describe(inner)
    assert type(inner) is QuantizedKVCache
    assert (facts.boundary, facts.floor) == (at, at)
    assert rebuilt(cache, at).minimum_resumable_offset == at
    with pytest.raises(MalformedCache, match=f"converted at {at} cannot resume at {at - 1}"):
        rebuilt(cache, at - 1)


@pytest.mark.parametrize("caches", [(), [], None, [KVCache(), KVCache()]])
def test_refuses_a_holder_of_another_number(caches):
    cache = delayed()
    cache.caches = caches
    with pytest.raises(MalformedCache, match="one cache at a time"):
        CODEC.children(cache)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"bits": 7, "group_size": 32, "start": 5},
        {"bits": 4, "group_size": 48, "start": 5},
        {"bits": 4, "group_size": 32, "start": -5},
        {"bits": 4, "group_size": 32, "start": "5"},
    ],
)
def test_refuses_what_was_never_made(params):
    with pytest.raises(MalformedCache):
        CODEC.assemble([KVCache()], params)
    with pytest.raises(MalformedCache, match="one cache at a time"):
        CODEC.assemble([], {"bits": 4, "group_size": 32, "start": 5})


def test_is_named_as_a_holder():
    assert composite_named("delayed", 1) is CODEC
    with pytest.raises(CorruptFrame):
        Recipe.unpack(b"\x90")
