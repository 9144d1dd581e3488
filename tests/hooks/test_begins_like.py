from __future__ import annotations

import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.hooks.begins_like import begins_like
from kvkeep.hooks.prefill import prefill
from tests import architectures
from tests.hooks.test_prefill import PROMPT


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1", "qwen3_next"])
def test_caches_of_the_same_model_and_prompt_agree_and_others_do_not(name: str) -> None:
    model, other = architectures.build(name), architectures.build(name, seed=1)
    caches = make_prompt_cache(model)
    prefill(model, PROMPT, caches, step=7)
    assert begins_like(model, PROMPT, caches)
    if name in ("llama", "gemma3_text", "qwen3_next"):
        assert not begins_like(other, PROMPT, caches)
        assert not begins_like(model, PROMPT[::-1], caches)
    else:
        assert begins_like(other, PROMPT, caches), "its plain caches lie inside lists"


def test_caches_of_another_shape_do_not_agree() -> None:
    small, large = architectures.build("llama"), architectures.build("qwen3_next")
    caches = make_prompt_cache(small)
    prefill(small, PROMPT, caches)
    assert not begins_like(large, PROMPT, caches)
