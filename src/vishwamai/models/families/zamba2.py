"""Zamba2: Mamba2 layers, before some of which a shared block of attention goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import ShapeError
from vishwamai.models.families.family import COMMON, Family, tokens
from vishwamai.models.families.mamba import TRAINING, check_heads
from vishwamai.models.layers.absent import NoFeedForward
from vishwamai.models.layers.mamba2 import Mamba2
from vishwamai.models.layers.shared_block import SharedBlockAndMamba
from vishwamai.models.parameters import Tensor
from vishwamai.models.values import check_value

_LONG = 16384
_PUBLISHED = "m" + "mmmmmh" * 7 + "mmmmh" + "mmmh" + "mm"
"""The layers of a file that does not give them."""
_SIZES = {"hidden_size": 2560, "mamba_expand": 2, "n_mamba_heads": 8, "num_attention_heads": 32}
_MAMBA = ("mamba_expand", "n_mamba_heads", "mamba_headdim")


def zamba2_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys of Zamba2 with the types of its layers, and those that follow from others.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: sizes contradict one another, or have another type than their key.

    >>> zamba2_values({"layers_block_type": ["mamba", "hybrid"]}, "config.json")["hybrid_layer_ids"]
    [1]
    """
    result: dict[str, Any] = {**_SIZES, **values}
    check_heads(result, *_MAMBA, source)
    hidden, heads, shared = result["hidden_size"], result["num_attention_heads"], result.get("num_key_value_heads")
    check_value("num_attention_heads", heads, int, source, 1)
    dim = result["attention_head_dim"] = values.get("attention_head_dim") or 2 * hidden // heads
    check_value("attention_head_dim", dim, int, source, 1)
    adapted = values.get("use_shared_attention_adapter")
    if adapted and (shared not in (None, heads) or heads * dim != 2 * hidden):
        raise ShapeError(
            f"{source}: `num_attention_heads` is {heads}, `num_key_value_heads` {shared} and `attention_head_dim` "
            f"{dim}; expected as many heads of keys, and 2 * `hidden_size` = {2 * hidden} features of all heads, with "
            "`use_shared_attention_adapter`."
        )
    types = values.get("layers_block_type")
    if types is None:
        types = ["hybrid" if letter == "h" else "linear_attention" for letter in _PUBLISHED]
    check_value("layers_block_type", types, list, source)
    uses = [i for i, kind in enumerate(types) if kind == "hybrid"]
    following = {"attention_hidden_size": 2 * hidden, "hybrid_layer_ids": uses}
    for key, value in following.items():
        if result.pop(key, None) not in (None, value):
            raise ShapeError(
                f"{source}: `{key}` is {values[key]!r:.100}; expected {value!r:.100}, by `hidden_size` and "
                "`layers_block_type`. Leave it out."
            )
    result |= {"layers_block_type": types, "hybrid_layer_ids": uses}
    for key in ("kv_channels", "mamba_headdim"):
        result.pop(key, None)
    if values.get("intermediate_size") in (None, 0):
        result["intermediate_size"] = 4 * hidden
    if result.pop("use_long_context", False):
        result["max_position_embeddings"] = _LONG
    return result


ZAMBA2: Mapping[str, Family] = {
    "zamba2": Family(
        "Zamba2ForCausalLM",
        {
            **COMMON,
            "adapter_rank": "hybrid.rank",
            "attention_head_dim": "head_dim",
            "hidden_act": "activation",
            "hybrid_layer_ids": "hybrid.uses",
            "mamba_d_conv": "linear_attention.width",
            "mamba_d_state": "linear_attention.state_dim",
            "mamba_expand": "linear_attention.expand",
            "mamba_ngroups": "linear_attention.groups",
            "n_mamba_heads": "linear_attention.heads",
            "num_mem_blocks": "hybrid.blocks",
            "time_step_min": "linear_attention.least_step",
            "use_shared_attention_adapter": "hybrid.adapted",
        },
        {
            "key_scale": math.sqrt(2.0),  # logits are divided by the root of half of a head's features
            "linear_attention.activation": "silu",
            "linear_attention.norm_eps": 1e-5,
        },
        {
            "adapter_rank": 128,
            "hidden_act": "gelu",
            "mamba_d_conv": 4,
            "mamba_d_state": 64,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "max_position_embeddings": 4096,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "time_step_min": 0.001,
            "use_shared_attention_adapter": False,
            **tokens(1, 2, 0),
        },
        fixed={
            "add_bias_linear": (False,),
            "tie_word_embeddings": (True,),  # transformers would make blocks of their own for each use, too
        },
        ignored=(
            *(key for key in TRAINING if key != "residual_in_fp32"),
            *("chunk_size", "num_logits_to_keep", "num_query_groups", "use_conv_bias", "use_mamba_kernels"),
            "use_mem_eff_path",
        ),
        aliases={"layer_types": "layers_block_type", "head_dim": "attention_head_dim"},
        derive=zamba2_values,
        types_key="layers_block_type",
        layer_types="types",
        layer_keys=("use_mem_rope",),
        mixers={"linear_attention": Mamba2, "hybrid": SharedBlockAndMamba},
        norms={"hybrid": "mixer"},
        feed_forward=NoFeedForward(),
        tensors={"norm": Tensor("model.final_layernorm.weight")},
    ),
}
