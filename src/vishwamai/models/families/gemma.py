"""Gemma: scaled embeddings, norms with an offset, local and global layers."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.models.families.family import BIASES, COMMON, HEADS, Family, sizes, tokens
from vishwamai.models.layers.mixture import GatedAndMixture
from vishwamai.models.parameters import PREFIX, Tensor

_KEYS = {
    **COMMON,
    **HEADS,
    "hidden_activation": "activation",
    "query_pre_attn_scalar": "query_scalar",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "final_logit_softcap",
    **BIASES,
}
_FIELDS = {"norms": "both", "norm_offset": True, "scale_embeddings": True}
_DEFAULTS = {
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "attention_bias": False,
    "sliding_window": 4096,
    **tokens(2, 1, 0),
}
_POST_NORMS = {
    "attention_post_norm": Tensor(PREFIX + "post_attention_layernorm.weight"),
    "mlp_norm": Tensor(PREFIX + "pre_feedforward_layernorm.weight"),
}

GEMMA: Mapping[str, Family] = {
    "gemma": Family(
        "GemmaForCausalLM",
        {**COMMON, **HEADS, **BIASES},
        {"activation": "gelu_tanh", "norm_offset": True, "scale_embeddings": True},
        {
            "num_key_value_heads": 16,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "attention_bias": False,
            **tokens(2, 1, 0),
        },
        fixed={"use_bidirectional_attention": (None, False), "hidden_act": ("gelu", "gelu_pytorch_tanh")},
        ignored=("hidden_activation",),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _KEYS,
        _FIELDS,
        {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed={"use_bidirectional_attention": (None, False), "hidden_act": ("gelu_pytorch_tanh",)},
        ignored=("sliding_window_size",),
        layer_types="list",
        window_period=2,
        tensors=_POST_NORMS,
    ),
    "vaultgemma": Family(
        "VaultGemmaForCausalLM",
        _KEYS,
        {"norm_offset": True, "scale_embeddings": True},
        {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed={"hidden_act": ("gelu_pytorch_tanh",)},
        layer_types="list",
        window_period=2,
        tensors={"mlp_norm": _POST_NORMS["mlp_norm"]},
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        {
            **{key: f for key, f in _KEYS.items() if f not in ("attention_softcap", "query_scalar")},
            "attention_k_eq_v": "full_attention.shared_value",
            "global_head_dim": "full_attention.head_dim",
            "num_global_key_value_heads": "full_attention.num_kv_heads",
            "moe_intermediate_size": "experts.inner_size",
            "num_experts": "experts.count",
            "top_k_experts": "experts.top_k",
        },
        {
            "norms": "both",
            "scale_embeddings": True,
            "qk_norm": "head",
            "value_norm": True,
            "layer_scale": True,
            "attention_multiplier": 1.0,
        },
        {
            **{key: value for key, value in _DEFAULTS.items() if key != "query_pre_attn_scalar"},
            "attention_k_eq_v": False,
            "global_head_dim": 512,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                },
            },
            "sliding_window": 512,
        },
        sizes(262144, 2304, 9216, 30, 8, 131072),
        choices={"hidden_size_per_layer_input": ("norm_offset", {0: False})},
        fixed={
            "num_kv_shared_layers": (0,),
            "partial_rotary_factor": (None,),  # beside `rope_parameters`, which has one for each kind of layer
            "use_bidirectional_attention": (None, "vision"),
        },
        ignored=("expert_intermediate_size", "use_double_wide_mlp", "vocab_size_per_layer_input"),
        layer_types="list",
        layer_keys=("enable_moe_block", "proportional"),
        mixture=GatedAndMixture(),
        window_period=6,
        theta=1_000_000.0,
        partial=1.0,
        local_theta=10000.0,
        tensors=_POST_NORMS,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {key: field for key, field in _KEYS.items() if field != "attention_softcap"},
        {**_FIELDS, "qk_norm": "head"},
        _DEFAULTS,
        sizes(262208, 2304, 9216, 26, 8, 131072),
        choices={"use_bidirectional_attention": ("bidirectional", {False: False, None: False, True: True})},
        fixed={"attn_logit_softcapping": (None,)},
        ignored=("_sliding_window_pattern",),
        layer_types="list",
        layer_keys=("sliding_window_pattern", "rope_local_base_freq"),
        window_period=6,
        theta=1_000_000.0,
        local_theta=10000.0,
        tensors=_POST_NORMS,
    ),
}
