"""Tiny configurations of every model of mlx-lm: sizes by field name, then exceptions by model.

Recurrent widths are multiples of 32, which the Metal kernels of mlx-lm ask for. A new model that
needs nothing unusual needs nothing here.
"""

from __future__ import annotations

VOCAB = 97
LAYERS = 4
WINDOW = 12
"""Positions of every sliding window, ring and chunk."""

SIZES = {
    # widths
    "hidden_size": 64,
    "hidden_dim": 64,
    "d_model": 64,
    "model_dim": 64,
    "n_embd": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "mlp_hidden_size": 96,
    "ff_intermediate_size": 96,
    "n_inner": 96,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "share_expert_dim": 48,
    "vocab_size": VOCAB,
    "num_vocab": VOCAB,
    "embedding_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    # depth
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layers": LAYERS,
    "n_layer": LAYERS,
    "num_transformer_layers": LAYERS,
    # attention
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "n_kv_heads": 2,
    "num_attention_groups": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "loop_window_size": WINDOW,
    "window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "rotary_dim": 8,
    "partial_rotary_factor": 0.5,
    "query_pre_attn_scalar": 16,
    # latent attention
    "kv_lora_rank": 40,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 8,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    # recurrent layers
    "state_size": 32,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 1,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    # the rest
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
"""A size for a field of that name, wherever a dataclass has one."""

BY_TYPE = {"bool": False, "int": 1, "float": 1.0}
"""For required fields whose name says no size."""

_MIXED = ["sliding_attention", "full_attention"] * 2
_LLAMA4_ROPE = {
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 32,
}
_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
_BY_LAYER_TYPE = {
    "sliding_attention": {"rope_theta": 10000.0},
    "full_attention": {"rope_theta": 20000.0},
}

TEXT = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("ministral3", "ModelArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}
"""Which dataclass a wrapper's ``text_config`` fills; the exceptions of its module hold for it."""

CONFIGS = {
    "afm7": {"num_kv_reuse_layers": 1},
    "afmoe": {"layer_types": _MIXED},
    "baichuan_m1": {
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
        "tie_word_embeddings": False,
    },
    "bailing_hybrid": {"layer_group_size": 2, "moe_shared_expert_intermediate_size": 48},
    "bailing_moe_linear": {"layer_group_size": 2, "topk_group": 1},
    "bailing_moe_v3": {"layer_group_size": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "deepseek_v41": {
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "compress_ratios": [0, 1, 4, 4],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "index_head_dim": 32,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "rms_norm_eps": 1e-6,
    },
    "exaone4": {"sliding_window_pattern": "LLG", "rope_scaling": None},
    "exaone_moe": {"layer_types": _MIXED, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
    },
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "gemma3": {"vocab_size": VOCAB},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n": {
        "num_kv_shared_layers": 2,
        "layer_types": _MIXED,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "final_logit_softcapping": 30.0,
        "rope_local_base_freq": 10000.0,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "sliding_window_pattern": 2,
        "hidden_size_per_layer_input": 16,
    },
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "gpt2": {"n_positions": 128, "n_ctx": 128, "num_key_value_heads": None},
    "gpt_bigcode": {"n_positions": 128, "num_key_value_heads": None},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": None},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "cla_share_factor": 2,
        "use_cla": True,
        "rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 32,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "attn_res_block_size": 2,
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 1.0,
    },
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "laguna": {"layer_types": _MIXED, "rope_parameters": _BY_LAYER_TYPE},
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "lille-130m": {"block_size": 128},
    "llama4": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 3,
        "emb_split_num": 2,
        "emb_neighbor_num": 3,
    },
    "mamba": {"time_step_rank": 4},
    "mamba2": {
        "num_heads": 4,
        "intermediate_size": 64,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": "auto",
    },
    "mellum": {"layer_types": _MIXED, "rope_parameters": _BY_LAYER_TYPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 20,
        "swa_rope_theta": 10000.0,
    },
    "minicpm": {"dim_model_base": 64},
    "minicpm3": {
        "dim_model_base": 64,
        "rope_scaling": {
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    },
    "minimax_m3_vl": {
        "rotary_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "sparse"] * 2,
        "moe_layer_freq": [0, 1, 1, 1],
    },
    "ministral3": {
        "model_type": "ministral3",
        "layer_types": _MIXED,
        "rope_parameters": _LLAMA4_ROPE,
    },
    "mistral4": {"rope_parameters": {**_LLAMA4_ROPE, **_YARN}},
    "muse_spark": {
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 0, 10000.0, 0],
        "layer_types": _MIXED,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {
        "hybrid_override_pattern": list("M*-ME*"),
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "norm_topk_prob": True,
    },
    "olmo3": {"layer_types": _MIXED},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "openelm": {
        "num_query_heads": [4, 4, 8, 8],
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [1.0, 1.0, 2.0, 2.0],
        "ffn_dim_divisor": 8,
    },
    "phi3small": {"vocab_size": 100352, "dense_attention_every_n_layers": 2},
    "phimoe": {
        "rope_scaling": {
            "short_factor": [1.0] * 8,
            "long_factor": [1.5] * 8,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        }
    },
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 16, "mamba_d_state": 32, "mamba_num_heads": 4},
    "plamo3": {"sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.0.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 0,
            }
        ],
        "text_config": {"num_experts": 0, "intermediate_size": 128},
    },
    "qwen": {"kv_channels": 16},
    "qwen3_5": {"full_attention_interval": 2, "rope_parameters": None},
    "qwen3_next": {"full_attention_interval": 2},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "head_dim": 16,
    },
    "rwkv7": {
        "head_dim": 32,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "spark2_5": {"rope_parameters": _BY_LAYER_TYPE},
    "step3p5": {"layer_types": _MIXED},
}
"""Exceptions, by module."""

UNRUNNABLE = {
    "olmo": "mlx-lm adds the name of a mask, `causal`, to its attention scores; "
    "it also needs the package ai2-olmo",
}
"""Models that fail wherever they are tried, by what they fail of."""

METAL_ONLY = {
    "bitnet": "multiplies its packed weights with a Metal kernel",
    "muse_spark": "normalizes, rotates and routes with Metal kernels",
}
"""Models that run on Apple silicon alone."""

SINCE = {"muse_spark": "0.32.2", "prism_hadamard_qwen35": "0.32.1"}
"""Models that the oldest mlx-lm does not have, by the version that brought them."""

SOUND_SINCE = {"phi3small": "0.32.1"}
"""Models that earlier versions run into the end of the interpreter: it wrote its logits beyond
their end."""

NOT_CAUSAL = {
    "phi3small": "mlx-lm adds its boolean mask to the scores, where it hides nothing, so that a "
    "token is also computed from those that follow it in its chunk; open its space with "
    "`exact=True`, which cuts rows between whole chunks only",
}
"""Models whose rows depend on later tokens, so that rows cut inside a chunk are not those of a
shorter prompt."""

EMPTY_CACHES = {
    "nemotron-nas": "a layer whose attention is replaced by a linear map has a cache that stays "
    "empty, which cannot be told from a forward that was interrupted: such a model is refused",
}
"""Models that make caches which they never fill, in some configurations; not in ours."""
