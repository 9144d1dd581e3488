"""Prefill: what checkpoints while a prompt is read cost its first token.

The server's batched path reads one prompt of random tokens, with mlx-lm's own ``BatchGenerator``
and with the one that stores a resume point behind every prefill step but the last. By default
a server takes one every 2,048 tokens. The models have random weights and are small, so that a
forward costs little for each byte of its rows: larger models pay less.

Beside the time on the clock, the processor time of all threads is compared, which other programs
disturb less; it has the writer's share, which the clock shows only where no core is free for it.

To reach: a tenth more processor time, or less.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from benchmarks.harness import Answer, Bench, Result, column, ratios

ATTENTION = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**ATTENTION, "rope_theta": 10000.0},
    "gemma3_text": {
        **ATTENTION,
        "query_pre_attn_scalar": 64,
        "sliding_window": 256,
        "sliding_window_pattern": 4,
    },
    "qwen3_next": {
        **ATTENTION,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [0, 1, 2, 3],
        "moe_intermediate_size": 512,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 8192,
    },
}


def measure(bench: Bench) -> Result:
    """Read with and without checkpoints in each round, for each model."""
    count, step = (512, 128) if bench.quick else (2048, 512)
    points = (count - 2) // step
    result = Result(f"Reading {count:,} tokens with {points} checkpoints")
    for name in MODELS:

        def read(number: int, name: str = name, *, kept: bool) -> Answer:
            with bench.scratch() as folder:
                where = str(folder / str(number)) if kept else ""
                return bench.step(reading, name=name, count=count, step=step, store=where)

        found = bench.interleaved(
            {
                f"{name} without": lambda n, read=read: read(n, kept=False),  # type: ignore[misc]
                f"{name} with": lambda n, read=read: read(n, kept=True),  # type: ignore[misc]
            }
        )
        without, kept = found[f"{name} without"], found[f"{name} with"]
        if any(answer["points"] != points for answer in kept):
            raise AssertionError(f"{name}: not every checkpoint was stored: {kept}")
        result.line(f"{name}: first token without", column(without, "seconds"))
        result.line(f"{name}: first token with", column(kept, "seconds"))
        result.line(f"{name}: stored", column(kept, "bytes", 2**-20), "MiB")
        result.line(f"{name}: until all is durable, more", column(kept, "flush"))
        slower = ratios(column(kept, "seconds"), column(without, "seconds"))
        result.line(f"{name}: with ÷ without", slower, "×")
        dearer = ratios(column(kept, "processor"), column(without, "processor"))
        result.goal(f"{name}: processor time, with ÷ without", dearer, 1.1)
    return result


def reading(name: str, count: int, step: int, store: str) -> Answer:
    """Read one prompt, with checkpoints where ``store`` names a folder."""
    import numpy as np
    from mlx_lm.generate import BatchGenerator

    from kvkeep.hooks.batch_points import KeepingBatchGenerator
    from kvkeep.hooks.keeper import Keeper
    from kvkeep.hooks.prompt_cache import PromptCache
    from kvkeep.prefixstore.store import open_store

    model = build(name)
    tokens = np.random.default_rng(0).integers(0, ATTENTION["vocab_size"], count).tolist()
    _first_token(BatchGenerator(model, prefill_step_size=step), tokens[: step + 1])
    if not store:
        return _first_token(BatchGenerator(model, prefill_step_size=step), tokens)
    with open_store(store, max_bytes="4GB") as opened:
        space = opened.space(identity={"benchmark": name}, layout=model_caches(model))
        cache = PromptCache(store=opened, space=space)
        keeper = Keeper(cache, interval=step)
        answer = _first_token(
            KeepingBatchGenerator(model, prefill_step_size=step, keeper=keeper), tokens
        )
        started, before = time.perf_counter(), time.process_time()
        cache.flush()
        answer["flush"] = time.perf_counter() - started
        answer["processor"] += time.process_time() - before
        data = cache.metrics.data()
        return {
            **answer,
            "points": data["snapshots"]["stored"],
            "bytes": data["stored_bytes"],
        }


def build(name: str) -> Any:
    """The model ``name`` with random weights, in float32: MLX's CPU is slow in 16 bits."""
    import mlx.core as mx

    module: Any = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **MODELS[name]}))
    mx.eval(model.parameters())
    return model


def model_caches(model: Any) -> Any:
    """New caches of the model."""
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def _first_token(generator: Any, tokens: list[int]) -> Answer:
    """Seconds until the first token of an answer, and those of all processors."""
    started, before = time.perf_counter(), time.process_time()
    generator.insert_segments([[tokens]], max_tokens=[2], all_tokens=[[]])
    while not generator.next()[1]:
        pass
    seconds, processor = time.perf_counter() - started, time.process_time() - before
    generator.close()
    return {"seconds": seconds, "processor": processor}
