"""One rank of a distributed run: what it would resume alone, and what it resumes with the other."""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep.hooks.agreement import between_ranks, rank_name
from kvkeep.hooks.prefill import prefill
from kvkeep.hooks.prompt_cache import PromptCache
from tests import architectures

TOKENS = [(7 * i * i + 3 * i) % 90 for i in range(60)]
SEEN = {0: (60, 20), 1: (40, 20)}
"""What each rank has read before; a state cannot be cut."""


def main(folder: str) -> dict[str, Any]:
    mx.distributed.init(strict=True)
    rank = mx.distributed.init().rank()
    assert rank_name() == f"rank {rank} of 2"
    model = architectures.build("falcon_h1")
    said: dict[str, Any] = {}
    with kvkeep.open(folder, max_bytes="1GB") as store:
        space = store.space(identity={"rank": rank}, layout=make_prompt_cache(model))
        for name, agree in (("alone", None), ("together", between_ranks())):
            cache = PromptCache(store=store, space=space, agree=agree)
            for length in SEEN[rank]:
                caches = make_prompt_cache(model)
                prefill(model, TOKENS[:length], caches)
                cache.insert_cache(None, TOKENS[:length], caches)
            said[name] = []
            for asked in ([*TOKENS, 1], [*TOKENS[:30], 1], [89, 88]):
                found, rest = cache.fetch_nearest_cache(None, asked)
                said[name].append(len(asked) - len(rest))
                assert (found is None) == (said[name][-1] == 0)
            cache.close()
    return said


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
