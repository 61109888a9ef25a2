"""Falcon-H1: attention and a state space on the same input in every layer, with factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import ShapeError
from vishwamai.models.families.family import BIASES, COMMON, HEADS, SILU, Family, tokens
from vishwamai.models.families.mamba import IN_HEADS, IN_HEADS_DEFAULTS, TRAINING, UNBOUNDED
from vishwamai.models.layers.attention_and_mamba import AttentionAndMamba
from vishwamai.models.layers.feed_forward import GATED
from vishwamai.models.parameters import PREFIX, Tensor
from vishwamai.models.values import check_value

_FACTORS = {"mlp_multipliers": 2, "ssm_multipliers": 5}
"""Keys of lists of factors, and how many they have."""


def falcon_h1_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys of Falcon-H1 without `mamba_d_head`, which follows from others, and with every factor.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: the sizes of the heads contradict one another, or a list of factors has another length.

    >>> falcon_h1_values({"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, "config.json")["mlp_multipliers"]
    [1.0, 1.0]
    """
    result = {key: value for key, value in values.items() if key != "mamba_d_head"}
    defaults = {"mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_expand": 2, "hidden_size": 4096}
    sizes = {key: values.get(key, default) for key, default in defaults.items()}
    for key, value in sizes.items():
        if value is not None or key != "mamba_d_ssm":
            check_value(key, value, int, source, 1)
    inner = sizes["mamba_d_ssm"] or sizes["mamba_expand"] * sizes["hidden_size"]
    heads, dim = sizes["mamba_n_heads"], values.get("mamba_d_head", "auto")
    if inner % heads or dim not in ("auto", inner // heads):
        raise ShapeError(
            f"{source}: `mamba_n_heads` is {heads} and `mamba_d_head` is {dim!r}; expected heads of one size, of "
            f"`mamba_d_ssm` (or `mamba_expand` * `hidden_size`) = {inner} features together."
        )
    for key, count in _FACTORS.items():
        if result.get(key) is None:
            result[key] = [1.0] * count
        if not isinstance(result[key], list) or len(result[key]) != count:
            raise ShapeError(f"{source}: `{key}` is {result[key]!r}; expected a list of {count} numbers.")
    return result


FALCON_H1: Mapping[str, Family] = {
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **{key: field.replace("linear_attention", "full_attention") for key, field in IN_HEADS.items()},
            "attention_in_multiplier": "full_attention.attention_input",
            "attention_out_multiplier": "full_attention.attention_output",
            "embedding_multiplier": "embedding_multiplier",
            "key_multiplier": "key_scale",
            "lm_head_multiplier": "logit_multiplier",
            "mamba_d_ssm": "full_attention.inner_size",
            "mamba_norm_before_gate": "full_attention.norm_first",
            "mamba_rms_norm": "full_attention.normalized",
            "mlp_bias": "mlp_bias",
            "mlp_multipliers": "mlp_multipliers",
            "projectors_bias": "full_attention.output_bias",
            "ssm_in_multiplier": "full_attention.space_input",
            "ssm_multipliers": "full_attention.part_scales",
            "ssm_out_multiplier": "full_attention.space_output",
        },
        defaults={
            **IN_HEADS_DEFAULTS,
            "attention_bias": False,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "mlp_bias": False,
            "num_key_value_heads": 8,
            "projectors_bias": False,
            "rms_norm_eps": 1e-5,
            **tokens(1, 2, 0),
        },
        fixed={"attn_layer_indices": (None,), "mamba_use_mlp": (True,), "time_step_limit": UNBOUNDED},
        ignored=(
            *(*TRAINING, "mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep", "time_step_min"),
            *("time_step_rank", "layer_types", "layers_block_type"),
        ),
        derive=falcon_h1_values,
        mixers={"full_attention": AttentionAndMamba},
        tensors={
            **{f"{name}": Tensor(PREFIX + f"feed_forward.{name}_proj.weight", True) for name in GATED},
            **{f"{name}_bias": Tensor(PREFIX + f"feed_forward.{name}_proj.bias") for name in GATED},
            "mlp_norm": Tensor(PREFIX + "pre_ff_layernorm.weight"),
            "norm": Tensor("model.final_layernorm.weight"),
        },
    ),
}
