"""Families with the state space of channels of the first Mamba, alone or next to attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.models.families.family import COMMON, EXPERTS, SILU, Family, tokens
from vishwamai.models.families.mamba import BACKBONE, BACKBONE_TENSORS, TRAINING
from vishwamai.models.layers.absent import NoFeedForward
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.feed_forward import GATED
from vishwamai.models.layers.mamba1 import Mamba1, scan_tensors
from vishwamai.models.parameters import PREFIX, Tensor
from vishwamai.models.values import check_value

_KERNELS = ("use_associative_scan", "use_mambapy")
_FALCON = {"falcon_mamba": {"mixer_rms_eps": "linear_attention.norms_eps"}, "mamba": {}}
"""Keys that one of the two families of layers without attention has."""


def mamba_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys of Mamba with `layer_types`, and with the sizes that follow from others.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: a size has another type than its key.

    >>> mamba_values({"hidden_size": 64, "time_step_rank": "auto"}, "config.json")
    {'hidden_size': 64, 'time_step_rank': 4, 'intermediate_size': 128}
    """
    result, count = _with_rank(values, "time_step_rank", source), values.get("num_hidden_layers")
    if isinstance(count, int) and 0 < count < 10_000:
        result["layer_types"] = ["linear_attention"] * count
    if "intermediate_size" not in values:
        expand = values.get("expand", 2)
        check_value("expand", expand, int, source)
        result["intermediate_size"] = expand * values.get("hidden_size", 768)
    return result


def jamba_values(values: Mapping[str, object], source: str) -> dict[str, object]:
    """The keys of Jamba with the rank of the steps, and without those of experts where it has one only.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: `hidden_size` is not a whole number.

    >>> jamba_values({"hidden_size": 60, "num_experts": 1}, "config.json")
    {'hidden_size': 60, 'num_experts': None, 'mamba_dt_rank': 4, 'num_experts_per_tok': None}
    """
    result = _with_rank(values, "mamba_dt_rank", source)
    if values.get("num_experts") == 1:
        result |= {"num_experts": None, "num_experts_per_tok": None}
    return result


def _with_rank(values: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    """The values with a rank of the steps: a sixteenth of `hidden_size` where they say nothing else."""
    if "hidden_size" not in values or values.get(key, "auto") != "auto":
        return dict(values)
    check_value("hidden_size", values["hidden_size"], int, source)
    return {**values, key: -(-values["hidden_size"] // 16)}


SELECTIVE: Mapping[str, Family] = {
    **{
        name: Family(
            architecture,
            {
                **{key: COMMON[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")},
                **{key: COMMON[key] for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
                **SILU,
                "conv_kernel": "linear_attention.width",
                "expand": "linear_attention.expand",
                "intermediate_size": "linear_attention.inner_size",
                "layer_norm_epsilon": "norm_eps",
                "state_size": "linear_attention.state_dim",
                "time_step_rank": "linear_attention.step_rank",
                "use_bias": "linear_attention.biases",
                "use_conv_bias": "linear_attention.filter_bias",
                **_FALCON[name],
            },
            # Sizes of what no layer has, and more positions than a row has tokens.
            {
                "intermediate_size": 1,
                "num_heads": 1,
                "num_kv_heads": 1,
                "head_dim": 1,
                "max_positions": 2**20,
                **({"linear_attention.norms": "plain"} if _FALCON[name] else {}),
            },
            {
                "conv_kernel": 4,
                "expand": 2,
                "initializer_range": 0.1,
                "layer_norm_epsilon": 1e-5,
                "state_size": 16,
                "tie_word_embeddings": True,
                "use_bias": False,
                "use_conv_bias": True,
                **({"mixer_rms_eps": 1e-6} if _FALCON[name] else {}),
                **tokens(0, 0, 0),
            },
            ignored=(
                *(*TRAINING, *_KERNELS, "time_step_min", "time_step_scale", "time_step_init_scheme"),
                *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
                *("use_falcon_mambapy", "d_inner", "d_model", "n_layer", "ssm_cfg", "fused_add_norm", "rms_norm"),
            ),
            derive=mamba_values,
            layer_types="types",
            types_key=None,
            global_rope=None,
            mixers={"linear_attention": Mamba1},
            feed_forward=NoFeedForward(),
            tensors={**BACKBONE_TENSORS, **scan_tensors(BACKBONE + "mixer.")},
        )
        for name, architecture in (("mamba", "MambaForCausalLM"), ("falcon_mamba", "FalconMambaForCausalLM"))
    },
    "jamba": Family(
        "JambaForCausalLM",
        {
            **COMMON,
            **SILU,
            **EXPERTS,
            "mamba_conv_bias": "linear_attention.filter_bias",
            "mamba_d_conv": "linear_attention.width",
            "mamba_d_state": "linear_attention.state_dim",
            "mamba_dt_rank": "linear_attention.step_rank",
            "mamba_expand": "linear_attention.expand",
            "mamba_proj_bias": "linear_attention.biases",
            "num_experts": "experts.count",
        },
        {"experts.normalize": False, "linear_attention.norms": "scaled"},
        {
            "attn_layer_offset": 4,
            "attn_layer_period": 8,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "mamba_proj_bias": False,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            **tokens(1, 2, 0),
        },
        fixed={"sliding_window": (None,)},
        ignored=(
            *_KERNELS,
            "use_mamba_kernels",
            "mamba_inner_layernorms",
            "num_logits_to_keep",
            "calc_logits_for_entire_prompt",
        ),
        aliases={"num_local_experts": "num_experts"},
        derive=jamba_values,
        constants={"num_experts": 1},
        layer_keys=("attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset"),
        global_rope=None,
        mixers={"full_attention": Attention, "linear_attention": Mamba1},
        tensors={
            **{name: Tensor(PREFIX + f"feed_forward.{name}_proj.weight", True) for name in GATED},
            **{
                f"expert_{name}": Tensor(PREFIX + f"feed_forward.experts.{{expert}}.{name}_proj.weight", True)
                for name in GATED
            },
            "mlp_norm": Tensor(PREFIX + "pre_ff_layernorm.weight"),
            "norm": Tensor("model.final_layernorm.weight"),
            "router": Tensor(PREFIX + "feed_forward.router.weight", True),
        },
    ),
}
