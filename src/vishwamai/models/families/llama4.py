"""Llama 4: blocks of attention, layers without rotation, one expert whose input is weighted, and a shared one."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.models.families.family import BIASES, COMMON, EXPERTS, HEADS, SILU, Family, sizes, tokens
from vishwamai.models.layers.attention import Attention, ChunkedAttention
from vishwamai.models.layers.feed_forward import GATED
from vishwamai.models.parameters import PREFIX, Tensor

_UNIT = PREFIX + "feed_forward."

LLAMA4: Mapping[str, Family] = {
    "llama4_text": Family(
        "Llama4ForCausalLM",
        {
            **{key: field for key, field in COMMON.items() if key != "intermediate_size"},
            **SILU,
            **HEADS,
            **BIASES,
            **EXPERTS,
            "intermediate_size": "experts.inner_size",
            "intermediate_size_mlp": "intermediate_size",
            "num_local_experts": "experts.count",
        },
        fields={
            "rope_interleaved": True,
            "experts.method": "sigmoid",
            "experts.normalize": False,
            "experts.shared": 1,
            "experts.weight_inputs": True,
        },
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "attention_bias": False,
            "attention_chunk_size": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
            **tokens(1, 2),
        },
        sizes={**sizes(202048, 5120, 8192, 48, 40, 131072), "intermediate_size_mlp": 16384},
        choices={"use_qk_norm": ("qk_norm", {True: "turning", False: None})},
        ignored=("for_llm_compressor",),
        layer_types="types",
        layer_keys=(
            *("attention_chunk_size", "attn_scale", "attn_temperature_tuning", "floor_scale"),
            *("interleave_moe_layer_step", "moe_layers", "no_rope_layer_interval", "no_rope_layers"),
        ),
        theta=500000.0,
        mixers={"full_attention": Attention, "chunked_attention": ChunkedAttention},
        tensors={
            **{name: Tensor(f"{_UNIT}{name}_proj.weight", True) for name in GATED},
            "router": Tensor(_UNIT + "router.weight", True),
            "expert_gate": Tensor(_UNIT + "experts.gate_up_proj", part="gate"),
            "expert_up": Tensor(_UNIT + "experts.gate_up_proj", part="up"),
            "expert_down": Tensor(_UNIT + "experts.down_proj"),
            **{f"shared_{name}": Tensor(f"{_UNIT}shared_expert.{name}_proj.weight", True) for name in GATED},
        },
    ),
}
