"""Families with short convolutions in most layers, and attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.models.families.family import COMMON, EXPERTS, INNER, Family, tokens
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.short_conv import ShortConv
from vishwamai.models.parameters import PREFIX, Tensor
from vishwamai.models.values import check_value


def lfm2_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys that later ones derive: `intermediate_size` as its adjustment makes it, and `layer_types`.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: a value has another type than its key.

    >>> lfm2_values({"block_ff_dim": 6656, "block_multiple_of": 256}, "config.json")["intermediate_size"]
    4608
    """
    keys = ("block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")
    result = {key: value for key, value in values.items() if key not in (*keys, "full_attn_idxs")}
    inner = values.get("block_ff_dim", values.get("intermediate_size"))
    factor, multiple = values.get("block_ffn_dim_multiplier", 1.0), values.get("block_multiple_of", 256)
    if inner is not None:
        check_value("block_ff_dim" if "block_ff_dim" in values else "intermediate_size", inner, int, source, 1)
        if values.get("block_auto_adjust_ff_dim", True):
            check_value("block_multiple_of", multiple, int, source, 1)
            inner = int(2 * inner / 3)
            if factor is not None:
                check_value("block_ffn_dim_multiplier", factor, float, source)
                inner = multiple * -(-int(factor * inner) // multiple)
        result["intermediate_size"] = inner
    chosen, count = values.get("full_attn_idxs"), values.get("num_hidden_layers")
    if values.get("layer_types") is None and isinstance(chosen, list) and isinstance(count, int):
        result["layer_types"] = ["full_attention" if i in chosen else "conv" for i in range(count)]
    return result


_KEYS = {
    **{key: field for key, field in COMMON.items() if field != "norm_eps"},
    "norm_eps": "norm_eps",
    "conv_L_cache": "conv.width",
}
_DEFAULTS: dict[str, object] = {
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
    "num_key_value_heads": 8,
    **tokens(1, 2, 0),
}
_NETWORK = PREFIX + "feed_forward."
_TENSORS = {
    "norm": Tensor("model.embedding_norm.weight"),
    "attention_norm": Tensor(PREFIX + "operator_norm.weight"),
    "mlp_norm": Tensor(PREFIX + "ffn_norm.weight"),
    "output": Tensor(PREFIX + "self_attn.out_proj.weight", True),
    "query_norm": Tensor(PREFIX + "self_attn.q_layernorm.weight"),
    "key_norm": Tensor(PREFIX + "self_attn.k_layernorm.weight"),
    **{
        f"{start}{name}": Tensor(f"{_NETWORK}{module}{short}.weight", True)
        for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        for start, module in (("", ""), ("expert_", "experts.{expert}."))
    },
    "router": Tensor(_NETWORK + "gate.weight", True),
    "router_correction": Tensor(_NETWORK + "expert_bias"),
}

CONV: Mapping[str, Family] = {
    "lfm2": Family(
        "Lfm2ForCausalLM",
        _KEYS,
        {"qk_norm": "head"},
        _DEFAULTS,
        fixed={"conv_bias": (False,), "block_use_swiglu": (True,), "use_pos_enc": (True,)},
        ignored=(
            *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
            *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
        ),
        aliases={"tie_embedding": "tie_word_embeddings"},
        derive=lfm2_values,
        constants={"block_auto_adjust_ff_dim": False},
        layer_types="types",
        theta=1_000_000.0,
        mixers={"full_attention": Attention, "conv": ShortConv},
        tensors=_TENSORS,
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        {
            **_KEYS,
            **EXPERTS,
            **INNER,
            "norm_topk_prob": "experts.normalize",
            "num_dense_layers": "dense_layers",
            "num_experts": "experts.count",
            "routed_scaling_factor": "experts.scale",
        },
        {"qk_norm": "head", "experts.method": "noaux_tc"},
        {
            **_DEFAULTS,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.0,
        },
        fixed={"conv_bias": (False,), "use_expert_bias": (True,)},
        aliases={"tie_embedding": "tie_word_embeddings", "num_local_experts": "num_experts"},
        layer_types="types",
        theta=1_000_000.0,
        mixers={"full_attention": Attention, "conv": ShortConv},
        tensors=_TENSORS,
    ),
}
