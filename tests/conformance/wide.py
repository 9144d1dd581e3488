"""The tiny models again, with heads of whole groups: quantization asks for 32 values or more."""

from __future__ import annotations

from unittest import mock

from tests.conformance import configs, models

HEAD = 32

WIDTHS = {
    **dict.fromkeys(("hidden_size", "hidden_dim", "d_model", "model_dim", "n_embd"), 4 * HEAD),
    **dict.fromkeys(("block_dim", "moe_hidden_size", "dim_model_base", "mamba_d_ssm"), 4 * HEAD),
    **dict.fromkeys(("head_dim", "kv_channels", "hidden_size_per_head"), HEAD),
    **dict.fromkeys(("swa_head_dim", "swa_v_head_dim", "query_pre_attn_scalar"), HEAD),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), HEAD),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD),
    "kv_lora_rank": 2 * HEAD,
    "rotary_dim": HEAD // 2,
}
"""By field, wherever a configuration has one."""

FACTORS = ("short_factor", "long_factor")
"""One number for each pair of values that is rotated."""


def build(name):
    """The model ``name`` with heads of ``HEAD`` values or twice as many."""
    exceptions = {key: _widened(value) for key, value in configs.CONFIGS.items()}
    with (
        mock.patch.dict(configs.SIZES, WIDTHS),
        mock.patch.dict(configs.CONFIGS, exceptions),
    ):
        return models.build(name)


def _widened(config):
    wide = {}
    for key, value in config.items():
        if isinstance(value, dict):
            wide[key] = _widened(value)
        elif key in FACTORS:
            wide[key] = value[:1] * (HEAD // 2)
        else:
            wide[key] = WIDTHS.get(key, value)
    return wide
