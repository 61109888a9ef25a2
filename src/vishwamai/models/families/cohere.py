"""Cohere: layer norms without bias, attention and feed-forward network in parallel after one norm."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.models.families.family import BIASES, COMMON, HEADS, SILU, Family, tokens

_KEYS = {
    **{key: field for key, field in COMMON.items() if field != "norm_eps"},
    **SILU,
    **HEADS,
    **BIASES,
    "layer_norm_eps": "norm_eps",
    "logit_scale": "logit_multiplier",
}
_FIELDS = {"norms": "shared", "layer_norm": True, "rope_interleaved": True}
_DEFAULTS = {
    "attention_bias": False,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    **tokens(5, 255001, 0),
}

COHERE: Mapping[str, Family] = {
    "cohere": Family(
        "CohereForCausalLM",
        _KEYS,
        _FIELDS,
        {**_DEFAULTS, "use_qk_norm": False},
        choices={"use_qk_norm": ("qk_norm", {False: None, True: "heads"})},
        theta=500000.0,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {key: field for key, field in _KEYS.items() if key != "head_dim"},
        _FIELDS,
        {**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
        ignored=("head_dim",),
        layer_types="list",
        layer_keys=("sliding_window_pattern",),
        global_rope=None,
    ),
}
