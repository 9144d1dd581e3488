"""The tiny models again, with heads of whole groups: quantization asks for 32 values or more."""

from __future__ import annotations

from unittest import mock

from tests.conformance import configs, models

HEAD = 32

FACTORS = ("short_factor", "long_factor")
"""One number for each pair of values that is rotated."""


def widths(head):
    """Sizes by field, wherever a configuration has one, for heads of ``head`` values."""
    return {
        **dict.fromkeys(("hidden_size", "hidden_dim", "d_model", "model_dim", "n_embd"), 4 * head),
        **dict.fromkeys(("block_dim", "moe_hidden_size", "dim_model_base"), 4 * head),
        **dict.fromkeys(("head_dim", "kv_channels", "hidden_size_per_head"), head),
        **dict.fromkeys(("swa_head_dim", "swa_v_head_dim", "query_pre_attn_scalar"), head),
        **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), head),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), head),
        "global_head_dim": 2 * head,
        "index_head_dim": head,
        "mamba_d_ssm": 4 * head,
        "kv_lora_rank": 2 * head,
        "rotary_dim": head // 2,
    }


def build(name, head=HEAD):
    """The model ``name`` with heads of ``head`` values, or twice as many."""
    sizes = widths(head)
    exceptions = {key: _widened(value, sizes) for key, value in configs.CONFIGS.items()}
    with (
        mock.patch.dict(configs.SIZES, sizes),
        mock.patch.dict(configs.CONFIGS, exceptions),
    ):
        return models.build(name)


def _widened(config, sizes):
    wide = {}
    for key, value in config.items():
        if isinstance(value, dict):
            wide[key] = _widened(value, sizes)
        elif key in FACTORS:
            wide[key] = value[:1] * (sizes["head_dim"] // 2)
        else:
            wide[key] = sizes.get(key, value)
    return wide
