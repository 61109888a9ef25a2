"""Families whose feed-forward network is a mixture of experts; those with corrected scores: `corrected_experts.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vishwamai.core.errors import UnsupportedError
from vishwamai.models.families.family import (
    BIASES,
    COMMON,
    EXPERTS,
    HEADS,
    INNER,
    MULTIPLIER_DEFAULTS,
    MULTIPLIERS,
    SILU,
    Family,
    sizes,
    tokens,
)
from vishwamai.models.layers.feed_forward import GATED
from vishwamai.models.parameters import PREFIX, Tensor

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

MIXTRAL_TENSORS = {
    "router": Tensor(PREFIX + "block_sparse_moe.gate.weight", True),
    **{
        f"expert_{name}": Tensor(PREFIX + f"block_sparse_moe.experts.{{expert}}.{short}.weight", True)
        for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}


_GRANITE_TENSORS = {
    "router": Tensor(PREFIX + "block_sparse_moe.router.layer.weight", True),
    "expert_gate": Tensor(PREFIX + "block_sparse_moe.input_linear.weight", True, "gate"),
    "expert_up": Tensor(PREFIX + "block_sparse_moe.input_linear.weight", True, "up"),
    "expert_down": Tensor(PREFIX + "block_sparse_moe.output_linear.weight", True),
}


def _granite_shared(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The keys of Granite with a shared expert, without the size of one that is absent."""
    return {key: value for key, value in values.items() if key != "shared_intermediate_size" or value != 0}


def _granite_shared_further(config: ModelConfig) -> Mapping[str, object]:
    assert config.experts is not None
    return {"shared_intermediate_size": config.experts.shared_size or 0}


def _phimoe(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The keys of Phi-3.5-MoE, whose class computes a stretched rotation in a form of its own.

    Raises:
      UnsupportedError: the rotation is stretched.
    """
    for key in ("rope_scaling", "rope_parameters"):
        rotation = values.get(key)
        kind = rotation.get("rope_type") or rotation.get("type") if isinstance(rotation, Mapping) else None
        if kind not in (None, "default"):
            raise UnsupportedError(
                f"{source}: `{key}` is {rotation!r:.80}; the decoder computes phimoe with 'default' rotation only."
            )
    return values


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
        tensors=MIXTRAL_TENSORS,
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **EXPERTS,
            "lm_head_bias": "head_bias",
            "num_local_experts": "experts.count",
            "router_jitter_noise": "experts.margin",
        },
        {"layer_norm": True, "norm_bias": True, "experts.method": "sparsemixer", "experts.normalize": False},
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "lm_head_bias": False,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
            **tokens(1, 2),
        },
        fixed={"num_experts_per_tok": (2,)},
        ignored=("expert_dropout", "input_jitter_noise"),
        aliases={"num_experts": "num_local_experts"},
        derive=_phimoe,
        layer_types="all",
        theta=1_000_000.0,
        tensors=MIXTRAL_TENSORS,
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
    "qwen3_vl_moe_text": Family(
        "Qwen3VLMoeTextModel",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **EXPERTS,
            **INNER,
            "num_experts": "experts.count",
        },
        fields={"qk_norm": "head"},
        defaults={
            "num_key_value_heads": 16,
            "attention_bias": False,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "tie_word_embeddings": True,
        },
        sizes=sizes(151936, 2048, 5632, 24, 16, 128000),
        fixed={"norm_topk_prob": (True,)},
        aliases={"num_local_experts": "num_experts"},
        layer_keys=("mlp_only_layers", "decoder_sparse_step"),
        theta=500000.0,
        tensors={
            "expert_gate": Tensor(PREFIX + "mlp.experts.gate_up_proj", part="gate"),
            "expert_up": Tensor(PREFIX + "mlp.experts.gate_up_proj", part="up"),
            "expert_down": Tensor(PREFIX + "mlp.experts.down_proj"),
        },
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **EXPERTS,
            **INNER,
            "num_experts": "experts.count",
            "norm_topk_prob": "experts.normalize",
            "qkv_bias": "attention_bias",
            "shared_expert_intermediate_size": "experts.shared_size",
        },
        fields={"output_bias": False, "experts.shared_gate": True},
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 5632,
            "use_sliding_window": False,
        },
        fixed={"use_sliding_window": (False,)},
        aliases={"num_local_experts": "num_experts"},
        layer_types="list",
        layer_keys=("use_sliding_window", "mlp_only_layers", "decoder_sparse_step"),
        tensors={f"shared_{name}": Tensor(PREFIX + f"mlp.shared_expert.{name}_proj.weight", True) for name in GATED},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **EXPERTS,
            "num_experts": "experts.count",
            "norm_topk_prob": "experts.normalize",
        },
        fields={"qk_norm": "all"},
        defaults={
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            **tokens(None, 50279, 1),
        },
        fixed={"clip_qkv": (None,)},
        aliases={"num_local_experts": "num_experts"},
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, **MULTIPLIERS, **EXPERTS, "num_local_experts": "experts.count"},
        defaults={
            "attention_bias": False,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **MULTIPLIER_DEFAULTS,
            **tokens(1, 2),
        },
        tensors=_GRANITE_TENSORS,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **MULTIPLIERS,
            **EXPERTS,
            "num_local_experts": "experts.count",
            "shared_intermediate_size": "experts.shared_size",
        },
        defaults={
            "attention_bias": False,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **MULTIPLIER_DEFAULTS,
            **tokens(1, 2),
        },
        derive=_granite_shared,
        further=_granite_shared_further,
        tensors={
            **_GRANITE_TENSORS,
            "shared_gate": Tensor(PREFIX + "shared_mlp.input_linear.weight", True, "gate"),
            "shared_up": Tensor(PREFIX + "shared_mlp.input_linear.weight", True, "up"),
            "shared_down": Tensor(PREFIX + "shared_mlp.output_linear.weight", True),
        },
    ),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **EXPERTS,
            "num_experts": "experts.count",
            "norm_topk_prob": "experts.normalize",
        },
        fields={"norms": "post", "qk_norm": "all"},
        defaults={
            "attention_bias": False,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
            **tokens(None, 100257, 100277),
        },
        aliases={"num_local_experts": "num_experts"},
        theta=500000.0,
        tensors={"attention_post_norm": Tensor(PREFIX + "post_attention_layernorm.weight")},
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, "moe_topk": "experts.top_k", "num_experts": "experts.count"},
        fields={"qk_norm": "rotated", "experts.shared": 1},
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "moe_topk": 1,
            "num_experts": 1,
            **tokens(1, 2, 0),
        },
        ignored=("eod_token_id", "pretraining_tp"),
        aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
        layer_keys=("alpha",),
        tensors={
            "query_norm": Tensor(PREFIX + "self_attn.query_layernorm.weight"),
            "key_norm": Tensor(PREFIX + "self_attn.key_layernorm.weight"),
            "router": Tensor(PREFIX + "mlp.gate.wg.weight", True),
            **{f"shared_{name}": Tensor(PREFIX + f"mlp.shared_mlp.{name}_proj.weight", True) for name in GATED},
        },
    ),
}
