"""The families of decoders, as data: the keys of their `config.json`, their defaults, and their tensors' names.

A `Family` says how a Hugging Face directory maps to `ModelConfig` and to the decoder's parameters. Reading and writing
both follow it, so nothing is stated twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a parameter lies in a checkpoint.

    Attributes:
      name: the tensor's name; `{layer}` is the layer's number. With `{expert}` the parameter stacks the tensors of all
        experts.
      transpose: the tensor is stored `[out, in]`, the parameter `[in, out]`.
      part: the parameter is this part of a tensor that several share ("query", "gate", "even", ...; see `tensors.py`).
    """

    name: str
    transpose: bool = False
    part: str | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
      architecture: the class of transformers, as `config.json` names it.
      keys: a key of `config.json` for each field of `ModelConfig` ("experts.count": a field of a field).
      fields: fields of `ModelConfig` that the family fixes.
      defaults: values of keys that published files may leave out.
      fixed: keys whose value must be one of these, for the decoder computes nothing else.
      ignored: keys without an effect, besides `IGNORED`.
      aliases: other names of keys.
      layer_types: "none", "all" (`sliding_window` holds for every layer), or "list" (`layer_types` says which).
      window_period: without `layer_types`, every so many layers one attends to everything.
      tensors: names that differ from the common ones, by parameter; None where the common one is absent.
    """

    architecture: str
    keys: Mapping[str, str]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer_types: str = "none"
    window_period: int | None = None
    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


IGNORED = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "transformers.js_config"),
        *("cache_implementation", "use_cache", "use_bfloat16"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "router_aux_loss_coef"),
        *("chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id", "problem_type", "unsloth_fixed"),
        *("layer_types", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "quantization_config"),
        *("partial_rotary_factor", "original_max_position_embeddings", "rope_local_base_freq"),
        *("aux_loss_alpha", "ep_size", "initial_context_length", "num_nextn_predict_layers", "seq_aux"),
        *("max_window_layers", "use_sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
    }
)
"""Keys without an effect on the numbers, and those that the readers of layers, rotations and quantized tensors take."""

DROPOUT = {"attention_dropout": (0, 0.0), "resid_pdrop": (0, 0.0), "embd_pdrop": (0, 0.0)}

_COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "initializer_range",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "num_key_value_heads": "num_kv_heads",
}
_SILU = {"hidden_act": "activation"}
_HEADS = {"head_dim": "head_dim"}
_BIASES = {"attention_bias": "attention_bias"}
_GEMMA = {
    **_COMMON,
    **_HEADS,
    "hidden_activation": "activation",
    "query_pre_attn_scalar": "query_scalar",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "final_logit_softcap",
    **_BIASES,
}
_GEMMA_FIELDS = {"norms": "both", "norm_offset": True, "scale_embeddings": True}
_GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_EXPERTS = {"num_experts_per_tok": "experts.top_k"}
_INNER = {"moe_intermediate_size": "experts.inner_size"}
_DEEPSEEK = {
    **_COMMON,
    **_SILU,
    **_BIASES,
    **_EXPERTS,
    **_INNER,
    "first_k_dense_replace": "dense_layers",
    "kv_lora_rank": "latent.kv_rank",
    "n_group": "experts.num_groups",
    "n_routed_experts": "experts.count",
    "n_shared_experts": "experts.shared",
    "q_lora_rank": "latent.query_rank",
    "qk_nope_head_dim": "latent.nope_dim",
    "qk_rope_head_dim": "latent.rope_dim",
    "routed_scaling_factor": "experts.scale",
    "topk_group": "experts.top_groups",
    "v_head_dim": "latent.value_dim",
}
_DEEPSEEK_IGNORED = ("head_dim", "qk_head_dim")
_DEEPSEEK_FIXED = {
    "moe_layer_freq": (1,),
    "pretraining_tp": (1,),
    "rope_interleave": (True,),
}
_PREFIX = "model.layers.{layer}."
_MLP = ("gate", "up", "down")
_POST_NORMS = {
    "attention_post_norm": Tensor(_PREFIX + "post_attention_layernorm.weight"),
    "mlp_norm": Tensor(_PREFIX + "pre_feedforward_layernorm.weight"),
}

TENSORS: Mapping[str, Tensor] = {
    "embed": Tensor("model.embed_tokens.weight"),
    "norm": Tensor("model.norm.weight"),
    "head": Tensor("lm_head.weight"),
    "attention_norm": Tensor(_PREFIX + "input_layernorm.weight"),
    **{
        f"{name}{suffix}": Tensor(f"{_PREFIX}self_attn.{short}_proj.{kind}", transpose=kind == "weight")
        for name, short in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    },
    "query_norm": Tensor(_PREFIX + "self_attn.q_norm.weight"),
    "key_norm": Tensor(_PREFIX + "self_attn.k_norm.weight"),
    "mlp_norm": Tensor(_PREFIX + "post_attention_layernorm.weight"),
    "mlp_post_norm": Tensor(_PREFIX + "post_feedforward_layernorm.weight"),
    **{
        f"{name}{suffix}": Tensor(f"{_PREFIX}mlp.{name}_proj.{kind}", transpose=kind == "weight")
        for name in _MLP
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    },
    "sinks": Tensor(_PREFIX + "self_attn.sinks"),
    "query_down": Tensor(_PREFIX + "self_attn.q_a_proj.weight", True),
    "query_down_bias": Tensor(_PREFIX + "self_attn.q_a_proj.bias"),
    "query_down_norm": Tensor(_PREFIX + "self_attn.q_a_layernorm.weight"),
    "query_up": Tensor(_PREFIX + "self_attn.q_b_proj.weight", True),
    "latent_down": Tensor(_PREFIX + "self_attn.kv_a_proj_with_mqa.weight", True),
    "latent_down_bias": Tensor(_PREFIX + "self_attn.kv_a_proj_with_mqa.bias"),
    "latent_norm": Tensor(_PREFIX + "self_attn.kv_a_layernorm.weight"),
    "latent_up": Tensor(_PREFIX + "self_attn.kv_b_proj.weight", True),
    "router": Tensor(_PREFIX + "mlp.gate.weight", True),
    "router_correction": Tensor(_PREFIX + "mlp.gate.e_score_correction_bias"),
    **{f"expert_{name}": Tensor(_PREFIX + f"mlp.experts.{{expert}}.{name}_proj.weight", True) for name in _MLP},
    **{f"shared_{name}": Tensor(_PREFIX + f"mlp.shared_experts.{name}_proj.weight", True) for name in _MLP},
}
"""Tensors of the decoder's parameters in most checkpoints; a family's own `tensors` come first."""

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {**_COMMON, **_SILU, **_HEADS, **_BIASES, "mlp_bias": "mlp_bias"},
        defaults={"attention_bias": False, "mlp_bias": False},
        fixed={"pretraining_tp": (1,), "is_llama_config": (True,), "rope_interleaved": (False,)},
    ),
    "mistral": Family("MistralForCausalLM", {**_COMMON, **_SILU, **_HEADS}, layer_types="all"),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {**_COMMON, **_SILU},
        fields={"attention_bias": True, "output_bias": False},
        defaults={"use_sliding_window": False},
        fixed={"use_mrope": (False,)},
        layer_types="list",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_COMMON, **_SILU, **_HEADS, **_BIASES},
        fields={"qk_norm": "head"},
        defaults={"head_dim": 128, "attention_bias": False, "use_sliding_window": False},
        layer_types="list",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA,
        _GEMMA_FIELDS,
        {**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
        fixed={"use_bidirectional_attention": (None, False), "hidden_act": ("gelu_pytorch_tanh",)},
        ignored=("sliding_window_size",),
        layer_types="list",
        window_period=2,
        tensors=_POST_NORMS,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA,
        {**_GEMMA_FIELDS, "qk_norm": "head"},
        {**_GEMMA_DEFAULTS, "sliding_window": 4096},
        fixed={"use_bidirectional_attention": (None, False)},
        layer_types="list",
        window_period=6,
        tensors=_POST_NORMS,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {**_COMMON, **_SILU},
        fixed={
            **dict.fromkeys(("attention_bias", "lm_head_bias", "mlp_bias"), (False,)),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
        },
        layer_types="all",
        tensors={
            **{name: Tensor(_PREFIX + "self_attn.qkv_proj.weight", True, name) for name in ("query", "key", "value")},
            **{name: Tensor(_PREFIX + "mlp.gate_up_proj.weight", True, name) for name in ("gate", "up")},
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**_COMMON, **_SILU, **_BIASES},
        fields={"norms": "post", "qk_norm": "all"},
        defaults={"attention_bias": False, "rms_norm_eps": 1e-5},
        tensors={"attention_post_norm": Tensor(_PREFIX + "post_attention_layernorm.weight")},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {**_COMMON, **_SILU, **_HEADS, **_EXPERTS, "num_local_experts": "experts.count"},
        defaults={"rms_norm_eps": 1e-5},
        fixed={"router_jitter_noise": (0, 0.0)},
        layer_types="all",
        tensors={
            "router": Tensor(_PREFIX + "block_sparse_moe.gate.weight", True),
            **{
                f"expert_{name}": Tensor(_PREFIX + f"block_sparse_moe.experts.{{expert}}.{short}.weight", True)
                for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
            },
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            **_COMMON,
            **_SILU,
            **_HEADS,
            **_BIASES,
            **_EXPERTS,
            **_INNER,
            "num_experts": "experts.count",
            "norm_topk_prob": "experts.normalize",
        },
        fields={"qk_norm": "head"},
        defaults={"attention_bias": False, "norm_topk_prob": False, "use_sliding_window": False},
        fixed={
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0, None),
            "use_qk_norm": (True,),
        },
        aliases={"num_local_experts": "num_experts"},
        layer_types="all",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **_COMMON,
            **_HEADS,
            **_BIASES,
            **_EXPERTS,
            "num_local_experts": "experts.count",
            "swiglu_limit": "experts.clamped_limit",
        },
        fields={"sinks": True, "experts.biases": True},
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "swiglu_limit": 7.0,
        },
        fixed={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
        aliases={"experts_per_token": "num_experts_per_tok"},
        layer_types="list",
        window_period=2,
        tensors={
            "router": Tensor(_PREFIX + "mlp.router.weight", True),
            "router_bias": Tensor(_PREFIX + "mlp.router.bias"),
            "expert_gate": Tensor(_PREFIX + "mlp.experts.gate_up_proj", part="even"),
            "expert_gate_bias": Tensor(_PREFIX + "mlp.experts.gate_up_proj_bias", part="even"),
            "expert_up": Tensor(_PREFIX + "mlp.experts.gate_up_proj", part="odd"),
            "expert_up_bias": Tensor(_PREFIX + "mlp.experts.gate_up_proj_bias", part="odd"),
            "expert_down": Tensor(_PREFIX + "mlp.experts.down_proj"),
            "expert_down_bias": Tensor(_PREFIX + "mlp.experts.down_proj_bias"),
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "topk_method": "experts.method"},
        fields={"experts.normalize": False},
        defaults={"attention_bias": False, "topk_method": "greedy"},
        fixed={**_DEEPSEEK_FIXED, "mlp_bias": (False,), "norm_topk_prob": (False,), "scoring_func": ("softmax",)},
        ignored=_DEEPSEEK_IGNORED,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "norm_topk_prob": "experts.normalize"},
        fields={"experts.method": "noaux_tc"},
        defaults={"attention_bias": False, "norm_topk_prob": True},
        fixed={**_DEEPSEEK_FIXED, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
        ignored=_DEEPSEEK_IGNORED,
    ),
}
