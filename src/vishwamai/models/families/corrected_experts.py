"""Families whose experts are chosen by scores with a learned correction, which balances their loads without a loss.

Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024); DeepSeek-V3 has the sigmoid
scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vishwamai.core.errors import UnsupportedError
from vishwamai.models.families.experts import MIXTRAL_TENSORS
from vishwamai.models.families.family import (
    BIASES,
    COMMON,
    CORRECTED,
    EXPERTS,
    EXTRA_LAYER,
    HEADS,
    INNER,
    SILU,
    Family,
    tokens,
)
from vishwamai.models.layers.feed_forward import GATED
from vishwamai.models.parameters import PREFIX, Tensor

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

_GLM_ROUTING: Mapping[str, object] = {
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
"""Defaults of GLM-4.5's experts and of those who took them over."""

_SIGMOID = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid", "noaux_tc"), "moe_layer_freq": (1,)}


def _bailing(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The keys of Ling and Ring, versions 1 and 2, without those that others state too.

    Raises:
      UnsupportedError: they contradict one another.
    """
    sigmoid = values.get("score_function") == "sigmoid"
    size, shared = (values.get(key) for key in ("moe_intermediate_size", "num_shared_experts"))
    allowed: Mapping[str, tuple[object, ...]] = {
        "moe_router_enable_expert_bias": (sigmoid, None),
        "moe_shared_expert_intermediate_size": (size, None) if shared == 1 else (None,),
    }
    if not sigmoid:
        allowed = {**allowed, "n_group": (1, None), "topk_group": (1, None)}
    for key, choices in allowed.items():
        if key in values and values[key] not in choices:
            raise UnsupportedError(
                f"{source}: `{key}` is {values[key]!r}; the decoder computes bailing_moe with `score_function` = "
                f"{values.get('score_function')!r} and {choices[0]!r} there only."
            )
    unread = ("moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size")
    return {key: value for key, value in values.items() if key not in unread}


def _bailing_further(config: ModelConfig) -> Mapping[str, object]:
    assert config.experts is not None
    return {"moe_router_enable_expert_bias": config.experts.method == "noaux_tc"}


def _minimax(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The keys of MiniMax M2 without the types of its layers, all of which attend to everything.

    Raises:
      UnsupportedError: a layer has another type.
    """
    types = values.get("attn_type_list")
    if types is not None and not (isinstance(types, list) and all(kind == 1 for kind in types)):
        raise UnsupportedError(
            f"{source}: `attn_type_list` is {types!r:.80}; the decoder computes minimax_m2 with 1 for each layer only."
        )
    return {key: value for key, value in values.items() if key != "attn_type_list"}


CORRECTED_MIXTURES: Mapping[str, Family] = {
    "bailing_moe": Family(
        "BailingMoeV2ForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **EXPERTS,
            **INNER,
            "first_k_dense_replace": "dense_layers",
            "n_group": "experts.num_groups",
            "num_experts": "experts.count",
            "num_shared_experts": "experts.shared",
            "routed_scaling_factor": "experts.scale",
            "topk_group": "experts.top_groups",
        },
        choices={
            "score_function": ("experts.method", {"softmax": "greedy", "sigmoid": "noaux_tc"}),
            "use_qk_norm": ("qk_norm", {False: None, True: "head"}),
        },
        defaults={
            "first_k_dense_replace": 0,
            "num_shared_experts": 0,
            "routed_scaling_factor": 1.0,
            "score_function": "softmax",
            "use_qk_norm": False,
            **tokens(None, 126081, 126081),
        },
        fixed={
            **dict.fromkeys(("norm_head", "norm_softmax", "use_bias", "use_qkv_bias"), (False, None)),
            **dict.fromkeys(("norm_topk_prob", "use_rmsnorm"), (True,)),
            "router_type": ("topN",),
        },
        ignored=("mtp_loss_scaling_factor", "output_dropout", "router_dtype", "use_sliding_window", "sliding_window"),
        derive=_bailing,
        further=_bailing_further,
        partial=1.0,
        tensors={
            **{
                name: Tensor(PREFIX + "attention.query_key_value.weight", True, name)
                for name in ("query", "key", "value")
            },
            "output": Tensor(PREFIX + "attention.dense.weight", True),
            "query_norm": Tensor(PREFIX + "attention.query_layernorm.weight"),
            "key_norm": Tensor(PREFIX + "attention.key_layernorm.weight"),
            "router_correction": Tensor(PREFIX + "mlp.gate.expert_bias"),
            "embed": Tensor("model.word_embeddings.weight"),
        },
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, **CORRECTED},
        fields={"qk_norm": "head", "experts.method": "noaux_tc"},
        defaults={
            "num_key_value_heads": 32,
            "attention_bias": False,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "topk_group": 1,
        },
        fixed=_SIGMOID,
        aliases={"num_local_experts": "n_routed_experts"},
        layer_types="list",
        layer_keys=("max_window_layers",),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, **CORRECTED},
        choices={"use_qk_norm": ("qk_norm", {False: None, True: "head"})},
        fields={"output_bias": False, "experts.method": "noaux_tc"},
        defaults={
            "num_key_value_heads": 8,
            "attention_bias": False,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            **_GLM_ROUTING,
        },
        fixed=_SIGMOID,
        aliases={"num_local_experts": "n_routed_experts"},
        partial=0.5,
        next_token=EXTRA_LAYER,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        {**COMMON, **SILU, **HEADS, **EXPERTS, "num_local_experts": "experts.count"},
        fields={"qk_norm": "all", "experts.method": "noaux_tc"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            **tokens(200034, 200020),
        },
        fixed={
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0,),
            "use_qk_norm": (True,),
            "use_routing_bias": (True,),
        },
        ignored=("mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
        derive=_minimax,
        aliases={"num_experts": "num_local_experts"},
        layer_keys=("rotary_dim",),
        theta=5_000_000.0,
        partial=1.0,
        tensors={
            **MIXTRAL_TENSORS,
            "router_correction": Tensor(PREFIX + "block_sparse_moe.e_score_correction_bias"),
        },
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **{k: field for k, field in CORRECTED.items() if field != "dense_layers"},
        },
        fields={"output_bias": False, "experts.method": "noaux_tc"},
        defaults={
            "num_key_value_heads": 8,
            "attention_bias": False,
            "head_dim": 128,
            "intermediate_size": 1280,  # of no layer: each has experts
            "moe_intermediate_size": 1280,
            **_GLM_ROUTING,
        },
        fixed={**_SIGMOID, "first_k_dense_replace": (0,), "use_qk_norm": (False,)},
        aliases={"num_local_experts": "n_routed_experts"},
        theta=1_000_000.0,
    ),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **BIASES,
            **EXPERTS,
            **INNER,
            "num_experts": "experts.count",
            "num_shared_experts": "experts.shared",
            "router_scaling_factor": "experts.scale",
        },
        fields={"qk_norm": "head", "experts.method": "noaux_tc", "dense_layers": 1},
        defaults={
            "num_key_value_heads": 8,
            "attention_bias": False,
            "head_dim": 128,
            "initializer_range": 0.006,
            "moe_intermediate_size": 1536,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "rms_norm_eps": 1e-5,
            "router_scaling_factor": 2.826,
        },
        ignored=("enable_moe_fp32_combine",),
        aliases={"num_local_experts": "num_experts"},
        layer_keys=("mlp_layer_types",),
        theta=11_158_840.0,
        tensors={
            "router": Tensor(PREFIX + "mlp.router.gate.weight", True),
            "router_correction": Tensor(PREFIX + "mlp.expert_bias"),
            **{f"shared_{name}": Tensor(PREFIX + f"mlp.shared_mlp.{name}_proj.weight", True) for name in GATED},
        },
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **{key: field for key, field in CORRECTED.items() if field not in ("experts.count", "experts.shared")},
            "num_experts": "experts.count",
            "num_shared_experts": "experts.shared",
        },
        fields={"qk_norm": "head", "experts.method": "noaux_tc"},
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "n_group": 1,
            "norm_topk_prob": True,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "topk_group": 1,
            **tokens(1, 53, 0),
        },
        aliases={"num_local_experts": "num_experts"},
        layer_types="list",
        layer_keys=("sliding_window_pattern", "mlp_layer_types"),
        global_rope=False,
        tensors={"router_correction": Tensor(PREFIX + "mlp.e_score_correction_bias")},
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        {
            **COMMON,
            **SILU,
            **HEADS,
            **INNER,
            "moe_k": "experts.top_k",
            "moe_layer_start_index": "dense_layers",
            "moe_num_experts": "experts.count",
            "moe_num_shared_experts": "experts.shared",
        },
        choices={"use_bias": ("attention_bias", {False: False})},
        fields={"rope_interleaved": True, "experts.method": "corrected"},
        defaults={
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_layer_start_index": 1,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            **tokens(1, 2, 0),
        },
        fixed={"moe_norm_min": (1e-12,)},
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        layer_keys=("moe_layer_end_index", "moe_layer_interval"),
        theta=500000.0,
        tensors={"router_correction": Tensor(PREFIX + "mlp.moe_statics.e_score_correction_bias", row=True)},
    ),
}
