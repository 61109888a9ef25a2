"""Families whose feed-forward network is a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.models.families.family import (
    BIASES,
    COMMON,
    EXPERTS,
    HEADS,
    INNER,
    PREFIX,
    SILU,
    Family,
    Tensor,
    tokens,
)

MIXTURES: Mapping[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        {**COMMON, **SILU, **HEADS, **EXPERTS, "num_local_experts": "experts.count"},
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **tokens(1, 2),
        },
        aliases={"num_experts": "num_local_experts"},
        layer_types="all",
        theta=1_000_000.0,
        tensors={
            "router": Tensor(PREFIX + "block_sparse_moe.gate.weight", True),
            **{
                f"expert_{name}": Tensor(PREFIX + f"block_sparse_moe.experts.{{expert}}.{short}.weight", True)
                for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
            },
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **EXPERTS,
            **INNER,
            "num_experts": "experts.count",
            "norm_topk_prob": "experts.normalize",
        },
        fields={"qk_norm": "head"},
        defaults={
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
        },
        fixed={"use_qk_norm": (True,)},
        aliases={"num_local_experts": "num_experts"},
        layer_types="all",
        layer_keys=("use_sliding_window", "mlp_only_layers", "decoder_sparse_step"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **COMMON,
            **HEADS,
            **BIASES,
            **EXPERTS,
            "num_local_experts": "experts.count",
            "swiglu_limit": "experts.clamped_limit",
        },
        fields={"sinks": True, "experts.biases": True},
        defaults={
            "num_key_value_heads": 8,
            "attention_bias": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        fixed={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
        aliases={"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"},
        layer_types="list",
        window_period=2,
        theta=150000.0,
        tensors={
            "router": Tensor(PREFIX + "mlp.router.weight", True),
            "router_bias": Tensor(PREFIX + "mlp.router.bias"),
            "expert_gate": Tensor(PREFIX + "mlp.experts.gate_up_proj", part="even"),
            "expert_gate_bias": Tensor(PREFIX + "mlp.experts.gate_up_proj_bias", part="even"),
            "expert_up": Tensor(PREFIX + "mlp.experts.gate_up_proj", part="odd"),
            "expert_up_bias": Tensor(PREFIX + "mlp.experts.gate_up_proj_bias", part="odd"),
            "expert_down": Tensor(PREFIX + "mlp.experts.down_proj"),
            "expert_down_bias": Tensor(PREFIX + "mlp.experts.down_proj_bias"),
        },
    ),
}
