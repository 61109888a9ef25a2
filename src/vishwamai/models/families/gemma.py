"""Gemma: scaled embeddings, norms with an offset, local and global layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vishwamai.core.errors import ShapeError
from vishwamai.models.families.family import BIASES, COMMON, HEADS, Family, sizes, tokens
from vishwamai.models.layers.feed_forward import Gated
from vishwamai.models.layers.mixture import GatedAndMixture
from vishwamai.models.parameters import PREFIX, Tensor

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

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

_LAYER_EMBEDDING = {
    "hidden_size_per_layer_input": "layer_embedding.size",
    "vocab_size_per_layer_input": "layer_embedding.vocab_size",
}
_LATER = {
    "norms": "both",
    "scale_embeddings": True,
    "qk_norm": "head",
    "value_norm": True,
    "attention_multiplier": 1.0,
}
"""Fields that Gemma 3n and Gemma 4 have in common."""
LAYER_WIDTHS = "intermediate_size of each layer"
"""What a list of a file's `intermediate_size` is called among the keys that follow from it."""


def _gemma4_further(config: ModelConfig) -> Mapping[str, object]:
    return {} if config.layer_embedding else {"hidden_size_per_layer_input": 0}


def _gemma3n(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The keys of Gemma 3n with one `intermediate_size`, and the list of those of all layers apart from it.

    Raises:
      ShapeError: the list has not a number for each layer.
    """
    widths, count = values.get("intermediate_size"), values.get("num_hidden_layers")
    if not isinstance(widths, list):
        return values
    if len(widths) != count or not all(type(width) is int and width > 0 for width in widths):
        raise ShapeError(f"{source}: `intermediate_size` is {widths!r:.100}; expected a number for each layer.")
    common = {"intermediate_size": max(widths)}
    return {**values, **common, **({} if len(set(widths)) == 1 else {LAYER_WIDTHS: widths})}


def _gemma3n_further(config: ModelConfig) -> Mapping[str, object]:
    networks = [kind.feed_forward for kind in config.layers]
    widths = [isinstance(network, Gated) and network.inner_size or config.intermediate_size for network in networks]
    return {"intermediate_size": widths}


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
            **_LAYER_EMBEDDING,
        },
        {**_LATER, "layer_scale": True},
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
        fixed={
            "partial_rotary_factor": (None,),  # beside `rope_parameters`, which has one for each kind of layer
            "use_bidirectional_attention": (None, "vision"),
        },
        ignored=("expert_intermediate_size",),
        further=_gemma4_further,
        layer_types="list",
        layer_keys=("enable_moe_block", "num_kv_shared_layers", "proportional", "use_double_wide_mlp"),
        mixture=GatedAndMixture(),
        window_period=6,
        theta=1_000_000.0,
        partial=1.0,
        local_theta=10000.0,
        tensors=_POST_NORMS,
    ),
    "gemma3n_text": Family(
        "Gemma3nForCausalLM",
        {
            **{key: f for key, f in _KEYS.items() if f not in ("attention_softcap", "query_scalar")},
            **_LAYER_EMBEDDING,
            "altup_active_idx": "altup.active",
            "altup_correct_scale": "altup.scaled",
            "altup_num_inputs": "altup.count",
            "laurel_rank": "altup.rank",
        },
        _LATER,
        {
            **{key: value for key, value in _DEFAULTS.items() if key != "query_pre_attn_scalar"},
            "num_key_value_heads": 2,
            "final_logit_softcapping": 30.0,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "altup_num_inputs": 4,
            "laurel_rank": 64,
            "num_kv_shared_layers": 15,
        },
        sizes(262400, 2048, 16384, 35, 8, 32768),
        ignored=("altup_coef_clip",),
        derive=_gemma3n,
        further=_gemma3n_further,
        layer_types="list",
        layer_keys=("activation_sparsity_pattern", "num_kv_shared_layers", "rope_local_base_freq", LAYER_WIDTHS),
        window_period=5,
        theta=1_000_000.0,
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
