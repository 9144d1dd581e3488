"""A target and its draft: two offsets, resumed together, after mlx-lm's own generation."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep.errors import OffsetMismatch
from tests import architectures

PROMPT = [(7 * i) % architectures.VOCAB for i in range(40)]
COUNT = 24


@pytest.fixture(scope="module")
def models():
    return architectures.build("llama"), architectures.build("llama", seed=1)


def generate(models, prompt, caches, count=COUNT, **options):
    steps = speculative_generate_step(
        mx.array(prompt), *models, max_tokens=count, prompt_cache=caches, **options
    )
    return [int(token) for token, _, _ in steps]


def open_space(store, models):
    target, draft = (make_prompt_cache(m) for m in models)
    return store.space(identity={"m": "pair"}, layout=target, draft_layout=draft)


def test_both_resume_and_go_on_like_the_live_pair(models, tmp_path):
    caches = make_prompt_cache(models[0]) + make_prompt_cache(models[1])
    answer = generate(models, PROMPT, caches)
    key = PROMPT + answer
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = open_space(store, models)
        assert space.snapshot(key, caches, origin="output").stored
        later = [*key, 3, 1, 4]
        hit = space.resume(later)
        assert hit.offset >= len(key) - 1
        assert hit.draft is not None
        assert hit.offset - 2 <= hit.draft_offset <= hit.offset
        assert all(c.offset == hit.draft_offset for c in hit.draft)
        missing = later[hit.draft_offset : hit.offset]
        if missing:
            mx.eval(models[1](mx.array(missing)[None], cache=hit.draft))
        resumed = generate(models, hit.rest, hit.caches + hit.draft)
        cold = make_prompt_cache(models[0]) + make_prompt_cache(models[1])
        assert resumed == generate(models, later, cold)


def test_without_a_draft_cache_the_target_resumes_alone(models, tmp_path):
    target = make_prompt_cache(models[0])
    mx.eval(models[0](mx.array(PROMPT)[None], cache=target))
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = open_space(store, models)
        assert space.snapshot(PROMPT, target).stored
        hit = space.resume([*PROMPT, 1])
    assert (hit.offset, hit.draft, hit.draft_offset) == (len(PROMPT), None, 0)


def test_objects_from_before_a_quantization_are_refused(models, tmp_path):
    caches = make_prompt_cache(models[0]) + make_prompt_cache(models[1])
    options = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}
    answer = generate(models, PROMPT, caches, **options)
    assert caches[0].offset < len(PROMPT) + len(answer) - 1
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        space = open_space(store, models)
        with pytest.raises(OffsetMismatch, match="target's caches stand at"):
            space.snapshot(PROMPT + answer, caches)
        assert not store.conversations()
