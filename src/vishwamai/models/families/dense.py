"""Families with a dense feed-forward network in every layer, whose checkpoints name tensors as Llama's do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.models.families.family import (
    BIASES,
    COMMON,
    HEADS,
    MOST_LAYERS,
    MULTIPLIER_DEFAULTS,
    MULTIPLIERS,
    SILU,
    WITHOUT_EPS,
    Family,
    sizes,
    tokens,
)

_QWEN_LAYERS = ("use_sliding_window", "max_window_layers")
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def _cwm(values: Mapping[str, object], source: str) -> Mapping[str, Any]:
    """The keys of CWM, of whose layers every fourth one from the first on attends to everything by default."""
    count = values.get("num_hidden_layers")
    if values.get("layer_types") is not None or not isinstance(count, int) or count > MOST_LAYERS:
        return values
    types = ["full_attention" if i % 4 == 0 else "sliding_attention" for i in range(count)]
    return {**values, "layer_types": types}


DENSE: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, "mlp_bias": "mlp_bias"},
        defaults={"attention_bias": False, "mlp_bias": False, **tokens(1, 2)},
        sizes=sizes(32000, 4096, 11008, 32, 32, 2048),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {**COMMON, **SILU, **HEADS},
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, **tokens(1, 2)},
        sizes=sizes(32000, 4096, 14336, 32, 32, 131072),
        ignored=("norm_eps",),
        layer_types="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {**COMMON, **SILU, **HEADS},
        fields={"attention_bias": True, "output_bias": False},
        defaults=_QWEN_DEFAULTS,
        layer_types="list",
        layer_keys=_QWEN_LAYERS,
    ),
    "mimo": Family(
        "MiMoForCausalLM",  # Qwen2's layers; one more drafts
        {**COMMON, **SILU, **HEADS},
        fields={"attention_bias": True, "output_bias": False},
        defaults=_QWEN_DEFAULTS,
        fixed={"attention_bias": (True,)},
        layer_types="list",
        layer_keys=_QWEN_LAYERS,
        unread=("model.mtp_layers.",),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES},
        fields={"qk_norm": "head"},
        defaults={**_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
        sizes=sizes(151936, 4096, 22016, 32, 32, 128000),  # of Qwen3-VL
        layer_types="list",
        layer_keys=_QWEN_LAYERS,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        {**COMMON, **SILU, **HEADS},
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, **tokens(1, 2)},
        layer_types="list",
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {**COMMON, **SILU, **HEADS},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            **tokens(1, 2, 11),
        },
        sizes=sizes(131072, 4096, 14336, 34, 32, 262144),
        layer_types="all",
        layer_keys=("llama_4_scaling_beta",),
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, "attention_out_bias": "output_bias", "mlp_bias": "mlp_bias"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            **tokens(0, 2, 1),
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, "mlp_bias": "mlp_bias"},
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            **tokens(128000, 128001, 128004),
        },
        ignored=("pretraining_tp",),
        layer_types="list",
        layer_keys=("use_sliding_window", "no_rope_layers", "no_rope_layer_interval"),
        theta=2_000_000.0,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, **MULTIPLIERS, "mlp_bias": "mlp_bias"},
        defaults={"attention_bias": False, "mlp_bias": False, **MULTIPLIER_DEFAULTS, **tokens(1, 2)},
    ),
    "cwm": Family(
        "CwmForCausalLM",
        {**COMMON, **SILU, **HEADS, "mlp_bias": "mlp_bias"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "mlp_bias": False,
            "rope_parameters": _CWM_ROPE,
            "sliding_window": 8192,
            **tokens(128000, [128001, 128008, 128009]),
        },
        ignored=("pretraining_tp",),
        derive=_cwm,
        layer_types="list",
        theta=1_000_000.0,
    ),
    "minicpm": Family(
        "MiniCPMForCausalLM",
        {
            **COMMON,
            **SILU,
            **BIASES,
            "dim_model_base": "logit_base",
            "scale_depth": "residual_depth",
            "scale_emb": "embedding_multiplier",
        },
        defaults={
            "attention_bias": False,
            "dim_model_base": 1,
            "initializer_range": 0.1,
            "scale_depth": 1.0,
            "scale_emb": 1.0,
            "tie_word_embeddings": True,
            **tokens(1, 2),
        },
    ),
    "PanguEmbedded": Family(
        "PanguEmbeddedForCausalLM",  # Llama's layers
        {**COMMON, **SILU, "bias": "attention_bias"},
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "bias": True, **tokens(1, 45892, 0)},
        theta=16_000_000.0,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        {**COMMON, **SILU, **HEADS},
        choices={"use_bias": ("attention_bias", {False: False})},
        fields={"rope_interleaved": True},
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            **tokens(1, 2, 0),
        },
        theta=500000.0,
    ),
    "helium": Family(
        "HeliumForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, "mlp_bias": "mlp_bias"},
        fields={"output_bias": False, "rope_interleaved": True},
        defaults={
            "num_key_value_heads": 20,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "attention_bias": False,
            "mlp_bias": False,
            **tokens(1, 2, 3),
        },
        theta=100000.0,
    ),
    "internlm3": Family(
        "InternLM3ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, "mlp_bias": "mlp_bias"},
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            **tokens(1, 2, 2),
        },
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "olmo": Family(
        "OlmoForCausalLM",
        {**WITHOUT_EPS, **SILU, **HEADS, **BIASES},
        fields={"layer_norm": True, "norm_scale": False, "norm_eps": 1e-5},
        defaults={"attention_bias": False, **tokens(None, 50279, 1)},
        fixed={"clip_qkv": (None,)},
    ),
}
