"""Kimi Linear: delta attention in three of four layers, and latent attention without rotation in the fourth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import ShapeError
from vishwamai.models.families.family import BIASES, COMMON, INNER, SILU, Family, tokens
from vishwamai.models.layers.feed_forward import GATED
from vishwamai.models.layers.latent import LatentAttention
from vishwamai.models.layers.separate_delta import KimiDelta
from vishwamai.models.parameters import PREFIX, Tensor
from vishwamai.models.values import check_value

_MOST_LAYERS = 10_000  # more are declined with the other sizes, before anything is made of them
_NETWORK = PREFIX + "block_sparse_moe."
_RENAMED = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
}


def kimi_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys of Kimi Linear in the form of transformers 5: without `linear_attn_config`, and with a type of mixer and
    of feed-forward network for every layer.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: a value has another type than its key, or a layer has no type.

    >>> kimi_values({"num_hidden_layers": 2}, "config.json")["mlp_layer_types"]
    ['dense', 'sparse']
    """
    derived = ("linear_attn_config", "first_k_dense_replace", "rope_parameters", "rope_scaling", "rope_theta")
    result = {key: value for key, value in values.items() if key not in derived}  # no layer rotates
    count = values.get("num_hidden_layers", 27)
    check_value("num_hidden_layers", count, int, source, 1)
    inner = values.get("linear_attn_config") or {}
    check_value("linear_attn_config", inner, dict, source)
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    result |= {name: inner[key] for key, name in names.items() if key in inner}
    if result.get("layer_types") is None and count <= _MOST_LAYERS:
        full, linear = inner.get("full_attn_layers"), inner.get("kda_layers")
        types = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)]
        if isinstance(full, list) and isinstance(linear, list):
            if sorted([*full, *linear]) != [*range(1, count + 1)]:
                raise ShapeError(f"{source}: `linear_attn_config` has layers {full} and {linear}; expected each once.")
            types = ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
        result["layer_types"] = types
    if result.get("mlp_layer_types") is None and count <= _MOST_LAYERS:
        dense = values.get("first_k_dense_replace", 1)
        check_value("first_k_dense_replace", dense, int, source, 0)
        result["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(count)]
    return result


KIMI: Mapping[str, Family] = {
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        {
            **{key: field for key, field in COMMON.items() if key not in _RENAMED},
            **SILU,
            **BIASES,
            **INNER,
            "kv_lora_rank": "latent.kv_rank",
            "linear_conv_kernel_dim": "linear_attention.width",
            "linear_head_dim": "linear_attention.value_dim",
            "linear_num_heads": "linear_attention.value_heads",
            "model_max_length": "max_positions",
            "moe_renormalize": "experts.normalize",
            "num_expert_group": "experts.num_groups",
            "num_experts": "experts.count",
            "num_experts_per_token": "experts.top_k",
            "num_shared_experts": "experts.shared",
            "q_lora_rank": "latent.query_rank",
            "qk_nope_head_dim": "latent.nope_dim",
            "qk_rope_head_dim": "latent.rope_dim",
            "routed_scaling_factor": "experts.scale",
            "topk_group": "experts.top_groups",
            "v_head_dim": "latent.value_dim",
        },
        fields={"experts.method": "noaux_tc"},
        defaults={
            "attention_bias": False,
            "kv_lora_rank": 512,
            "linear_conv_kernel_dim": 4,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "model_max_length": 1048576,
            "moe_intermediate_size": 1024,
            "moe_renormalize": True,
            "num_expert_group": 1,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_key_value_heads": 32,
            "num_shared_experts": 1,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
            "v_head_dim": 128,
            **tokens(163584, 163586, 163839),
        },
        fixed={
            "mla_use_nope": (True,),
            "moe_layer_freq": (1,),
            "moe_router_activation_func": ("sigmoid",),
            "use_grouped_topk": (True,),
        },
        ignored=("head_dim", "pretraining_tp", "qk_head_dim"),
        aliases=_RENAMED,
        derive=kimi_values,
        layer_types="types",
        layer_keys=("mlp_layer_types",),
        global_rope=None,
        mixers={"full_attention": LatentAttention, "linear_attention": KimiDelta},
        renamed={f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in GATED},  # transformers writes so
        tensors={
            "router": Tensor(_NETWORK + "gate.weight", True),
            "router_correction": Tensor(_NETWORK + "gate.e_score_correction_bias"),
            **{f"shared_{name}": Tensor(f"{_NETWORK}shared_experts.{name}_proj.weight", True) for name in GATED},
            **{
                f"expert_{name}": Tensor(f"{_NETWORK}experts.{{expert}}.{short}.weight", True)
                for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
            },
        },
    ),
}
