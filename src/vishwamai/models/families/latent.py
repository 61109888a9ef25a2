"""Families with latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.models.families.family import BIASES, COMMON, CORRECTED, SILU, Family, sizes, tokens
from vishwamai.models.layers.latent import LatentAttention
from vishwamai.models.layers.mixer import Mixer

_KEYS = {
    **COMMON,
    **SILU,
    **BIASES,
    **{key: field for key, field in CORRECTED.items() if key != "norm_topk_prob"},
    "kv_lora_rank": "latent.kv_rank",
    "q_lora_rank": "latent.query_rank",
    "qk_nope_head_dim": "latent.nope_dim",
    "qk_rope_head_dim": "latent.rope_dim",
    "v_head_dim": "latent.value_dim",
}
_NORMALIZED = {**_KEYS, "norm_topk_prob": "experts.normalize"}
_IGNORED = ("head_dim", "qk_head_dim")
_FIXED = {"rope_interleave": (True,)}
_FIELDS = {"rope_interleaved": True}
_MIXERS: Mapping[str, type[Mixer]] = {"full_attention": LatentAttention}
_DEFAULTS = {"attention_bias": False, "kv_lora_rank": 512, "q_lora_rank": 1536}
_DEFAULTS |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

LATENT: Mapping[str, Family] = {
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {**_KEYS, "topk_method": "experts.method"},
        fields={**_FIELDS, "experts.normalize": False},
        defaults={
            **_DEFAULTS,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            **tokens(1, 2),
        },
        mixers=_MIXERS,
        fixed={
            **_FIXED,
            "norm_topk_prob": (False,),
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
        ignored=_IGNORED,
        aliases={"num_experts": "n_routed_experts"},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _NORMALIZED,
        fields={**_FIELDS, "experts.method": "noaux_tc"},
        defaults={
            **_DEFAULTS,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            **tokens(0, 1),
        },
        sizes=sizes(129280, 7168, 18432, 61, 128, 4096),
        mixers=_MIXERS,
        fixed={**_FIXED, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
        ignored=_IGNORED,
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        {key: field for key, field in _KEYS.items() if field != "dense_layers"}
        | {"norm_topk_prob": "experts.normalize"},
        fields={**_FIELDS, "experts.method": "noaux_tc", "dense_layers": 1},
        defaults={
            **_DEFAULTS,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "v_head_dim": 256,
            **tokens(0, 1),
        },
        mixers=_MIXERS,
        fixed={**_FIXED, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
        ignored=("qk_head_dim",),
        aliases={"head_dim": "qk_rope_head_dim", "num_local_experts": "n_routed_experts"},
        layer_keys=("mlp_layer_types",),
    ),
}
