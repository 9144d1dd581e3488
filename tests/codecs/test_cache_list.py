from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from kvkeep.codecs import codec_for, codec_named, composite_named
from kvkeep.codecs.base import Composite
from kvkeep.codecs.cache_list import CODEC
from kvkeep.errors import MalformedCache, NewerFormat
from tests.architectures import build
from tests.codecs.contract import Rows, flat, same_bits
from tests.codecs.shuttle import give, take


def rebuilt(cache, p):
    """``cache`` copied out and in, leaf by leaf."""
    codec = codec_for(cache)
    if isinstance(codec, Composite):
        return codec.assemble([rebuilt(inner, p) for inner in codec.children(cache)], {})
    return give(codec, take(codec, cache), p, snapshot=True)


def spelled(cache):
    codec = codec_for(cache)
    if isinstance(codec, Composite):
        return f"{codec.kind}({','.join(spelled(inner) for inner in codec.children(cache))})"
    return codec.kind


def nested(*inner):
    return CacheList(ArraysCache(size=1), CacheList(*inner), KVCache())


def feed(cache, start, count):
    """Update every leaf with the tokens of ``[start, start + count)``."""
    if isinstance(cache, CacheList):
        return [feed(inner, start, count) for inner in cache.caches]
    k, v = Rows().at(start, start + count)
    if isinstance(cache, ArraysCache):
        old = cache[0] if cache[0] is not None else mx.zeros((1, 2, 1, 8), mx.float32)
        cache[0] = old * 0.5 + k.sum(axis=2, keepdims=True)
        return cache[0]
    return cache.update_and_fetch(k, v)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: CacheList(KVCache()), "list(kv)"),
        (lambda: CacheList(KVCache(), KVCache()), "list(kv,kv)"),
        (lambda: CacheList(ArraysCache(size=1), KVCache()), "list(arrays,kv)"),
        (
            lambda: CacheList(ArraysCache(size=1), RotatingKVCache(16, 4)),
            "list(arrays,kv-rotating)",
        ),
        (lambda: CacheList(CacheList(KVCache())), "list(list(kv))"),
        (
            lambda: nested(ArraysCache(size=1), RotatingKVCache(16)),
            "list(arrays,list(arrays,kv-rotating),kv)",
        ),
    ],
)
@pytest.mark.parametrize("tokens", [7, 40])
def test_round_trip_and_continuation(make, kind, tokens):
    live = make()
    feed(live, 0, tokens)
    assert spelled(live) == kind
    again = rebuilt(live, tokens)
    assert spelled(again) == kind
    compared = 0
    for start, count in ((tokens, 1), (tokens + 1, 1), (tokens + 2, 5), (tokens + 7, 1)):
        compared += same_bits(feed(live, start, count), feed(again, start, count))
    assert compared > 0


def test_children_in_a_list_after_a_load():
    live = CacheList(KVCache(), KVCache())
    feed(live, 0, 5)
    loaded = CacheList.from_state(live.state)
    assert isinstance(loaded.caches, list)
    again = rebuilt(loaded, 5)
    assert same_bits(feed(live, 5, 3), feed(again, 5, 3)) > 0


def test_children_are_the_live_ones():
    inner = (KVCache(), KVCache())
    assert CODEC.children(CacheList(*inner)) == inner
    assert CODEC.assemble(inner, {}).caches == inner


@pytest.mark.parametrize("caches", [(), [], None])
def test_refuses_a_list_of_nothing(caches):
    live = CacheList()
    live.caches = caches
    with pytest.raises(MalformedCache, match="holds no caches"):
        CODEC.children(live)
    with pytest.raises(MalformedCache, match="at least one"):
        CODEC.assemble([], {})


def test_is_named_as_a_holder():
    assert composite_named("list", 1) is CODEC
    with pytest.raises(NewerFormat, match="holds other caches"):
        codec_named("list", 1)
    with pytest.raises(NewerFormat, match="holds no other caches"):
        composite_named("kv", 1)


@pytest.mark.parametrize("tokens", [3, 21])
def test_a_real_model_of_lists_goes_on_alike(tokens):
    """falcon_h1: each layer holds recurrent state beside keys and values."""
    model = build("falcon_h1")
    prompt = mx.random.randint(0, 97, (1, 40), key=mx.random.key(2))
    live = model.make_cache()
    mx.eval(model(prompt[:, :tokens], cache=live))
    again = [rebuilt(cache, tokens) for cache in live]
    compared = 0
    for start, stop in ((tokens, tokens + 1), (tokens + 1, tokens + 7), (tokens + 7, tokens + 8)):
        logits = [model(prompt[:, start:stop], cache=caches) for caches in (live, again)]
        compared += same_bits(*logits)
    assert compared == 8 * 97
    assert all(spelled(cache) == "list(arrays,kv)" for cache in again)
    assert len(list(flat([cache.caches for cache in again]))) == 4
