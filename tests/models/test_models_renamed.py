"""Families that transformers has no class of: their published files have the mathematics of a family that it has, with
names and keys of their own. InternLM 2, MiniCPM, MiMo, openPangu, Ling and Ring, Baichuan 2.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models_peer
from models_families import CORRECTED
from models_peer import SIZES, Peer
from vishwamai.models import from_pretrained, read_config, save_pretrained

SHARED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHARED += ("num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
PLAIN = {key: SIZES[key] for key in SHARED}
LING = {
    "model.embed_tokens.": "model.word_embeddings.",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias",
    "block_sparse_moe": "mlp",
    **{f".w{i}.": f".{name}_proj." for i, name in ((1, "gate"), (3, "up"), (2, "down"))},
}


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A model of transformers, the keys of the file, and the names of its tensors.

    Attributes:
      fused: name of the tensor that has queries, keys and values; None where they are apart.
      grouped: it has them by head of keys, one group after the other.
      head_norm: the head's rows are normalized.
      alibi: logits of attention fall with the distance, and nothing rotates.
      unread: tensors of layers that draft, which the decoder leaves out.
    """

    peer: Peer
    keys: dict[str, Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused: str | None = None
    grouped: bool = False
    head_norm: bool = False
    alibi: bool = False
    unread: tuple[str, ...] = ()

    def save(self, directory: Path) -> Any:
        """Writes a random checkpoint as it would be published and returns the model of transformers."""
        peer = self.peer.save(directory)
        path = directory / "model.safetensors"
        save_file(self.tensors(load_file(path)) | {name: np.ones(4, np.float32) for name in self.unread}, path)
        values = {
            **PLAIN,
            "hidden_act": "silu",
            "rms_norm_eps": peer.config.rms_norm_eps,
            "rope_scaling": None,
            **self.keys,
        }
        values = {key: value for key, value in values.items() if value is not None or key == "rope_scaling"}
        values["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
        (directory / "config.json").write_text(json.dumps(values))
        return peer

    def logits(self, peer: Any, tokens: np.ndarray) -> np.ndarray:
        """Logits of the model that the file describes."""
        import torch

        with torch.no_grad():
            if self.head_norm:
                peer.lm_head.weight.copy_(torch.nn.functional.normalize(peer.lm_head.weight))
            if not self.alibi:
                return models_peer.peer_logits(peer, tokens)
            heads, (rows, length) = SIZES["num_attention_heads"], tokens.shape
            slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
            distance = torch.arange(length)[:, None] - torch.arange(length)
            bias = torch.where(distance >= 0, -slopes[:, None, None] * distance, float("-inf"))
            options = {
                "attention_mask": bias.expand(rows, -1, -1, -1),
                "position_ids": torch.zeros(tokens.shape).long(),
            }
            return peer(torch.as_tensor(tokens), use_cache=False, **options).logits.numpy()

    def tensors(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        renamed = {}
        for name, value in tensors.items():
            if self.fused is not None and ".q_proj." in name:
                start, end = name.split("self_attn.q_proj")
                parts = [tensors[name.replace("q_proj", f"{kind}_proj")] for kind in "qkv"]
                if self.grouped:
                    heads = SIZES["num_key_value_heads"]
                    parts = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
                    value = np.concatenate(parts, axis=1).reshape(-1, *parts[0].shape[2:])
                else:
                    value = np.concatenate(parts)
                name = f"{start}{self.fused}{end}"
            elif self.fused is not None and (".k_proj." in name or ".v_proj." in name):
                continue
            for old, new in self.names.items():
                name = name.replace(old, new)
            renamed[name] = value
        return renamed


FILES = {
    "internlm2": Renamed(
        Peer("Llama", {"attention_bias": True, "rope_theta": 500.0}),
        {"model_type": "internlm2", "bias": True, "rope_theta": 500.0, "attn_implementation": "eager"},
        {
            "model.embed_tokens.": "model.tok_embeddings.",
            "lm_head.": "output.",
            "self_attn.o_proj": "attention.wo",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            **{f"mlp.{name}_proj": f"feed_forward.w{i}" for i, name in ((1, "gate"), (3, "up"), (2, "down"))},
        },
        "attention.wqkv",
        grouped=True,
    ),
    "minicpm": Renamed(
        Peer(
            "Granite",
            {
                "embedding_multiplier": 3.0,
                "residual_multiplier": 1.4 / 2**0.5,
                "logits_scaling": 64 / 24,
                "attention_multiplier": 0.25,
                "tie_word_embeddings": True,
            },
        ),
        {"model_type": "minicpm", "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 24},
    ),
    "PanguEmbedded": Renamed(
        Peer("Llama", {"attention_bias": True, "rope_theta": 16e6, "num_key_value_heads": 2}),
        {"model_type": "PanguEmbedded", "bias": True},
    ),
    "mimo": Renamed(
        Peer("Qwen2", {"rope_theta": 640.0, "tie_word_embeddings": False}),
        {"model_type": "mimo", "rope_theta": 640.0, "attention_bias": True, "use_mrope": False, "head_dim": 16}
        | {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2, "num_nextn_predict_layers": 1},
        unread=("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.q_proj.bias"),
    ),
    "bailing_moe, softmax": Renamed(
        Peer("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
        {"model_type": "bailing_moe", "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 0}
        | {"moe_intermediate_size": 96, "norm_topk_prob": True, "norm_head": False, "rope_theta": 1e6},
        LING,
        "attention.query_key_value",
    ),
    "bailing_moe": Renamed(
        Peer("Glm4Moe", {**CORRECTED, "head_dim": 24, "use_qk_norm": True, "attention_bias": False}),
        {
            "model_type": "bailing_moe",
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "num_experts": 8,
            "num_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 40,
            **{key: CORRECTED[key] for key in CORRECTED if key not in ("n_routed_experts", "n_shared_experts")},
            "head_dim": 24,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "router_dtype": "fp32",
        },
        LING,
        "attention.query_key_value",
    ),
}

BAICHUAN = {"model_type": "baichuan", "num_key_value_heads": None, "_from_model_config": True, "z_loss_weight": 0}
for variant, keys in (
    ("baichuan", {}),
    ("baichuan, alibi", {"max_position_embeddings": None, "model_max_length": 256}),
):
    FILES[variant] = Renamed(
        Peer("Llama", {"num_key_value_heads": 4}),
        {**BAICHUAN, **keys},
        fused="self_attn.W_pack",
        head_norm=True,
        alibi=bool(keys),
    )

ALIKE = {name: file for name, file in FILES.items() if not file.head_norm and not file.alibi}
"""Those of which transformers' model computes what the file describes, without a change of its own."""


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", FILES)
def test_a_published_file_gives_the_logits_of_its_like(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    peer = file.save(tmp_path / "file")
    stored = load_file(tmp_path / "file" / "model.safetensors")
    model = from_pretrained(tmp_path / "file", dtype=jnp.float32)
    tokens = np.random.default_rng(0).integers(3, 131, (2, 48))
    logits, expected = np.asarray(model.logits(model(jnp.asarray(tokens)))), file.logits(peer, tokens)
    assert np.abs(logits - expected).max() <= 2e-5 * np.abs(expected).max()

    save_pretrained(model, tmp_path / "ours")
    assert read_config(tmp_path / "ours") == model.config
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == stored.keys() - {*file.unread}
    assert all(np.array_equal(ours[key], stored[key]) for key in ours)
