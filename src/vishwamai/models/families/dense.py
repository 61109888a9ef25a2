"""Families with a dense feed-forward network in every layer."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.models.families.family import BIASES, COMMON, HEADS, PREFIX, SILU, Family, Tensor, sizes, tokens

_QWEN_LAYERS = ("use_sliding_window", "max_window_layers")
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

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
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES},
        fields={"qk_norm": "head"},
        defaults={**_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
        sizes=sizes(151936, 4096, 22016, 32, 32, 128000),  # of Qwen3-VL
        layer_types="list",
        layer_keys=_QWEN_LAYERS,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {**COMMON, **SILU, **HEADS},
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **tokens(1, 32000, 32000)},
        layer_types="all",
        partial=1.0,
        tensors={
            **{name: Tensor(PREFIX + "self_attn.qkv_proj.weight", True, name) for name in ("query", "key", "value")},
            **{name: Tensor(PREFIX + "mlp.gate_up_proj.weight", True, name) for name in ("gate", "up")},
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES},
        fields={"norms": "post", "qk_norm": "all"},
        defaults={"attention_bias": False, "rms_norm_eps": 1e-5, **tokens(None, 50279, 1)},
        tensors={"attention_post_norm": Tensor(PREFIX + "post_attention_layernorm.weight")},
    ),
}
