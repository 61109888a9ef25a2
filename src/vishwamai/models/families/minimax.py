"""MiniMax-01 and M1: lightning attention in most layers, attention in the others, and experts in all."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.models.families.family import COMMON, EXPERTS, HEADS, SILU, Family, tokens
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.lightning import Lightning
from vishwamai.models.parameters import PREFIX, Tensor


def minimax_values(values: Mapping[str, object], source: str) -> dict[str, object]:
    """The keys of MiniMax with `layer_types`.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    >>> minimax_values({"num_hidden_layers": 2}, "config.json")["layer_types"]
    ['full_attention', 'linear_attention']
    """
    count = values.get("num_hidden_layers")
    if values.get("layer_types") is not None or not isinstance(count, int) or not 0 < count < 10_000:
        return dict(values)
    return {**values, "layer_types": ["linear_attention" if i % 2 else "full_attention" for i in range(count)]}


MINIMAX: Mapping[str, Family] = {
    "minimax": Family(
        "MiniMaxForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **EXPERTS,
            "full_attn_alpha_factor": "full_attention.stream_scale",
            "full_attn_beta_factor": "full_attention.block_scale",
            "linear_attn_alpha_factor": "linear_attention.stream_scale",
            "linear_attn_beta_factor": "linear_attention.block_scale",
            "mlp_alpha_factor": "mlp_stream_scale",
            "mlp_beta_factor": "mlp_block_scale",
            "num_local_experts": "experts.count",
        },
        {"norms": "stream"},
        {
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            **tokens(1, 2),
        },
        fixed={"sliding_window": (None,)},
        ignored=("block_size",),
        aliases={"num_experts": "num_local_experts"},
        derive=minimax_values,
        layer_types="types",
        theta=1_000_000.0,
        mixers={"full_attention": Attention, "linear_attention": Lightning},
        tensors={
            "router": Tensor(PREFIX + "block_sparse_moe.gate.weight", True),
            **{
                f"expert_{name}": Tensor(PREFIX + f"block_sparse_moe.experts.{{expert}}.{short}.weight", True)
                for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
            },
        },
    ),
}
