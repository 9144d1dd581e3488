"""Tiny random models of real mlx-lm architectures, the same in every process.

The Metal kernels of state-space models ask for states of a multiple of 32.
"""

from __future__ import annotations

from importlib import import_module

VOCAB = 97

_ATTENTION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}

CONFIGS = {
    "llama": {**_ATTENTION, "head_dim": 32, "rope_theta": 10000.0, "tie_word_embeddings": True},
    "gemma3_text": {
        **_ATTENTION,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
    },
    "qwen3_next": {
        **_ATTENTION,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 512,
        "head_dim": 16,
    },
    "falcon_h1": {
        **_ATTENTION,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
    },
    "llama4": {
        "text_config": {
            **_ATTENTION,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": 24,
            "head_dim": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "max_position_embeddings": 512,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
        }
    },
    "deepseek_v3": {
        **_ATTENTION,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 32,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": "auto",
    },
}

BFLOAT16 = ("llama", "gemma3_text", "falcon_h1")
"""Mixtures of experts run on a CPU only in float32; these run in the dtype of real models."""


def build(name, seed=0):
    """The model ``name`` with random weights that depend on ``seed`` alone."""
    import mlx.core as mx
    from mlx.utils import tree_map

    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **CONFIGS[name]}))
    if name in BFLOAT16:
        model.update(
            tree_map(
                lambda p: p.astype(mx.bfloat16) if p.dtype == mx.float32 else p, model.parameters()
            )
        )
    mx.eval(model.parameters())
    return model
