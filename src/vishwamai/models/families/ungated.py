"""Families whose feed-forward networks have no gate."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.models.families.family import BIASES, COMMON, HEADS, SILU, Family, tokens
from vishwamai.models.layers.feed_forward import XIELU, Ungated
from vishwamai.models.parameters import PREFIX, Tensor

_COMMON = {key: field for key, field in COMMON.items() if field != "norm_eps"}
_NEOX = "gpt_neox.layers.{layer}."
_NEOX_TENSORS = {
    "embed": Tensor("gpt_neox.embed_in.weight"),
    "head": Tensor("embed_out.weight"),
    **{
        f"{name}{suffix}": Tensor(f"{module}.{kind}", kind == "weight" and "norm" not in module, part)
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
        for name, module, part in (
            ("query", f"{_NEOX}attention.query_key_value", "group_query"),
            ("key", f"{_NEOX}attention.query_key_value", "group_key"),
            ("value", f"{_NEOX}attention.query_key_value", "group_value"),
            ("output", f"{_NEOX}attention.dense", None),
            ("up", f"{_NEOX}mlp.dense_h_to_4h", None),
            ("down", f"{_NEOX}mlp.dense_4h_to_h", None),
            ("attention_norm", f"{_NEOX}input_layernorm", None),
            ("mlp_norm", f"{_NEOX}post_attention_layernorm", None),
            ("norm", "gpt_neox.final_layer_norm", None),
        )
    },
}

UNGATED: Mapping[str, Family] = {
    "arcee": Family(
        "ArceeForCausalLM",
        {**COMMON, **SILU, **HEADS, **BIASES, "mlp_bias": "mlp_bias"},
        defaults={
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            **tokens(128000, 128001),
        },
        feed_forward=Ungated(),
    ),
    "apertus": Family(
        "ApertusForCausalLM",
        {**COMMON, **HEADS, **BIASES},
        fields={"qk_norm": "head"},
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12_000_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            **tokens(1, 2, 3),
        },
        fixed={"hidden_act": ("xielu",)},
        theta=12_000_000.0,
        feed_forward=XIELU(),
        tensors={
            "attention_norm": Tensor(PREFIX + "attention_layernorm.weight"),
            "mlp_norm": Tensor(PREFIX + "feedforward_layernorm.weight"),
        },
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {
            **_COMMON,
            **SILU,
            **HEADS,
            "norm_epsilon": "norm_eps",
        },
        fields={"layer_norm": True, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "initializer_range": 0.018042,
            "tie_word_embeddings": True,
            **tokens(50256, 50256),
        },
        fixed={"use_bias": (True,)},
        layer_types="all",
        feed_forward=Ungated(),
        tensors={
            f"{name}{suffix}": Tensor(f"{PREFIX}mlp.{module}.{kind}", transpose=kind == "weight")
            for name, module in (("up", "c_fc"), ("down", "c_proj"))
            for suffix, kind in (("", "weight"), ("_bias", "bias"))
        },
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        {**_COMMON, **SILU, **HEADS, **BIASES, "mlp_bias": "mlp_bias", "norm_eps": "norm_eps"},
        fields={"layer_norm": True, "norm_bias": True, "norm_offset": True},
        defaults={
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
            "initializer_range": 0.0134,
            "attention_bias": False,
            "mlp_bias": False,
            **tokens(2, 3),
        },
        partial=0.5,
        feed_forward=Ungated(),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {
            **{key: field for key, field in _COMMON.items() if field != "num_kv_heads"},
            **SILU,
            **BIASES,
            "layer_norm_eps": "norm_eps",
        },
        choices={"use_parallel_residual": ("norms", {True: "parallel", False: "pre"})},
        fields={"layer_norm": True, "norm_bias": True, "mlp_bias": True},
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "attention_bias": True,
            **tokens(0, 2),
        },
        ignored=("classifier_dropout", "head_dim", "num_key_value_heads"),
        aliases={"rotary_pct": "partial_rotary_factor"},
        theta_key="rotary_emb_base",
        partial=0.25,
        feed_forward=Ungated(),
        tensors=_NEOX_TENSORS,
    ),
}
