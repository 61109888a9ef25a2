"""Mixtures of experts whose attention differs by kind of layer: AFMoE and MiMo V2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import UnsupportedError
from vishwamai.models.families.family import BIASES, COMMON, CORRECTED, EXPERTS, HEADS, INNER, SILU, Family, tokens
from vishwamai.models.parameters import PREFIX, Tensor

_MIMO_ROPE = {"rope_type": "default", "partial_rotary_factor": 0.334}
_MIMO_KEYS = {key: field for key, field in CORRECTED.items() if field not in ("dense_layers", "experts.shared")}


def _mimo(values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The keys of MiMo V2 in the form that transformers computes; published files have further names of the same.

    Raises:
      UnsupportedError: two names of one value differ.
    """
    values, count = dict(values), values.get("num_hidden_layers")
    heads, dim, value_dim = (values.get(key) for key in ("num_attention_heads", "head_dim", "v_head_dim"))
    shared = values.get("num_key_value_heads", 4)
    expected: dict[str, Any] = {
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": 2 * shared if isinstance(shared, int) else None,
        "swa_head_dim": 192 if dim is None else dim,
        "swa_v_head_dim": 128 if value_dim is None else value_dim,
    }
    if isinstance(count, int) and 0 < count <= 10_000:
        types = values.get("layer_types")
        if types is None:
            full = [i == 0 or (i + 1) % 6 == 0 for i in range(count)]
            values["layer_types"] = types = ["full_attention" if flag else "sliding_attention" for flag in full]
        units = values.get("mlp_layer_types")
        if units is None:
            values["mlp_layer_types"] = units = ["dense", *["sparse"] * (count - 1)]
        expected["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in types]
        expected["moe_layer_freq"] = [int(kind == "sparse") for kind in units]
    for key, value in expected.items():
        if values.get(key) is not None and values[key] != value:
            raise UnsupportedError(
                f"{source}: `{key}` is {values[key]!r:.80}; the decoder computes mimo_v2_flash with {value!r:.80}, as "
                "transformers does. Remove the key."
            )
        values.pop(key, None)
    if expected["swa_num_key_value_heads"] is not None:
        values["swa_num_key_value_heads"] = expected["swa_num_key_value_heads"]
    for key, base in (("rope_theta", 5_000_000), ("swa_rope_theta", 10_000)):
        if values.pop(key, None) not in (None, base):
            raise UnsupportedError(
                f"{source}: `{key}` differs from {base}; transformers reads the bases of mimo_v2_flash from "
                "`rope_parameters` alone. Move it there."
            )
    if isinstance(size := values.pop("sliding_window_size", None), int):
        values["sliding_window"] = size + 1  # tokens before a token's own
    return values


SPARSE: Mapping[str, Family] = {
    "afmoe": Family(
        "AfmoeForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **EXPERTS,
            **INNER,
            "mup_enabled": "scale_embeddings",
            "num_dense_layers": "dense_layers",
            "num_experts": "experts.count",
            "num_shared_experts": "experts.shared",
            "route_scale": "experts.scale",
        },
        fields={"norms": "both", "qk_norm": "head", "attention_gate": True, "experts.method": "noaux_tc"},
        defaults={
            "attention_bias": False,
            "head_dim": 128,
            "moe_intermediate_size": 1408,
            "mup_enabled": False,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "rms_norm_eps": 1e-5,
            "route_scale": 1.0,
            "sliding_window": 1024,
            "sliding_window_pattern": 4,
            **tokens(None, None),
        },
        aliases={"global_attn_every_n_layers": "sliding_window_pattern", "num_local_experts": "num_experts"},
        layer_types="list",
        layer_keys=("sliding_window_pattern",),
        global_rope=None,
        tensors={
            "attention_post_norm": Tensor(PREFIX + "post_attention_layernorm.weight"),
            "mlp_norm": Tensor(PREFIX + "pre_mlp_layernorm.weight"),
            "mlp_post_norm": Tensor(PREFIX + "post_mlp_layernorm.weight"),
            "router": Tensor(PREFIX + "mlp.router.gate.weight", True),
            "router_correction": Tensor(PREFIX + "mlp.expert_bias"),
        },
    ),
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **_MIMO_KEYS,
            "attention_value_scale": "value_scale",
            "swa_num_key_value_heads": "sliding_attention.num_kv_heads",
            "v_head_dim": "value_dim",
        },
        fields={"output_bias": False, "sliding_attention.sinks": True, "experts.method": "noaux_tc"},
        defaults={
            "num_key_value_heads": 4,
            "attention_bias": False,
            "attention_value_scale": 0.707,
            "head_dim": 192,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 256,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "full_attention": {**_MIMO_ROPE, "rope_theta": 5_000_000.0},
                "sliding_attention": {**_MIMO_ROPE, "rope_theta": 10_000.0},
            },
            "routed_scaling_factor": 1.0,
            "sliding_window": 129,
            "topk_group": 1,
            "v_head_dim": 128,
            **tokens(1, None),
        },
        fixed={
            "add_full_attention_sink_bias": (False, None),
            "add_swa_attention_sink_bias": (True, None),
            "layernorm_epsilon": (1e-5,),
            "n_shared_experts": (None,),
            "partial_rotary_factor": (0.334,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
        ignored=("attention_chunk_size",),
        aliases={"num_local_experts": "n_routed_experts"},
        derive=_mimo,
        layer_types="list",
        layer_keys=("mlp_layer_types",),
        theta=5_000_000.0,
        partial=0.334,
        local_theta=10_000.0,
        unread=("model.mtp.",),
        tensors={"sinks": Tensor(PREFIX + "self_attn.attention_sink_bias")},
    ),
}
