"""Families with a dense feed-forward network in every layer, whose checkpoints name or join tensors in other ways than
Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.models.families.family import (
    BIASES,
    COMMON,
    HEADS,
    MULTIPLIER_DEFAULTS,
    MULTIPLIERS,
    SILU,
    WITHOUT_EPS,
    Family,
    tokens,
)
from vishwamai.models.parameters import PREFIX, Tensor

_FUSED_GATE = {name: Tensor(PREFIX + "mlp.gate_up_proj.weight", True, name) for name in ("gate", "up")}
_GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    **tokens(None, [151329, 151336, 151338], 151329),
}

_LLAMA = {**COMMON, **SILU, **HEADS, **BIASES, "mlp_bias": "mlp_bias"}
_EXAONE_LAYER = "transformer.h.{layer}."
_EXAONE = {
    **{
        f"{name}{suffix}": Tensor(f"{_EXAONE_LAYER}{module}.{kind}", kind == "weight")
        for name, module in (
            *(("query", "attn.attention.q_proj"), ("key", "attn.attention.k_proj")),
            *(("value", "attn.attention.v_proj"), ("output", "attn.attention.out_proj")),
            *(("gate", "mlp.c_fc_0"), ("up", "mlp.c_fc_1"), ("down", "mlp.c_proj")),
        )
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    },
    "attention_norm": Tensor(_EXAONE_LAYER + "ln_1.weight"),
    "mlp_norm": Tensor(_EXAONE_LAYER + "ln_2.weight"),
    "embed": Tensor("transformer.wte.weight"),
    "norm": Tensor("transformer.ln_f.weight"),
}


def _hyperclovax(values: Mapping[str, object], source: str) -> Mapping[str, Any]:
    """The keys of HyperCLOVA X with the factor of attention's logits, which by default is that of the head's size."""
    dim, hidden, heads = (values.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        dim = hidden // heads
    if values.get("attention_multiplier") is not None or not isinstance(dim, int) or dim <= 0:
        return values
    return {**values, "attention_multiplier": dim**-0.5}


DENSE_TENSORS: Mapping[str, Family] = {
    "phi3": Family(
        "Phi3ForCausalLM",
        {**COMMON, **SILU, **HEADS},
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **tokens(1, 32000, 32000)},
        layer_types="all",
        partial=1.0,
        tensors={
            **{name: Tensor(PREFIX + "self_attn.qkv_proj.weight", True, name) for name in ("query", "key", "value")},
            **_FUSED_GATE,
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES},
        fields={"norms": "post", "qk_norm": "all"},
        defaults={"attention_bias": False, "rms_norm_eps": 1e-5, **tokens(None, 50279, 1)},
        tensors={"attention_post_norm": Tensor(PREFIX + "post_attention_layernorm.weight")},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES},
        fields={"norms": "post", "qk_norm": "all"},
        defaults={"attention_bias": False, "rms_norm_eps": 1e-5, "sliding_window": 4096, **tokens(None, 50279, 1)},
        layer_types="list",
        window_period=4,
        theta=500000.0,
        local_theta=500000.0,
        tensors={"attention_post_norm": Tensor(PREFIX + "post_attention_layernorm.weight")},
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        {**COMMON, **SILU, **HEADS},
        fields={"norms": "post", "qk_norm": "head"},
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            **tokens(0, 2),
        },
        layer_types="list",
        layer_keys=("sliding_window_pattern",),
        global_rope=False,
        tensors={"attention_post_norm": Tensor(PREFIX + "post_attention_layernorm.weight")},
    ),
    "hyperclovax": Family(
        "HyperCLOVAXForCausalLM",
        {**_LLAMA, **{key: field for key, field in MULTIPLIERS.items() if key != "logits_scaling"}}
        | {"logits_scaling": "logit_multiplier"},
        choices={"use_post_norm": ("norms", {True: "both", False: "pre"})},
        defaults={
            "attention_bias": False,
            "mlp_bias": False,
            "use_post_norm": True,
            **{key: value for key, value in MULTIPLIER_DEFAULTS.items() if key != "attention_multiplier"},
            **tokens(1, 2),
        },
        derive=_hyperclovax,
        tensors={
            "attention_post_norm": Tensor(PREFIX + "post_norm1.weight"),
            "mlp_post_norm": Tensor(PREFIX + "post_norm2.weight"),
        },
    ),
    "exaone": Family(
        "ExaoneForCausalLM",
        _LLAMA,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            **tokens(1, 361, 0),
        },
        aliases={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        theta=500000.0,
        tensors=_EXAONE,
    ),
    "internlm2": Family(
        "InternLM2ForCausalLM",
        {**COMMON, **SILU, "bias": "attention_bias"},
        defaults={"bias": True, **tokens(1, 2, 2)},
        tensors={
            **{
                f"{name}{suffix}": Tensor(PREFIX + f"attention.wqkv.{kind}", kind == "weight", f"group_{name}")
                for name in ("query", "key", "value")
                for suffix, kind in (("", "weight"), ("_bias", "bias"))
            },
            "output": Tensor(PREFIX + "attention.wo.weight", True),
            "output_bias": Tensor(PREFIX + "attention.wo.bias"),
            "gate": Tensor(PREFIX + "feed_forward.w1.weight", True),
            "up": Tensor(PREFIX + "feed_forward.w3.weight", True),
            "down": Tensor(PREFIX + "feed_forward.w2.weight", True),
            "attention_norm": Tensor(PREFIX + "attention_norm.weight"),
            "mlp_norm": Tensor(PREFIX + "ffn_norm.weight"),
            "embed": Tensor("model.tok_embeddings.weight"),
            "head": Tensor("output.weight"),
        },
    ),
    "glm": Family(
        "GlmForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES},
        fields={"output_bias": False, "rope_interleaved": True},
        defaults=_GLM_DEFAULTS,
        partial=0.5,
        tensors=_FUSED_GATE,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES},
        fields={"norms": "both", "output_bias": False, "rope_interleaved": True},
        defaults=_GLM_DEFAULTS,
        partial=0.5,
        tensors={
            **_FUSED_GATE,
            "attention_post_norm": Tensor(PREFIX + "post_self_attn_layernorm.weight"),
            "mlp_post_norm": Tensor(PREFIX + "post_mlp_layernorm.weight"),
        },
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES},
        fields={"qk_norm": "rotated"},
        defaults={"rms_norm_eps": 1e-5, "attention_bias": False, **tokens(1, 2, 0)},
        ignored=("eod_token_id", "pretraining_tp"),
        layer_keys=("alpha",),
        tensors={
            "query_norm": Tensor(PREFIX + "self_attn.query_layernorm.weight"),
            "key_norm": Tensor(PREFIX + "self_attn.key_layernorm.weight"),
        },
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        {**WITHOUT_EPS, **SILU, "layer_norm_eps": "norm_eps", "use_qkv_bias": "attention_bias"},
        choices={
            "qk_layernorm": ("qk_norm", {False: None, True: "heads"}),
            "use_parallel_residual": ("norms", {False: "pre", True: "shared"}),
        },
        fields={"layer_norm": True, "norm_bias": True, "output_bias": False},
        defaults={
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "qk_layernorm": False,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            **tokens(0, 0),
        },
        partial=0.25,
        tensors={
            f"{name}_norm": Tensor(PREFIX + f"self_attn.{name[0]}_layernorm.norms.{{expert}}.weight")
            for name in ("query", "key")
        },
    ),
}
