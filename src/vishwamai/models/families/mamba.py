"""Families with state spaces (Mamba2), alone or next to attention and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import ShapeError
from vishwamai.models.families.family import (
    BIASES,
    COMMON,
    CORRECTED,
    MULTIPLIER_DEFAULTS,
    MULTIPLIERS,
    SILU,
    Family,
    tokens,
)
from vishwamai.models.layers.absent import NoFeedForward, NoMixer, NoMixerOfExperts
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.feed_forward import GATED, Ungated
from vishwamai.models.layers.mamba2 import Mamba2, mamba_tensors
from vishwamai.models.layers.mixture import DenseMixture, Mixture
from vishwamai.models.parameters import PREFIX, Tensor
from vishwamai.models.values import check_value

UNBOUNDED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], [0.0, 1e308], None)
_MIXERS = {"full_attention": Attention, "linear_attention": Mamba2}
IN_HEADS = {
    "mamba_conv_bias": "linear_attention.filter_bias",
    "mamba_d_conv": "linear_attention.width",
    "mamba_d_state": "linear_attention.state_dim",
    "mamba_expand": "linear_attention.expand",
    "mamba_n_groups": "linear_attention.groups",
    "mamba_n_heads": "linear_attention.heads",
    "mamba_proj_bias": "linear_attention.biases",
}
IN_HEADS_DEFAULTS: dict[str, object] = {
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
}
BACKBONE = "backbone.layers.{layer}."
BACKBONE_TENSORS = {
    **mamba_tensors(BACKBONE + "mixer."),
    "attention_norm": Tensor(BACKBONE + "norm.weight"),
    "embed": Tensor("backbone.embeddings.weight"),
    "norm": Tensor("backbone.norm_f.weight"),
}
TRAINING = ("rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max")
"""Keys of initial values and of training."""
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def check_heads(values: Mapping[str, Any], expand: str, heads: str, dim: str, source: str) -> None:
    """Checks that the heads divide `expand * hidden_size`, and that `dim` says what follows from it.

    Raises:
      ShapeError: they do not, or a value has another type than its key.
    """
    defaults = {**IN_HEADS_DEFAULTS, "expand": 2, "num_heads": 128, "hidden_size": 4096}
    sizes = {key: values.get(key, defaults.get(key)) for key in (expand, heads, "hidden_size")}
    for key, value in sizes.items():
        check_value(key, value, int, source, 1)
    inner, count = sizes[expand] * sizes["hidden_size"], sizes[heads]
    if inner % count or values.get(dim, "auto") not in ("auto", inner // count):
        raise ShapeError(
            f"{source}: `{heads}` is {count} and `{dim}` is {values.get(dim)!r}; expected heads of one size, of "
            f"`{expand}` * `hidden_size` = {inner} features together."
        )


def mamba2_values(values: Mapping[str, object], source: str) -> dict[str, object]:
    """The keys of Mamba2, with `layer_types`.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: the sizes of the heads contradict one another.

    >>> mamba2_values({"hidden_size": 64, "num_heads": 8, "head_dim": 16, "num_hidden_layers": 1}, "")["layer_types"]
    ['linear_attention']
    """
    check_heads({"head_dim": 64, **values}, "expand", "num_heads", "head_dim", source)
    count = values.get("num_hidden_layers")
    types = {"layer_types": ["linear_attention"] * count} if isinstance(count, int) and 0 < count < 10_000 else {}
    return {**types, **values}


def bamba_values(values: Mapping[str, object], source: str) -> dict[str, object]:
    """The keys of Bamba without `mamba_d_head`, which follows from others.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: the sizes of the heads contradict one another.

    >>> bamba_values({"hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16}, "config.json")
    {'hidden_size': 64, 'mamba_n_heads': 8}
    """
    check_heads(values, "mamba_expand", "mamba_n_heads", "mamba_d_head", source)
    return {key: value for key, value in values.items() if key != "mamba_d_head"}


def granite_values(values: Mapping[str, object], source: str) -> dict[str, object]:
    """The keys of Granite 4 with `layer_types`, and without those of experts where it has none.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: the sizes of the heads contradict one another.

    >>> granite_values({"num_hidden_layers": 1, "num_local_experts": 0}, "config.json")["num_local_experts"]
    """
    result = bamba_values(values, source)
    count = values.get("num_hidden_layers")
    if values.get("layer_types") is None and isinstance(count, int) and 0 < count < 10_000:
        result["layer_types"] = ["linear_attention"] * count
    if values.get("num_local_experts") == 0:
        result |= dict.fromkeys(("num_local_experts", "num_experts_per_tok", "intermediate_size"))
    return result


def nemotron_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys of Nemotron-H with the types of its layers in words.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      ShapeError: `hybrid_override_pattern` has a letter without a meaning, or `layers_block_type` is no list of types.

    >>> nemotron_values({"hybrid_override_pattern": "M*-"}, "config.json")["layers_block_type"]
    ['linear_attention', 'full_attention', 'mlp']
    """
    result = {key: value for key, value in values.items() if key != "hybrid_override_pattern"}
    pattern, types = values.get("hybrid_override_pattern"), values.get("layers_block_type")
    if types is None and pattern is not None:
        check_value("hybrid_override_pattern", pattern, str, source)
        if not set(pattern) <= set(_LETTERS):
            raise ShapeError(f"{source}: `hybrid_override_pattern` is {pattern!r}; expected {', '.join(_LETTERS)}.")
        types = [_LETTERS[letter] for letter in pattern]
    types = ["linear_attention", "moe", "full_attention", "mlp"] if types is None else types
    check_value("layers_block_type", types, list, source)
    if not types:
        raise ShapeError(f"{source}: `layers_block_type` is empty; expected a type for each layer.")
    return {**result, "layers_block_type": types, "num_hidden_layers": len(types)}


MAMBA: Mapping[str, Family] = {
    "mamba2": Family(
        "Mamba2ForCausalLM",
        {
            **{key: COMMON[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")},
            **{key: COMMON[key] for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
            **SILU,
            "conv_kernel": "linear_attention.width",
            "expand": "linear_attention.expand",
            "head_dim": "linear_attention.head_dim",
            "layer_norm_epsilon": "norm_eps",
            "n_groups": "linear_attention.groups",
            "num_heads": "linear_attention.heads",
            "state_size": "linear_attention.state_dim",
            "use_bias": "linear_attention.biases",
            "use_conv_bias": "linear_attention.filter_bias",
        },
        # Sizes of what no layer has, and more positions than a row has tokens.
        {"intermediate_size": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "max_positions": 2**20},
        {
            "conv_kernel": 4,
            "expand": 2,
            "head_dim": 64,
            "initializer_range": 0.1,
            "layer_norm_epsilon": 1e-5,
            "n_groups": 8,
            "num_heads": 128,
            "state_size": 128,
            "tie_word_embeddings": False,
            "use_bias": False,
            "use_conv_bias": True,
            **tokens(0, 2, 1),
        },
        fixed={"time_step_limit": UNBOUNDED},
        ignored=(
            *(*TRAINING, "time_step_min", "time_step_rank", "chunk_size", "intermediate_size", "num_attention_heads"),
            *("num_key_value_heads", "max_position_embeddings"),
        ),
        derive=mamba2_values,
        layer_types="types",
        types_key=None,
        global_rope=None,
        mixers={"linear_attention": Mamba2},
        feed_forward=NoFeedForward(),
        tensors=BACKBONE_TENSORS,
    ),
    "bamba": Family(
        "BambaForCausalLM",
        {**COMMON, **SILU, **BIASES, **IN_HEADS, "mlp_bias": "mlp_bias"},
        defaults={
            **IN_HEADS_DEFAULTS,
            "attention_bias": False,
            "mlp_bias": False,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            **tokens(1, 2, 0),
        },
        fixed={"time_step_limit": UNBOUNDED},
        ignored=("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"),
        derive=bamba_values,
        layer_keys=("attn_layer_indices",),
        partial=0.5,
        mixers=_MIXERS,
        tensors={
            **{f"{name}": Tensor(PREFIX + f"feed_forward.{name}_proj.weight", True) for name in GATED},
            **{f"{name}_bias": Tensor(PREFIX + f"feed_forward.{name}_proj.bias") for name in GATED},
            "mlp_norm": Tensor(PREFIX + "pre_ff_layernorm.weight"),
            "norm": Tensor("model.final_layernorm.weight"),
        },
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {
            **COMMON,
            **SILU,
            **BIASES,
            **MULTIPLIERS,
            **IN_HEADS,
            "intermediate_size": "experts.inner_size",
            "num_experts_per_tok": "experts.top_k",
            "num_local_experts": "experts.count",
            "shared_intermediate_size": "intermediate_size",
        },
        defaults={
            **IN_HEADS_DEFAULTS,
            **MULTIPLIER_DEFAULTS,
            "attention_bias": False,
            "intermediate_size": 11008,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "shared_intermediate_size": 1024,
            **tokens(1, 2),
        },
        fixed={"time_step_limit": UNBOUNDED, "normalization_function": ("rmsnorm",)},
        ignored=("mamba_chunk_size", "init_method"),
        aliases={"layers_block_type": "layer_types"},
        derive=granite_values,
        constants={"num_local_experts": 0},
        layer_types="types",
        layer_keys=("position_embedding_type",),
        mixers=_MIXERS,
        mixture=DenseMixture(),
        tensors={
            "router": Tensor(PREFIX + "block_sparse_moe.router.layer.weight", True),
            "expert_gate": Tensor(PREFIX + "block_sparse_moe.input_linear.weight", True, "gate"),
            "expert_up": Tensor(PREFIX + "block_sparse_moe.input_linear.weight", True, "up"),
            "expert_down": Tensor(PREFIX + "block_sparse_moe.output_linear.weight", True),
            **{
                f"{start}{name}": Tensor(PREFIX + f"shared_mlp.{module}_linear.weight", True, part)
                for start in ("", "shared_")
                for name, module, part in (("gate", "input", "gate"), ("up", "input", "up"), ("down", "output", None))
            },
        },
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {
            **{key: field for key, field in COMMON.items() if field != "norm_eps"},
            **{key: field for key, field in CORRECTED.items() if field not in ("dense_layers", "experts.shared")},
            "conv_kernel": "linear_attention.width",
            "head_dim": "head_dim",
            "layer_norm_epsilon": "norm_eps",
            "mamba_head_dim": "linear_attention.head_dim",
            "mamba_num_heads": "linear_attention.heads",
            "mlp_hidden_act": "activation",
            "moe_latent_size": "experts.latent_size",
            "moe_shared_expert_intermediate_size": "experts.shared_size",
            "n_groups": "linear_attention.groups",
            "ssm_state_size": "linear_attention.state_dim",
            "time_step_min": "linear_attention.least_step",
            "use_bias": "linear_attention.biases",
            "use_conv_bias": "linear_attention.filter_bias",
        },
        {"experts.method": "noaux_tc", "experts.gated": False, "linear_attention.activation": "silu"},
        {
            "conv_kernel": 4,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
            "mamba_head_dim": 64,
            "mamba_num_heads": 128,
            "mlp_hidden_act": "relu2",
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "n_group": 1,
            "n_groups": 8,
            "n_routed_experts": 8,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "routed_scaling_factor": 1.0,
            "ssm_state_size": 128,
            "time_step_min": 0.001,
            "topk_group": 1,
            "use_bias": False,
            "use_conv_bias": True,
            **tokens(1, 2, 0),
        },
        fixed={
            "attention_head_dim": (128,),
            "mlp_bias": (False,),
            "mamba_hidden_act": ("silu",),
            "sliding_window": (None,),
            "tie_word_embeddings": (False,),  # the class has a head of its own in any case
        },
        ignored=(
            *(*TRAINING, "time_step_limit", "chunk_size", "expand", "attention_bias", "mamba_proj_bias"),
            *("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type", "n_shared_experts"),
            *("mtp_hybrid_override_pattern", "norm_eps", "num_logits_to_keep", "partial_rotary_factor"),
            *("rms_norm_eps", "time_step_rank", "use_mamba_kernels"),
        ),
        aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
        derive=nemotron_values,
        types_key="layers_block_type",
        layer_types="types",
        global_rope=None,
        mixers={**_MIXERS, "mlp": NoMixer, "moe": NoMixerOfExperts},
        feed_forwards={
            **dict.fromkeys(("full_attention", "linear_attention"), NoFeedForward()),
            "mlp": Ungated(),
            "moe": Mixture(),
        },
        unread=("mtp.",),
        tensors={
            **BACKBONE_TENSORS,
            "mlp_norm": Tensor(BACKBONE + "norm.weight"),
            **{
                name: Tensor(BACKBONE + f"mixer.{module}.weight", True)
                for name, module in (
                    *((name, f"{name[0]}_proj") for name in ("query", "key", "value", "output")),
                    *((name, f"{name}_proj") for name in ("up", "down")),
                    *((f"shared_{name}", f"shared_experts.{name}_proj") for name in ("up", "down")),
                    *((f"expert_{name}", f"experts.{{expert}}.{name}_proj") for name in ("up", "down")),
                    ("router", "gate"),
                    ("latent_enter", "fc1_latent_proj"),
                    ("latent_leave", "fc2_latent_proj"),
                )
            },
            "router_correction": Tensor(BACKBONE + "mixer.gate.e_score_correction_bias"),
        },
    ),
}
