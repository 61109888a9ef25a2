"""Decoders against transformers: tiny random checkpoints, logits, greedy tokens and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models_peer
import rotation
import vishwamai
from models_peer import Peer
from vishwamai.models import (
    Decoder,
    ModelConfig,
    PagedBatch,
    from_pretrained,
    page_shapes,
    read_config,
    save_pretrained,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "factor": 2.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
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
TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
PEERS = {
    "llama": Peer("Llama"),
    "llama 3 rope": Peer("Llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": Peer("Mistral", {"sliding_window": 9, "head_dim": 16}),
    "qwen2": Peer("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": Peer("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": Peer(
        "Gemma2", {"num_hidden_layers": 3, "sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24}
    ),
    "gemma3": Peer("Gemma3Text", {"num_hidden_layers": 5, "sliding_window": 8, "head_dim": 32, "layer_types": TYPES}),
    "phi3": Peer("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "olmo2": Peer("Olmo2"),
    "mixtral": Peer("Mixtral", {"num_local_experts": 4}),
    "qwen3 moe": Peer(
        "Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    ),
    "gpt-oss": Peer(
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 16, "swiglu_limit": 1.5},
    ),
    "deepseek v2": Peer("DeepseekV2", {**DEEPSEEK, "n_routed_experts": 8, "topk_method": "group_limited_greedy"}),
    "deepseek v3": Peer(
        "DeepseekV3", {**DEEPSEEK, "n_routed_experts": 8, "rope_parameters": YARN, "q_lora_rank": None}
    ),
}

PARAMETERS = [pytest.param(name, marks=rotation.one_in(4, i)) for i, name in enumerate(PEERS)]


def error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(np.asarray(found, np.float64) - exact).max())


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", PARAMETERS)
def test_logits_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    peer = PEERS[name].save(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 131, (2, 48))
    exact = models_peer.peer_logits(peer, tokens, double=True)
    # transformers takes a rotation's angles in float32 in either dtype: they are off by up to 48 * 2^-24.
    bound = 2 * error(models_peer.peer_logits(peer, tokens), exact) + 48 * 2.0**-24 * np.abs(exact).max()
    for stacked in (False, True):
        model = from_pretrained(tmp_path, dtype=jnp.float32, stacked=stacked)
        logits = jax.jit(lambda model, tokens: model.logits(model(tokens)))(model, tokens)
        assert error(logits, exact) <= bound
    stacked = list(PEERS).index(name) % 2 == 0  # the two differ in where pages lie: each for half of the families
    model = from_pretrained(tmp_path, dtype=jnp.float32, stacked=stacked)
    prompts = [tokens[0, :37].tolist(), tokens[1, :11].tolist()]
    found = models_peer.greedy(model, prompts, 64)
    assert found == [models_peer.peer_greedy(peer, prompt, 64) for prompt in prompts]


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", PARAMETERS)
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    import torch
    from safetensors.numpy import load_file

    peer = PEERS[name].save(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 131, (2, 24))
    model = from_pretrained(tmp_path, dtype=jnp.float32, stacked=True)

    def loss(model, tokens):
        hidden = model(tokens[:, :-1])
        cap = model.config.final_logit_softcap
        return vishwamai.linear_cross_entropy(hidden, model.head_weight(), tokens[:, 1:], softcap=cap)

    gradient = jax.jit(jax.grad(loss, allow_int=True))(model, tokens)
    save_pretrained(gradient, tmp_path / "gradient")
    logits = peer.double()(torch.as_tensor(tokens[:, :-1]), use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(tokens[:, 1:]).flatten()).backward()
    for parameter in peer.parameters():  # transformers itself gives them the names of a checkpoint
        parameter.data = parameter.grad
    peer.save_pretrained(tmp_path / "expected")
    found, expected = (load_file(tmp_path / n / "model.safetensors") for n in ("gradient", "expected"))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        if key.endswith("e_score_correction_bias"):  # moves the choice alone
            assert not value.any()
            continue
        assert error(value, expected[key]) <= 2e-5 * np.abs(expected[key]).max() + 1e-7, key


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_is_saved_is_what_transformers_loads(name: str, tmp_path: Path) -> None:
    import transformers

    peer = PEERS[name].save(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs", dtype=jnp.float32)
    save_pretrained(model, tmp_path / "ours")
    assert read_config(tmp_path / "ours") == model.config
    back, report = transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not any(report.values()), report
    tokens = np.random.default_rng(0).integers(3, 131, (1, 40))
    assert (models_peer.peer_logits(back, tokens) == models_peer.peer_logits(peer, tokens)).all()


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", PARAMETERS)
def test_bfloat16_is_within_its_rounding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tokens go to the experts that float32 chooses: two scores may be closer than the rounding."""
    import torch

    chosen: list[jax.Array] = []
    layer = vishwamai.moe_layer

    def observed(*arguments: Any, **options: Any) -> Any:
        made = layer(*arguments, **options)
        chosen.append(jnp.sort(made.routing.experts, axis=-1).reshape(2, 48, -1))
        return made

    monkeypatch.setattr(vishwamai, "moe_layer", observed)

    @jax.jit
    def logits(model: Decoder, tokens: Any) -> tuple[jax.Array, list[jax.Array]]:
        chosen.clear()
        return model.logits(model(tokens)), list(chosen)

    peer = PEERS[name].save(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 131, (2, 48))
    exact = models_peer.peer_logits(peer, tokens, double=True)
    _, expected = logits(from_pretrained(tmp_path, dtype=jnp.float32), tokens)
    model = from_pretrained(tmp_path, dtype=jnp.bfloat16)
    found, experts = logits(model, tokens)
    with torch.no_grad():
        theirs = peer.bfloat16()(torch.as_tensor(tokens), use_cache=False).logits.float().numpy()
    assert found.dtype == jnp.float32
    assert len(experts) == sum(kind.experts for kind in model.config.layers if model.config.experts)
    same = np.ones((2, 48), bool)
    for ours, wanted in zip(experts, expected, strict=True):
        same &= np.asarray(ours == wanted).all(-1)
    same = np.logical_and.accumulate(same, axis=1)  # what follows another choice has seen it
    assert same.sum() >= 12  # of 96
    assert error(found[same], exact[same]) <= 2 * error(theirs[same], exact[same])


@pytest.mark.turns(3)
def test_a_step_rotates_each_sequence_by_its_own_length() -> None:
    """LongRoPE has frequencies for the original context and others beyond it; a batch may hold sequences of both."""
    values = {**models_peer.SIZES, "model_type": "phi3", "rope_parameters": LONGROPE}
    config = ModelConfig.from_dict({**values, "original_max_position_embeddings": 8})
    model = Decoder(config, rngs=nnx.Rngs(0))
    prompts = [np.arange(5), np.arange(20)]
    pages = [jnp.zeros(s.shape, s.dtype) for s in page_shapes(config, num_pages=4, page_size=16, dtype=jnp.float32)]
    batch = PagedBatch(jnp.array([5, 20]), jnp.array([[0, 1], [2, 3]]), jnp.array([0, 5, 25]))
    step = jax.jit(lambda tokens, pages: model.step(tokens, pages, batch))
    hidden, _ = step(jnp.asarray(np.concatenate(prompts)), pages)
    alone = jax.jit(model.__call__)
    for found, prompt in zip((hidden[:5], hidden[5:]), prompts):
        np.testing.assert_allclose(found, alone(jnp.asarray(prompt)[None])[0], rtol=2e-4, atol=2e-5)
