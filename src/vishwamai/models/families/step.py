"""Step 3.5 and 3.7: more heads of queries in layers with a window, a gate for each head, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.families.family import BIASES, COMMON, EXPERTS, HEADS, INNER, MOST_LAYERS, Family, tokens
from vishwamai.models.parameters import PREFIX, Tensor
from vishwamai.models.values import check_value

_CLAMPS = ("swiglu_limits", "swiglu_limits_shared")
_BY_LAYER = ("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors", *_CLAMPS)
_DENSE = 3
"""Layers without experts where a file does not say which they are."""


def step_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys of Step 3.5 in the form that transformers writes: without the entries of layers that draft, and with the
    types of layers, networks and rotations that follow from older keys.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: a value has another type than its key, or sizes contradict one another.
      UnsupportedError: units are clamped, or sizes differ between layers of one type.

    >>> step_values({"num_hidden_layers": 1, "moe_layers_enum": "0"}, "config.json")["mlp_layer_types"]
    ['sparse']
    """
    result, count = dict(values), values.get("num_hidden_layers")
    check_value("num_hidden_layers", count, int, source, 1)
    if count is None or count > MOST_LAYERS:
        return result
    drafts = values.get("num_nextn_predict_layers") or 0
    for key in _BY_LAYER:
        if isinstance(result.get(key), list) and len(result[key]) == count + drafts:
            result[key] = result[key][:count]
    for key in _CLAMPS:
        if any(result.pop(key, None) or ()):
            raise UnsupportedError(
                f"{source}: `{key}` is {values[key]!r:.100}; the decoder computes units without clamps."
            )
    types = result["layer_types"] = result.get("layer_types") or ["full_attention"] * count
    chosen, dense = result.pop("moe_layers_enum", None), result.pop("first_k_dense_replace", None)
    if result.get("mlp_layer_types") is None:
        numbers = range(_DENSE if dense is None else dense, count)
        if chosen is not None:
            numbers = {int(i) for i in (chosen.split(",") if isinstance(chosen, str) else chosen) if str(i).strip()}
        result["mlp_layer_types"] = ["sparse" if i in numbers else "dense" for i in range(count)]
    further = result.pop("attention_other_setting", None) or {}
    heads = result.get("num_sliding_attention_heads") or further.get("num_attention_heads")
    heads = result.get("num_attention_heads", 64) if heads is None else heads
    groups = result.get("num_key_value_heads", 8)
    check_value("num_sliding_attention_heads", heads, int, source, 1)
    if isinstance(groups, int) and groups and heads % groups:
        raise ShapeError(
            f"{source}: `num_sliding_attention_heads` is {heads}; expected a multiple of `num_key_value_heads` = "
            f"{groups}."
        )
    result["num_sliding_attention_heads"] = heads
    slides = {str(i): {"num_attention_heads": heads} for i, kind in enumerate(types) if kind == "sliding_attention"}
    layers = result.pop("per_layer_config", None)
    if layers is not None and {str(key): entry for key, entry in layers.items()} != slides:
        raise UnsupportedError(
            f"{source}: `per_layer_config` is {layers!r:.100}; expected `num_sliding_attention_heads` in the layers "
            "that `layer_types` calls 'sliding_attention', and nothing else."
        )
    if result.get("query_pre_attn_scalar") is None:
        result["query_pre_attn_scalar"] = result.get("head_dim", 128)
    return _rotations(result, types)


def _rotations(values: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """The keys with one rotation for each type of layer, from those of each layer."""
    theta, shares = values.pop("rope_theta", None), values.pop("partial_rotary_factors", None)
    scaling, new = values.pop("rope_scaling", None), values.get("rope_parameters") or {}
    if all(isinstance(new.get(kind), Mapping) for kind in types):
        return values
    values["rope_parameters"] = rotations = {}
    for kind in dict.fromkeys(types):
        i = types.index(kind)
        base = theta[i] if isinstance(theta, list) else theta or 10000.0
        rotations[kind] = {"rope_type": "default", "rope_theta": base}
        if shares:
            rotations[kind]["partial_rotary_factor"] = shares[i]
    if scaling and "full_attention" in rotations:
        rotations["full_attention"] |= scaling
    return values


STEP: Mapping[str, Family] = {
    "step3p5": Family(
        "Step3p5ForCausalLM",
        {
            **COMMON,
            **HEADS,
            **BIASES,
            **EXPERTS,
            **INNER,
            "moe_router_scaling_factor": "experts.scale",
            "n_routed_experts": "experts.count",
            "num_sliding_attention_heads": "sliding_attention.num_heads",
            "query_pre_attn_scalar": "query_scalar",
            "share_expert_dim": "experts.shared_size",
        },
        fields={
            "activation": "silu",
            "experts.method": "noaux_tc",
            "head_gate": True,
            "norm_offset": True,
            "qk_norm": "head",
        },
        defaults={
            "attention_bias": False,
            "head_dim": 128,
            "moe_intermediate_size": 1280,
            "moe_router_scaling_factor": 1.0,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "share_expert_dim": 1280,
            "tie_word_embeddings": False,
            **tokens(None, None, 1),
        },
        fixed={
            **dict.fromkeys(("norm_expert_weight", "use_head_wise_attn_gate", "use_moe_router_bias"), (True,)),
            **dict.fromkeys(("use_qk_norm", "zero_centered"), (True,)),
            **dict.fromkeys(("sink", "use_bidirectional_attention"), (False,)),
            **dict.fromkeys(("moe_router_activation", "scoring_func"), ("sigmoid",)),
            "gating": (True, "per-head"),
            "n_shared_experts": (1,),
        },
        ignored=("hidden_act", "mtp_layer_types", "mtp_mlp_layer_types", "need_fp32_gate"),
        aliases={
            **dict.fromkeys(("moe_num_experts", "num_experts", "num_local_experts"), "n_routed_experts"),
            "moe_top_k": "num_experts_per_tok",
            "num_attention_groups": "num_key_value_heads",
            "share_expert_dims": "share_expert_dim",
        },
        derive=step_values,
        layer_types="list",
        layer_keys=("mlp_layer_types",),
        partial=1.0,
        local_theta=10_000.0,
        unread=("vision_model.", "vit_large_projector."),
        tensors={
            "attention_gate": Tensor(PREFIX + "self_attn.g_proj.weight", True),
            "router": Tensor(PREFIX + "moe.gate.weight", True),
            "router_correction": Tensor(PREFIX + "moe.router_bias"),
            **{f"expert_{name}": Tensor(PREFIX + f"moe.{name}_proj.weight", True) for name in ("gate", "up", "down")},
            **{
                f"shared_{name}": Tensor(PREFIX + f"share_expert.{name}_proj.weight", True)
                for name in ("gate", "up", "down")
            },
        },
    ),
}
