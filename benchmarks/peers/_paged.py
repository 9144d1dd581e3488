"""What flyto-mlx's oMLX and vMLX share: a paged prefix cache over a store of blocks on disk."""

from __future__ import annotations

from typing import Any

from benchmarks.peers._adapter import evaluate


def states(caches: list[Any]) -> list[dict[str, Any]]:
    """What their schedulers extract from live caches."""
    return [
        {
            "state": cache.state,
            "meta_state": cache.meta_state,
            "class_name": type(cache).__name__,
            "cache_type": type(cache).__name__,
        }
        for cache in caches
    ]


def rebuilt(prefix_cache: Any, prompt: list[int]) -> tuple[list[Any] | None, int]:
    """The blocks that a prompt begins with, found and joined as their schedulers do."""
    table, rest = prefix_cache.fetch_cache("restore", prompt)
    caches = prefix_cache.reconstruct_cache(table) if table else None
    if not caches:
        return None, 0
    # Rebuilding may fall back to an earlier block, and then cuts the table.
    return evaluate(caches), min(table.num_tokens, len(prompt) - len(rest))
