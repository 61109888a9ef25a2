"""`config.json` files as their authors publish them: every key is known, and a value that computes something else is
an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from vishwamai import ShapeError, UnsupportedError
from vishwamai.models import ModelConfig, read_config

ABSENT: Any = object()
"""The value of a common key that a file leaves out."""
COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 512,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "model_type": "llama", "pretraining_tp": 1}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 1024,
    "rope_type": "llama3",
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 4, "model_type": "qwen2", "sliding_window": 4096}
QWEN3 = {
    "attention_bias": False,
    "head_dim": 128,
    "max_window_layers": 4,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
GEMMA = {
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "tie_word_embeddings": ABSENT,
}
GEMMA2 = {
    **GEMMA,
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "model_type": "gemma2",
}
GEMMA3 = {
    **GEMMA,
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "hidden_act": ABSENT,
    "model_type": "gemma3_text",
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
}
PHI3 = {
    "_name_or_path": "Phi-3-mini-4k-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "embd_pdrop": 0.0,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "pad_token_id": 3,
    "resid_pdrop": 0.0,
    "rope_scaling": None,
    "sliding_window": 2047,
}
LONGROPE = {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8, "type": "longrope"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
DEEPSEEK = {
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 16,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_V2 = {**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "model_type": "deepseek_v3",
    "n_group": 4,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "bos_token_id": ABSENT,
    "experts_per_token": 2,
    "head_dim": 64,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "pad_token_id": 0,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": ABSENT,
    "model_type": "olmo2",
    "pad_token_id": 3,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": {**LLAMA, "pad_token_id": 0, "rope_scaling": None},
    "Llama 3.1": {**LLAMA, "eos_token_id": [2, 3, 4], "mlp_bias": False, "rope_scaling": LLAMA3},
    "Llama 3.2": {**LLAMA, "head_dim": 64, "mlp_bias": False, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "SmolLM2": {
        **LLAMA,
        "is_llama_config": True,
        "mlp_bias": False,
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4f16"},
    },
    "Mistral 7B v0.1": {**MISTRAL, "sliding_window": 4096},
    "Mistral Nemo": {**MISTRAL, "head_dim": 128, "sliding_window": None},
    "Mixtral 8x7B": MIXTRAL,
    "Mixtral 8x22B": {**MIXTRAL, "router_jitter_noise": 0.0},
    "Qwen2.5": {**QWEN2, "use_mrope": False, "use_sliding_window": False},
    "Qwen2.5 instruct": {**QWEN2, "use_sliding_window": False},
    "Qwen3": {**QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "Qwen3 30B-A3B": QWEN3_MOE,
    "Qwen3 Coder": {**QWEN3_MOE, "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    "Gemma 2 2B": GEMMA2,
    "Gemma 2 9B": {**GEMMA2, "sliding_window_size": 512},
    "Gemma 3 1B": {**GEMMA3, "sliding_window_pattern": 6},
    "Gemma 3 270M": {
        **GEMMA3,
        "_sliding_window_pattern": 6,
        "layer_types": ["sliding_attention"] * 4,
        "use_bidirectional_attention": False,
    },
    "Phi 3 mini 4k": PHI3,
    "Phi 3.5 mini": {**PHI3, "rope_scaling": LONGROPE, "sliding_window": 262144},
    "Phi 4 mini": {
        **PHI3,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {**LONGROPE, "long_factor": [2.0] * 6, "short_factor": [1.0] * 6},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "OLMo 2": {**OLMO2, "rope_scaling": None},
    "gpt-oss": GPT_OSS,
    "DeepSeek V2": {**DEEPSEEK_V2, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "DeepSeek V2 Lite": {**DEEPSEEK_V2, "rope_scaling": YARN},
    "DeepSeek V3": {**DEEPSEEK_V3, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
}


def published(name: str) -> dict[str, Any]:
    """The file of a model, at a small size."""
    return {key: value for key, value in {**COMMON, **PUBLISHED[name]}.items() if value is not ABSENT}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read_and_written_back(name: str) -> None:
    config = ModelConfig.from_dict(published(name))
    assert config.family == PUBLISHED[name]["model_type"]
    assert config.num_layers == 4
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("SmolLM2", "rope_interleaved", True, "False"),
        ("Qwen2.5", "use_mrope", True, "False"),
        ("Qwen3 Coder", "shared_expert_intermediate_size", 48, "0 or None"),
        ("Qwen3 Coder", "use_qk_norm", False, "True"),
        ("Gemma 2 2B", "hidden_act", "silu", "'gelu_pytorch_tanh'"),
        ("Phi 3 mini 4k", "attention_bias", True, "False"),
        ("Phi 4 mini", "full_attn_mod", 2, "1"),
        ("Phi 4 mini", "interpolate_factor", 2, "1"),
        ("Phi 4 mini", "lm_head_bias", True, "False"),
        ("Phi 4 mini", "mlp_bias", True, "False"),
    ],
)
def test_another_value_of_a_fixed_key_is_an_error(name: str, key: str, value: Any, expected: str) -> None:
    values = {**published(name), key: value}
    text = f"config.json: `{key}` is {value!r}; the decoder computes {values['model_type']} with {expected} only."
    with pytest.raises(UnsupportedError, match=text):
        ModelConfig.from_dict(values)


WHOLE = "expected a whole number of at least 1."
NUMBER = "expected a number above 0."


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("Llama 2", "hidden_size", "64", WHOLE),
        ("Llama 2", "hidden_size", 64.0, WHOLE),
        ("Llama 2", "hidden_size", [64], WHOLE),
        ("Llama 2", "num_hidden_layers", True, WHOLE),
        ("Llama 2", "num_hidden_layers", {}, WHOLE),
        ("Llama 2", "vocab_size", -1, WHOLE),
        ("Llama 2", "num_key_value_heads", 0, WHOLE),
        ("Llama 2", "rms_norm_eps", "1e-5", "expected a number of at least 0."),
        ("Llama 2", "rms_norm_eps", float("nan"), "expected a number of at least 0."),
        ("Llama 2", "tie_word_embeddings", "false", "expected true or false."),
        ("Llama 2", "tie_word_embeddings", None, "expected true or false."),
        ("Llama 2", "pad_token_id", "</s>", "expected a whole number of at least -1."),
        ("Llama 2", "rope_theta", "x", NUMBER),
        ("Llama 2", "rope_theta", 0, NUMBER),
        ("Llama 2", "rope_scaling", "linear", "expected an object."),
        ("Mistral 7B v0.1", "sliding_window", "4096", WHOLE),
        ("Qwen2.5", "max_window_layers", -1, "expected a whole number of at least 0."),
        ("Qwen2.5", "use_sliding_window", 1, "expected true or false."),
        ("Gemma 2 2B", "query_pre_attn_scalar", 0, NUMBER),
        ("Gemma 3 270M", "layer_types", [1, 2, 3, 4], "expected a list of texts."),
        ("Phi 4 mini", "original_max_position_embeddings", "4096", WHOLE),
        ("DeepSeek V2", "n_routed_experts", 0, WHOLE),
        ("DeepSeek V2", "kv_lora_rank", "32", WHOLE),
        ("gpt-oss", "swiglu_limit", "7", NUMBER),
    ],
)
def test_a_value_of_another_type_is_named(name: str, key: str, value: Any, expected: str) -> None:
    with pytest.raises(ShapeError) as error:
        ModelConfig.from_dict({**published(name), key: value})
    assert str(error.value) == f"config.json: `{key}` is {value!r}; {expected}"


def test_values_inside_of_others_are_named() -> None:
    def error(name: str, **values: Any) -> str:
        with pytest.raises(ShapeError) as error:
            ModelConfig.from_dict({**published(name), **values})
        return str(error.value)

    least = "expected a whole number of at least -1."
    assert error("Llama 2", eos_token_id=[1, "a"]) == f"config.json: `eos_token_id` is 'a'; {least}"
    theta = f"config.json: `rope_parameters.rope_theta` is 'x'; {NUMBER}"
    assert error("Llama 2", rope_parameters={"rope_theta": "x"}) == theta
    factor = f"config.json: `rope_parameters.factor` is 'two'; {NUMBER}"
    assert error("Llama 2", rope_scaling={"rope_type": "linear", "factor": "two"}) == factor
    kind = "config.json: `rope_parameters.rope_type` is ['linear']; expected a text."
    assert error("Llama 2", rope_scaling={"rope_type": ["linear"]}) == kind
    assert "`hidden_size` is 64, which is not a multiple of `num_attention_heads` = 6" in error(
        "Llama 2", num_attention_heads=6
    )
    types = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": 1e4}
    kind = "config.json: `rope_parameters.sliding_attention` is 10000.0; expected an object."
    assert error("Gemma 3 1B", rope_parameters=types) == kind
    missing = "config.json: `max_position_embeddings` is missing; a phi3 model needs it."
    assert error("Phi 3.5 mini", max_position_embeddings=None) == missing


def test_a_mistyped_key_is_an_error_with_the_nearest_known_one() -> None:
    values = published("Llama 2")
    values["hiden_size"] = values.pop("hidden_size")
    text = "`hiden_size` = 64 is not known for llama; .* `hidden_size` is missing; if that is meant, write it. Remove"
    with pytest.raises(UnsupportedError, match=text):
        ModelConfig.from_dict(values)


def test_all_keys_that_are_declined_are_in_one_error() -> None:
    values = {**published("Llama 2"), "use_mrope": True, "qk_layernorm": True, "sliding_windows": 7}
    with pytest.raises(UnsupportedError) as error:
        ModelConfig.from_dict(values)
    assert [f"`{key}`" in str(error.value) for key in ("use_mrope", "qk_layernorm", "sliding_windows")] == [True] * 3
    assert "if that is meant" not in str(error.value)  # no key is missing, so none is proposed
    assert "\n" not in str(error.value)


def test_keys_without_an_effect_on_logits_are_accepted() -> None:
    extra = {"attention_dropout": 0.1, "router_jitter_noise": 0.1, "output_router_logits": True, "torchscript": True}
    extra |= {"unsloth_version": "2025.1", "model_max_length": 4096, "_model_name_or_path": "x", "unk_token_id": 0}
    for name in ("Llama 2", "Mixtral 8x7B", "DeepSeek V3"):
        assert ModelConfig.from_dict({**published(name), **extra}) == ModelConfig.from_dict(published(name))


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("Llama 2", {"num_hidden_layers": 10**8}, "`num_hidden_layers` is 100000000; expected 10000 at most."),
        ("Mixtral 8x7B", {"num_local_experts": 10**9}, "`num_local_experts` is 1000000000; expected 100000 at most."),
        (
            "Mixtral 8x7B",
            {"num_experts_per_tok": 9},
            "`num_experts_per_tok` is 9, of `num_local_experts` = 8",
        ),
        (
            "DeepSeek V3",
            {"n_group": 3},
            "`n_group` = 3 groups, `topk_group` = 2 of which",
        ),
        ("DeepSeek V3", {"topk_group": 5}, "`topk_group` = 5 of which"),
        ("DeepSeek V3", {"num_experts_per_tok": 5}, "`num_experts_per_tok` is 5, of `n_routed_experts` = 8"),
        ("DeepSeek V2", {"topk_method": "noaux"}, "`topk_method` is 'noaux'; the decoder computes deepseek_v2 with"),
        ("Llama 2", {"hidden_size": 10**400}, "`hidden_size` is 1000"),
        ("Llama 2", {"rope_theta": 10**400}, "`rope_theta` is 1000"),
        ("Llama 2", {"rms_norm_eps": float("nan")}, "`rms_norm_eps` is nan"),
        ("Llama 2", {"rope_scaling": {"rope_type": "yarn", "factor": float("nan")}}, "`rope_parameters.factor` is nan"),
        ("Phi 3.5 mini", {"rope_scaling": {**LONGROPE, "long_factor": [float("nan")] * 8}}, "rope_scaling"),
        ("Phi 3.5 mini", {"rope_scaling": {**LONGROPE, "long_factor": 3}}, "rope_scaling"),
        ("Gemma 3 1B", {"rope_parameters": {"rope_type": "linear", "factor": 8}}, "`rope_parameters` is {"),
        ("Qwen3 30B-A3B", {"mlp_only_layers": {}}, "`mlp_only_layers` is {}"),
        ("Llama 2", {"model_type": ["llama"]}, "`model_type` is ['llama']"),
    ],
)
def test_absurd_values_are_declined_before_memory_is_taken(name: str, values: dict[str, Any], text: str) -> None:
    with pytest.raises((ShapeError, UnsupportedError)) as error:
        ModelConfig.from_dict({**published(name), **values})
    assert text in str(error.value)
    assert len(str(error.value)) < 1000


def test_damaged_files_are_errors_that_name_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, reason in (("[" * 200_000, "nested too deeply"), ("[1]", "expected a JSON object"), ("{", "not JSON")):
        path.write_text(text)
        with pytest.raises(ShapeError, match=reason):
            read_config(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ShapeError, match="not a regular file"):
        read_config(tmp_path)
