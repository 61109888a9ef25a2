"""A tiny model of every family, with sizes that few models have."""

from __future__ import annotations

from typing import Any

from models_peer import Peer
from vishwamai.models.families import FAMILIES, Family

DEEPSEEK = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "routed_scaling_factor": 1.5,
}
INDEXED: dict[str, Any] = {"index_topk": 9, "index_n_heads": 16, "index_head_dim": 20}
INDEXED["pad_token_id"] = None  # whose embedding is 0, so that all of its scores would be equal
CORRECTED = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}

DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 20,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
SMALL_MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}

MAMBA = {"mamba_d_conv": 3, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_n_heads": 8, "num_hidden_layers": 3}

ZAMBA = {"adapter_rank": 6, "initializer_range": 0.12, "mamba_d_conv": 3, "mamba_d_state": 12, "mamba_ngroups": 2}
ZAMBA["n_mamba_heads"] = 8


def family(name: str) -> Family:
    """The family of an entry of `TINY`; some have several, "NAME, VARIANT"."""
    return FAMILIES[name.split(",")[0]]


TINY: dict[str, Peer] = {
    "llama": Peer("Llama"),
    "mistral": Peer("Mistral", {"sliding_window": 9, "head_dim": 24}),
    "qwen2": Peer("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": Peer("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": Peer("Gemma2", {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24}),
    "gemma4_text": Peer(
        "Gemma4Text",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "gemma4_text, layer embeddings": Peer(
        "Gemma4Text",
        {
            "num_hidden_layers": 7,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "head_dim": 16,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 131,
            "sliding_window": 8,
            "final_logit_softcapping": 20.0,
            "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, "full_attention"],
        },
    ),
    "gemma3n_text": Peer(
        "Gemma3nText",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "head_dim": 24,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 120,
            "sliding_window": 8,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 10,
            "intermediate_size": [96, 80, 96, 96, 64, 96],
            "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.8, 0.0],
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "gemma3_text": Peer("Gemma3Text", {"sliding_window": 8, "head_dim": 24, "sliding_window_pattern": 2}),
    "phi3": Peer("Phi3", {"original_max_position_embeddings": 16, "sliding_window": 11}),
    "olmo2": Peer("Olmo2"),
    "mixtral": Peer("Mixtral", MIXTURE),
    "phimoe": Peer(
        "Phimoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "sliding_window": 9,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "qwen3_moe": Peer(
        "Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 24}
    ),
    "gpt_oss": Peer("GptOss", {**MIXTURE, "sliding_window": 9, "head_dim": 16, "swiglu_limit": 1.5}),
    "deepseek_v2": Peer("DeepseekV2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": Peer("DeepseekV3", DEEPSEEK),
    "exaone": Peer("Exaone", {"head_dim": 24}),
    "hyperclovax": Peer(
        "HyperCLOVAX",
        {"residual_multiplier": 0.7, "logits_scaling": 0.3, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    ),
    "cwm": Peer("Cwm", {"head_dim": 24, "sliding_window": 9, "num_hidden_layers": 3}),
    "granitemoeshared": Peer(
        "GraniteMoeShared", {**MIXTURE, "shared_intermediate_size": 40, "residual_multiplier": 0.7}
    ),
    "flex_olmo": Peer("FlexOlmo", {"num_experts": 5, "num_experts_per_tok": 2}),
    "deepseek_v32": Peer("DeepseekV32", {**DEEPSEEK, **INDEXED}),
    "glm_moe_dsa": Peer("GlmMoeDsa", {**DEEPSEEK, **INDEXED, "num_hidden_layers": 4, "index_topk_freq": 2}),
    "olmo3": Peer("Olmo3", {"sliding_window": 9, "num_hidden_layers": 4}),
    "ministral": Peer("Ministral", {"sliding_window": 9, "head_dim": 24}),
    "ministral3": Peer(
        "Ministral3",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "seed_oss": Peer("SeedOss", {"head_dim": 24}),
    "smollm3": Peer("SmolLM3", {"no_rope_layer_interval": 2}),
    "exaone4": Peer("Exaone4", {"sliding_window": 9, "head_dim": 24, "num_hidden_layers": 4}),
    "granite": Peer(
        "Granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "logits_scaling": 5.0,
            "residual_multiplier": 0.4,
        },
    ),
    "glm": Peer("Glm", {"head_dim": 24}),
    "glm4": Peer("Glm4", {"head_dim": 24}),
    "ernie4_5": Peer("Ernie4_5", {"head_dim": 24}),
    "helium": Peer("Helium", {"head_dim": 16}),
    "gemma": Peer("Gemma", {"head_dim": 24}),
    "glm4_moe_lite": Peer("Glm4MoeLite", {key: v for key, v in DEEPSEEK.items() if key != "first_k_dense_replace"}),
    "qwen2_moe": Peer(
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": Peer("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "granitemoe": Peer(
        "GraniteMoe",
        {
            **MIXTURE,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "logits_scaling": 5.0,
            "residual_multiplier": 0.4,
        },
    ),
    "dots1": Peer("Dots1", CORRECTED),
    "glm4_moe": Peer("Glm4Moe", {**CORRECTED, "use_qk_norm": True, "head_dim": 24}),
    "minimax_m2": Peer("MiniMaxM2", {**MIXTURE, "head_dim": 24, "rotary_dim": 16}),
    "hunyuan_v1_dense": Peer(
        "HunYuanDenseV1",
        {
            "head_dim": 24,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 10000.0, "factor": 1.0},
        },
    ),
    "arcee": Peer("Arcee", {"head_dim": 24, "mlp_bias": True}),
    "apertus": Peer("Apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "starcoder2": Peer("Starcoder2", {"sliding_window": 9}),
    "cohere": Peer("Cohere", {"logit_scale": 0.3, "tie_word_embeddings": False}),
    "cohere2": Peer("Cohere2", {"logit_scale": 0.3, "sliding_window": 9, "num_hidden_layers": 4}),
    "qwen3_next": Peer("Qwen3Next", {**DELTA, **SMALL_MIXTURE}),
    "qwen3_5_text": Peer("Qwen3_5Text", DELTA),
    "qwen3_5_moe_text": Peer("Qwen3_5MoeText", {**DELTA, **SMALL_MIXTURE}),
    "lfm2": Peer(
        "Lfm2",
        {
            "block_multiple_of": 24,
            "conv_L_cache": 4,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
        },
    ),
    "internlm3": Peer("InternLM3", {"head_dim": 24}),
    "vaultgemma": Peer("VaultGemma", {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24}),
    "solar_open": Peer(
        "SolarOpen", {**{key: v for key, v in CORRECTED.items() if key != "first_k_dense_replace"}, "head_dim": 24}
    ),
    "hy_v3": Peer(
        "HYV3",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "head_dim": 24,
            "router_scaling_factor": 1.5,
        },
    ),
    "nemotron": Peer("Nemotron", {"head_dim": 24, "hidden_act": "relu2"}),
    "olmo": Peer("Olmo"),
    "stablelm": Peer("StableLm", {"use_qkv_bias": True, "use_parallel_residual": True}),
    "hunyuan_v1_moe": Peer("HunYuanMoEV1", {"head_dim": 24, "num_experts": 6, "moe_topk": 2}),
    "exaone_moe": Peer(
        "ExaoneMoe",
        {
            "head_dim": 24,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 4,
            "num_shared_experts": 2,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "topk_group": 2,
        },
    ),
    "gpt_neox": Peer("GPTNeoX"),
    "gemma4_text, experts": Peer(
        "Gemma4Text",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "llama4_text": Peer(
        "Llama4Text",
        {
            "head_dim": 24,
            "intermediate_size_mlp": 72,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "attention_chunk_size": 16,
            "floor_scale": 12,
            "attn_scale": 0.3,
            "no_rope_layer_interval": 3,
        },
    ),
    "mimo_v2_flash": Peer(
        "MiMoV2Flash",
        {
            "head_dim": 24,
            "v_head_dim": 16,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mistral4": Peer(
        "Mistral4",
        {
            **DEEPSEEK,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "afmoe": Peer(
        "Afmoe",
        {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "route_scale": 1.5,
            "sliding_window": 9,
            "mup_enabled": True,
        },
    ),
    "minicpm3": Peer(
        "MiniCPM3",
        {
            **{key: v for key, v in DEEPSEEK.items() if "dim" in key or "rank" in key or key == "num_key_value_heads"},
            "dim_model_base": 24,
            "scale_emb": 3.0,
        },
    ),
    "phi": Peer("Phi"),
    "cohere, norms of heads": Peer("Cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "stablelm, norms of heads": Peer("StableLm", {"qk_layernorm": True}),
    "falcon": Peer("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon, one head of keys": Peer("Falcon"),
    "falcon, in turn": Peer("Falcon", {"multi_query": False, "parallel_attn": False, "ffn_hidden_size": 80}),
    "gpt2": Peer("GPT2", {"n_inner": 96}),
    "gpt_bigcode": Peer("GPTBigCode"),
    "gpt_bigcode, all heads": Peer("GPTBigCode", {"multi_query": False}),
    "gptj": Peer("GPTJ", {"rotary_dim": 8}),
    "opt": Peer("OPT", {"ffn_dim": 96}),
    "bloom": Peer("Bloom", {"num_attention_heads": 6, "hidden_size": 72}),
    "ernie4_5_moe": Peer(
        "Ernie4_5_Moe",
        {
            "head_dim": 24,
            "moe_intermediate_size": 40,
            "moe_k": 2,
            "moe_layer_interval": 2,
            "moe_num_experts": 6,
            "num_hidden_layers": 4,
        },
    ),
    "mamba2": Peer("Mamba2", {"conv_kernel": 3, "head_dim": 16, "n_groups": 2, "num_heads": 8, "state_size": 12}),
    "bamba": Peer("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": Peer(
        "GraniteMoeHybrid",
        {
            **MAMBA,
            **MIXTURE,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "logits_scaling": 5.0,
            "residual_multiplier": 0.4,
            "shared_intermediate_size": 40,
        },
    ),
    "nemotron_h": Peer(
        "NemotronH",
        {
            "conv_kernel": 3,
            "head_dim": 24,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "mamba_head_dim": 20,
            "mamba_num_heads": 6,
            "moe_intermediate_size": 40,
            "moe_latent_size": 36,
            "moe_shared_expert_intermediate_size": 56,
            "n_group": 4,
            "n_groups": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
            "ssm_state_size": 12,
            "topk_group": 2,
        },
    ),
    "falcon_h1": Peer(
        "FalconH1",
        {
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.6,
            "embedding_multiplier": 1.5,
            "key_multiplier": 0.7,
            "lm_head_multiplier": 0.3,
            "mamba_d_conv": 3,
            "mamba_d_ssm": 96,
            "mamba_d_state": 12,
            "mamba_n_groups": 2,
            "mamba_n_heads": 8,
            "mlp_multipliers": [0.8, 1.3],
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7],
            "ssm_out_multiplier": 1.4,
        },
    ),
    "falcon_h1, norms": Peer(
        "FalconH1", {"mamba_d_ssm": None, "mamba_d_state": 12, "mamba_n_heads": 8, "mamba_rms_norm": True}
    ),
    "mamba": Peer("Mamba", {"conv_kernel": 3, "state_size": 12, "use_bias": True}),
    "falcon_mamba": Peer("FalconMamba", {"state_size": 12, "time_step_rank": 6, "tie_word_embeddings": False}),
    "jamba": Peer(
        "Jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 3,
            "mamba_d_conv": 3,
            "mamba_d_state": 12,
            "num_experts": 4,
            "num_hidden_layers": 3,
        },
    ),
    "zamba2": Peer(
        "Zamba2",
        {
            **ZAMBA,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "num_mem_blocks": 2,
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
        },
    ),
    "zamba2, groups of heads": Peer(
        "Zamba2", {**ZAMBA, "layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 3}
    ),
    "minimax": Peer(
        "MiniMax",
        {
            **MIXTURE,
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.7,
            "head_dim": 24,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.8,
            "mlp_alpha_factor": 1.3,
            "mlp_beta_factor": 0.9,
            "num_hidden_layers": 3,
        },
    ),
    "lfm2_moe": Peer(
        "Lfm2Moe",
        {
            "conv_L_cache": 4,
            "layer_types": ["conv", "full_attention", "conv"],
            "moe_intermediate_size": 40,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "routed_scaling_factor": 1.5,
        },
    ),
    "olmo_hybrid": Peer(
        "OlmoHybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 20,  # as many channels as of values: transformers writes filters of one size
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 20,
            "num_hidden_layers": 3,
        },
    ),
    "kimi_linear": Peer(
        "KimiLinear",
        {
            "kv_lora_rank": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_head_dim": 20,
            "linear_num_heads": 3,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "topk_group": 2,
            "v_head_dim": 12,
        },
    ),
}
