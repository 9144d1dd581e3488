"""One request out of a batch: its own tokens, no padding, and on like the solo run."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

import kvkeep
from kvkeep.errors import BatchCache, Refused
from tests import architectures
from tests.prefixstore.first_process import bits, step

LENGTHS = (20, 33, 27)
NAMES = ("llama", "gemma3_text", "qwen3_next", "falcon_h1", "mamba2")


def live_batch(model, prompts):
    """The prompts' caches merged into one batch, two decoded tokens further."""
    solo = []
    for prompt in prompts:
        caches = make_prompt_cache(model)
        step(model, caches, prompt)
        solo.append(caches)
    batch = [type(layer[0]).merge(list(layer)) for layer in zip(*solo, strict=True)]
    new = [[1, 2, 3], [4, 5, 6]]
    for tokens in new:
        mx.eval(model(mx.array(tokens)[:, None], cache=batch), [c.state for c in batch])
    return batch, [[*p.tolist(), *(t[i] for t in new)] for i, p in enumerate(prompts)]


def tensors(caches):
    """Every array that the caches hold, without the capacity beyond their offset."""
    out = []
    for cache in caches:
        for inner in getattr(cache, "caches", [cache]):
            if hasattr(inner, "keys"):
                held = inner.offset if inner.keys.shape[2] > inner.offset else None
                out += [inner.keys[..., :held, :], inner.values[..., :held, :]]
            else:
                out += inner.cache
    return [bits(x) for x in out]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_comes_back_as_it_was_extracted_and_merges_like_it(name, tmp_path):
    model = architectures.build(name)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, architectures.VOCAB, n) for n in LENGTHS]
    batch, tokens = live_batch(model, prompts)
    compared = 0
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = store.space(identity={"m": name}, layout=make_prompt_cache(model))
        for row in range(len(LENGTHS)):
            receipt = space.snapshot(tokens[row], batch, row=row)
            assert receipt.stored
            assert receipt.tokens_new == LENGTHS[row] + 2
        hits = [space.resume([*t, 0]) for t in tokens]
        assert [h.offset for h in hits] == [n + 2 for n in LENGTHS]
        for row, hit in enumerate(hits):
            live = kvkeep_row(batch, row)
            for got, wanted in zip(tensors(hit.caches), tensors(live), strict=True):
                assert np.array_equal(got, wanted)
                compared += got.size
        layers = list(zip(*(h.caches for h in hits), strict=True))
        merged = [type(layer[0]).merge(list(layer)) for layer in layers]
        layers = list(zip(*(kvkeep_row(batch, r) for r in range(3)), strict=True))
        reference = [type(layer[0]).merge(list(layer)) for layer in layers]
        for _ in range(4):
            new = mx.array([[7], [8], [9]])
            got, wanted = (bits(model(new, cache=c)) for c in (merged, reference))
            assert np.array_equal(got, wanted)
    assert compared > 0


def kvkeep_row(batch, row):
    from kvkeep.prefixstore.batch import take_row

    return take_row(batch, row)


def test_padding_that_is_still_pending_and_rows_that_are_not_there_are_refused(tmp_path):
    batch = [BatchKVCache([0, 3])]
    batch[0].update_and_fetch(mx.ones((2, 1, 8, 4)), mx.ones((2, 1, 8, 4)))
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = store.space(identity={}, layout=())
        assert space.snapshot(list(range(5)), batch, row=1).tokens_new == 5
        with pytest.raises(Refused, match="Row 2 of a batch of 2"):
            space.snapshot(list(range(5)), batch, row=2)
        batch[0].prepare(right_padding=[0, 1])
        with pytest.raises(BatchCache, match="finalize"):
            space.snapshot(list(range(5)), batch, row=1)
