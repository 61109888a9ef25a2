"""Families with latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import UnsupportedError
from vishwamai.models.families.family import BIASES, COMMON, CORRECTED, EXTRA_LAYER, SILU, Family, sizes, tokens
from vishwamai.models.layers.indexed import FullIndexAttention, IndexedAttention, SharedIndexAttention
from vishwamai.models.layers.latent import LatentAttention
from vishwamai.models.layers.mixer import Mixer
from vishwamai.models.parameters import PREFIX, Tensor
from vishwamai.models.values import check_value

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


def _mistral4(values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The keys of Mistral 4 without the share of a head that turns, which its sizes state too."""
    ropes = {key: values[key] for key in ("rope_parameters", "rope_scaling") if isinstance(values.get(key), Mapping)}
    turning, plain = (values.get(key, _MISTRAL4[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
    for key, rope in ropes.items():
        share = rope.get("partial_rotary_factor")
        if share is not None and not (isinstance(share, float) and share * (turning + plain) == turning):
            raise UnsupportedError(
                f"{source}: `partial_rotary_factor` is {share!r} in `{key}`; the decoder rotates `qk_rope_head_dim` = "
                f"{turning} features of each head, next to `qk_nope_head_dim` = {plain}. Remove the key."
            )
    if values.get("head_dim") not in (None, turning + plain):
        raise UnsupportedError(
            f"{source}: `head_dim` is {values['head_dim']!r}; the decoder's heads have `qk_nope_head_dim` + "
            f"`qk_rope_head_dim` = {turning + plain} features. Remove the key."
        )
    plain_ropes = {
        key: {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
        for key, rope in ropes.items()
    }
    return {**values, **plain_ropes}


_MISTRAL4 = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64}


def _minicpm3(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The keys of MiniCPM 3, whose values have the features of a share of `hidden_size` by default."""
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if values.get("v_head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return {**values, "v_head_dim": hidden // heads}
    return values


_INDEXED = {
    **_NORMALIZED,
    "index_head_dim": "latent.index_dim",
    "index_n_heads": "latent.index_heads",
    "index_topk": "latent.index_keys",
}
_INDEX_SIZES = {"index_head_dim": 128, "index_topk": 2048}
_INDEX_FIXED = {"rope_interleave": (True,), "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}


def _with_queries(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The keys, of a model whose indexer reads the vector that queries are made of."""
    if values.get("q_lora_rank", 0) is None:
        raise UnsupportedError(f"{source}: `q_lora_rank` is null; the indexer reads that vector. Give its size.")
    return values


def _glm_dsa(values: Mapping[str, object], source: str) -> Mapping[str, Any]:
    """The keys of GLM-5 with a type of indexer for every layer."""
    result: dict[str, Any] = dict(_with_queries(values, source))
    count = result.get("num_hidden_layers", 78)
    pattern = result.pop("index_topk_pattern", None)
    period, start = result.pop("index_topk_freq", None), result.pop("index_skip_topk_offset", None)
    check_value("num_hidden_layers", count, int, source, 1)
    if result.get("indexer_types") is not None or count > _MOST_LAYERS:
        return result
    if isinstance(pattern, str):
        result["indexer_types"] = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif pattern is not None:
        check_value("index_topk_pattern", pattern, list, source)
        result["indexer_types"] = pattern
    else:
        period, start = 1 if period is None else period, 2 if start is None else start
        check_value("index_topk_freq", period, int, source, -_MOST_LAYERS)
        check_value("index_skip_topk_offset", start, int, source, -_MOST_LAYERS)
        places = [max(i - start + 1, 0) % max(period, 1) for i in range(count)]
        result["indexer_types"] = ["shared" if place else "full" for place in places]
    return result


_MOST_LAYERS = 10_000  # more are declined with the other sizes, before anything is made of them

_DEEPSEEK_V3: Mapping[str, Any] = {
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
}
"""Defaults of DeepSeek V3, with which those of V3.2 and GLM-5 begin."""

LATENT: Mapping[str, Family] = {
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM",
        _INDEXED,
        fields={**_FIELDS, "experts.method": "noaux_tc"},
        defaults={
            **_DEEPSEEK_V3,
            **_INDEX_SIZES,
            "index_n_heads": 64,
        },
        sizes=sizes(129280, 7168, 18432, 61, 128, 163840),
        mixers={"full_attention": IndexedAttention},
        fixed=_INDEX_FIXED,
        ignored=(*_IGNORED, "layer_types"),
        aliases={"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"},
        derive=_with_queries,
        layer_keys=("mlp_layer_types",),
        next_token=EXTRA_LAYER,
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM",
        _INDEXED,
        fields={**_FIELDS, "experts.method": "noaux_tc"},
        defaults={
            **_DEEPSEEK_V3,
            **_INDEX_SIZES,
            "index_n_heads": 32,
            "n_group": 1,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "topk_group": 1,
            "v_head_dim": 256,
        },
        sizes=sizes(154880, 6144, 12288, 78, 64, 202752),
        mixers={"full": FullIndexAttention, "shared": SharedIndexAttention},
        fixed={**_INDEX_FIXED, "indexer_rope_interleave": (True,), "moe_router_dtype": ("float32",)},
        ignored=(*_IGNORED, "index_share_for_mtp_iteration", "layer_types"),
        aliases={"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"},
        derive=_glm_dsa,
        layer_types="types",
        types_key="indexer_types",
        layer_keys=("mlp_layer_types",),
        next_token=EXTRA_LAYER,
    ),
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
        defaults=_DEEPSEEK_V3,
        sizes=sizes(129280, 7168, 18432, 61, 128, 4096),
        mixers=_MIXERS,
        fixed={**_FIXED, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
        ignored=_IGNORED,
        aliases={"num_local_experts": "n_routed_experts"},
        next_token=EXTRA_LAYER,
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
        next_token=EXTRA_LAYER,
    ),
    "mistral4": Family(
        "Mistral4ForCausalLM",
        _NORMALIZED,
        fields={**_FIELDS, "experts.method": "group_limited_top2"},
        defaults={
            **_DEFAULTS,
            **_MISTRAL4,
            "first_k_dense_replace": 0,
            "kv_lora_rank": 256,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "q_lora_rank": 1024,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            **tokens(1, 2, 11),
        },
        sizes=sizes(131072, 4096, 12288, 36, 32, 1048576),
        mixers=_MIXERS,
        fixed=_FIXED,
        ignored=(*_IGNORED, "pretraining_tp"),
        aliases={"num_local_experts": "n_routed_experts"},
        derive=_mistral4,
        layer_keys=("llama_4_scaling_beta",),
        tensors={
            "expert_gate": Tensor(PREFIX + "mlp.experts.gate_up_proj", True, "gate"),
            "expert_up": Tensor(PREFIX + "mlp.experts.gate_up_proj", True, "up"),
            "expert_down": Tensor(PREFIX + "mlp.experts.down_proj", True),
        },
    ),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        {
            **COMMON,
            **SILU,
            **BIASES,
            **{key: field for key, field in _KEYS.items() if field.startswith("latent.")},
            "dim_model_base": "logit_base",
            "mlp_bias": "mlp_bias",
            "scale_depth": "residual_depth",
            "scale_emb": "embedding_multiplier",
        },
        defaults={
            "attention_bias": False,
            "dim_model_base": 256,
            "initializer_range": 0.1,
            "kv_lora_rank": 256,
            "mlp_bias": False,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "rms_norm_eps": 1e-5,
            "scale_depth": 1.4,
            "scale_emb": 12.0,
            "tie_word_embeddings": True,
            **tokens(1, 2),
        },
        mixers=_MIXERS,
        ignored=(*_IGNORED, "pretraining_tp"),
        derive=_minicpm3,
    ),
}
