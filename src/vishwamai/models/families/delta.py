"""Families with gated delta nets in three of four layers, and gated attention in the fourth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.models.families.family import BIASES, COMMON, EXPERTS, HEADS, INNER, SILU, Family, sizes, tokens
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.feed_forward import GATED
from vishwamai.models.layers.gated_delta import FusedGatedDelta, GatedDelta
from vishwamai.models.layers.separate_delta import SeparateDelta
from vishwamai.models.parameters import PREFIX, NextToken, Tensor
from vishwamai.models.values import check_value

_KEYS = {
    **COMMON,
    **SILU,
    **HEADS,
    **BIASES,
    "linear_conv_kernel_dim": "linear_attention.width",
    "linear_key_head_dim": "linear_attention.key_dim",
    "linear_num_key_heads": "linear_attention.key_heads",
    "linear_num_value_heads": "linear_attention.value_heads",
    "linear_value_head_dim": "linear_attention.value_dim",
}
_MIXTURE = {
    **_KEYS,
    **EXPERTS,
    **INNER,
    "num_experts": "experts.count",
    "shared_expert_intermediate_size": "experts.shared_size",
}
_FIELDS: dict[str, object] = {"qk_norm": "head", "norm_offset": True, "output_gate": True}
_DEFAULTS: dict[str, object] = {
    "attention_bias": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_key_value_heads": 2,
}
_EXPERTS: dict[str, object] = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_SHARED = {f"shared_{name}": Tensor(PREFIX + f"mlp.shared_expert.{name}_proj.weight", True) for name in GATED}
_LAYERS: dict[str, Any] = {"layer_types": "types", "layer_keys": ("full_attention_interval",), "partial": 0.25}
_LAYERS |= {"unread": ("mtp.",)}
_LAYERS["next_token"] = NextToken(
    "mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", normalized=True
)
_FIXED: dict[str, tuple[object, ...]] = {"output_gate_type": ("swish", "silu")}
_IGNORED = ("attn_output_gate", "mamba_ssm_dtype", "mlp_only_layers", "mtp_num_hidden_layers")
_IGNORED += ("mtp_use_dedicated_embeddings",)


def olmo_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys of OLMo-Hybrid, with the sizes and types of layers that follow from others.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: a size has another type than its key.

    >>> olmo_values({"num_attention_heads": 2, "hidden_size": 32}, "config.json")["linear_key_head_dim"]
    12
    """
    result = dict(values)
    hidden, heads = (values.get(key, size) for key, size in (("hidden_size", 3840), ("num_attention_heads", 30)))
    for key, default in (
        ("linear_num_key_heads", lambda: heads),
        ("linear_num_value_heads", lambda: heads),
        ("linear_key_head_dim", lambda: int(0.75 * hidden / result["linear_num_key_heads"])),
        ("linear_value_head_dim", lambda: 2 * result["linear_key_head_dim"]),
    ):
        for needed in ("hidden_size", "num_attention_heads", "linear_num_key_heads", "linear_key_head_dim"):
            if result.get(needed) is not None:
                check_value(needed, result[needed], int, source, 1)
        if result.get(key) is None:
            result[key] = default()
    count = values.get("num_hidden_layers")
    if values.get("layer_types") is None and isinstance(count, int) and 0 < count < 10_000:
        types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
        result["layer_types"] = types if count > 3 else [*types[:-1], "full_attention"]
    return result


DELTA: Mapping[str, Family] = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {**_MIXTURE, "norm_topk_prob": "experts.normalize"},
        {**_FIELDS, "experts.shared_gate": True},
        {**_DEFAULTS, **_EXPERTS, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10},
        aliases={"num_local_experts": "num_experts"},
        **{**_LAYERS, "layer_keys": ("full_attention_interval", "mlp_only_layers", "decoder_sparse_step")},
        mixers={"full_attention": Attention, "linear_attention": FusedGatedDelta},
        tensors=_SHARED,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _KEYS,
        _FIELDS,
        {**_DEFAULTS, "num_key_value_heads": 4},
        sizes(248320, 4096, 12288, 32, 16, 32768),
        fixed=_FIXED,
        ignored=_IGNORED,
        **_LAYERS,
        mixers={"full_attention": Attention, "linear_attention": GatedDelta},
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        {key: field for key, field in _MIXTURE.items() if key != "intermediate_size"},
        {**_FIELDS, "experts.shared_gate": True, "intermediate_size": 512},  # of no layer: each has experts
        {**_DEFAULTS, **_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
        {key: size for key, size in sizes(248320, 2048, 512, 40, 16, 32768).items() if key != "intermediate_size"},
        fixed={**_FIXED, "mlp_only_layers": ([], None)},
        ignored=(*_IGNORED, "intermediate_size"),
        aliases={"num_local_experts": "num_experts"},
        **_LAYERS,
        mixers={"full_attention": Attention, "linear_attention": GatedDelta},
        tensors=_SHARED,
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        {
            **{key: field for key, field in _KEYS.items() if key != "head_dim"},
            "linear_allow_neg_eigval": "linear_attention.negative",
        },
        {"norms": "post", "qk_norm": "all", "linear_attention.norm_eps": 1e-5},
        {"attention_bias": False, "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4}
        | tokens(None, 100257, 100277),
        fixed={"head_dim": (None,)},
        ignored=("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"),
        derive=olmo_values,
        layer_types="types",
        mixers={"full_attention": Attention, "linear_attention": SeparateDelta},
        norms={"linear_attention": "pre"},
        renamed={".post_attention_layernorm.": ".feedforward_layer_norm."},  # which transformers writes
        tensors={
            "attention_norm": Tensor(PREFIX + "attention_layer_norm.weight"),
            "attention_post_norm": Tensor(PREFIX + "feedforward_layer_norm.weight"),
            "mlp_norm": Tensor(PREFIX + "feedforward_layer_norm.weight"),
        },
    ),
}
