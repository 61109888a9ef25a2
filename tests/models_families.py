"""A tiny model of every family, with sizes that few models have."""

from __future__ import annotations

from models_peer import Peer

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
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}

TINY: dict[str, Peer] = {
    "llama": Peer("Llama"),
    "mistral": Peer("Mistral", {"sliding_window": 9, "head_dim": 24}),
    "qwen2": Peer("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": Peer("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": Peer("Gemma2", {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24}),
    "gemma3_text": Peer("Gemma3Text", {"sliding_window": 8, "head_dim": 24, "layer_types": None}),
    "phi3": Peer("Phi3", {"original_max_position_embeddings": 16, "sliding_window": 11}),
    "olmo2": Peer("Olmo2"),
    "mixtral": Peer("Mixtral", MIXTURE),
    "qwen3_moe": Peer(
        "Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 24}
    ),
    "gpt_oss": Peer("GptOss", {**MIXTURE, "sliding_window": 9, "head_dim": 16, "swiglu_limit": 1.5}),
    "deepseek_v2": Peer("DeepseekV2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": Peer("DeepseekV3", DEEPSEEK),
}
