"""Whether caches from elsewhere are what they are said to be: of this model, of this prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvkeep.hooks.prefill import prefill

TOLERANCE = 0.25
"""Of the rows' norm. Another chunking changes low bits; another prompt changes all of them."""


def begins_like(model: Any, tokens: Sequence[int], caches: Sequence[Any], count: int = 32) -> bool:
    """Whether ``model`` computes, for the first ``count`` tokens, the keys that ``caches`` hold.

    Compares the first plain cache, loosely. ``True`` where none is there to compare.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    index = next((i for i, cache in enumerate(caches) if type(cache) is KVCache), None)
    if index is None:
        return True
    count = min(count, len(tokens), caches[index].offset)
    fresh: list[Any] = make_prompt_cache(model)
    if len(fresh) != len(caches) or type(fresh[index]) is not KVCache:
        return False
    prefill(model, tokens[:count], fresh)
    mine, theirs = (held[index].keys[..., :count, :].astype(mx.float32) for held in (fresh, caches))
    if mine.shape != theirs.shape:
        return False
    near = mx.linalg.norm(mine - theirs) < TOLERANCE * mx.linalg.norm(mine)
    return bool(near.item())
