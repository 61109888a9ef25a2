"""Families with states and the parts that they alone have: packed rows, gradients, training, plans, published files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models_peer
from models_families import TINY
from vishwamai import ShapeError
from vishwamai.models import Decoder, ModelConfig
from vishwamai.planning.memory.analytic import training_memory
from vishwamai.training.config import TrainConfig
from vishwamai.training.config_file import from_dict
from vishwamai.training.run import train

HYBRIDS = ["mamba2", "bamba", "granitemoehybrid", "nemotron_h", "lfm2_moe", "olmo_hybrid", "kimi_linear"]
HYBRIDS += ["falcon_h1", "mamba", "falcon_mamba", "jamba", "minimax", "zamba2"]


def tiny(name: str) -> ModelConfig:
    return ModelConfig.from_dict(TINY[name].config().to_dict())


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.turns(8)
def test_packed_sequences_do_not_mix_and_every_parameter_has_a_gradient(name: str) -> None:
    model = Decoder(tiny(name), rngs=nnx.Rngs(0), stacked=True)
    rows = jnp.asarray(np.random.default_rng(0).integers(3, 131, (2, 11)), jnp.int32)
    ids, positions = jnp.repeat(jnp.array([[1, 2]]), 11, axis=1), jnp.tile(jnp.arange(11), 2)[None]

    def loss(model: Decoder) -> tuple[Any, Any]:
        hidden = model(rows.reshape(1, -1), positions, ids)
        return jnp.sum(jnp.square(model.logits(hidden))), hidden

    gradient, packed = nnx.jit(nnx.grad(loss, has_aux=True))(model)
    np.testing.assert_allclose(packed.reshape(2, 11, -1), nnx.jit(lambda model: model(rows))(model), atol=5e-5)
    layers: Any = nnx.to_pure_dict(gradient)["layers"]
    zero = {name for layer in layers.values() for name, g in layer.items() if not float(jnp.abs(g).max()) > 0}
    assert zero <= {"router_correction"}  # which chooses experts only


def training(name: str, directory: Path, **keys: Any) -> TrainConfig:
    """Two steps of a tiny model on a text."""
    (directory / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    model = {**TINY[name].config().to_dict(), "vocab_size": 288}
    return from_dict(
        {
            "model": {"config": model, "compute_dtype": "float32"},
            "tokenizer": {"vocab_size": 288},
            "data": {"sources": [{"paths": [str(directory / "text.txt")]}], "sequence_length": 16},
            "optimizer": {"learning_rate": 0.01},
            "steps": 2,
            "batch_size": 1,
            **keys,
        }
    )


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.turns(8)
def test_a_plan_counts_the_parameters_of_transformers_and_a_run_trains_them(name: str, tmp_path: Path) -> None:
    config = training(name, tmp_path)
    peer = models_peer.Peer.build(transformers_config(config))
    corrections = [b for key, b in peer.named_buffers() if key.endswith(("correction_bias", "expert_bias"))]
    numbers = sum(x.numel() for x in [*peer.parameters(), *corrections])
    assert training_memory(config, "v5e").parts["parameters"].value == 4 * numbers
    losses = [record.loss for record in train(config, tmp_path / "run")]
    assert len(losses) == 2 and np.isfinite(losses).all() and losses[1] != losses[0]


@pytest.mark.long
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"expert": 2}], ids=str)
def test_a_mesh_does_not_change_a_run(mesh: dict[str, int], tmp_path: Path) -> None:
    """Experts without a gate, in a latent space, next to a network that every token passes."""
    single, split = (
        [r.loss for r in train(training("nemotron_h", tmp_path, batch_size=2, **keys), tmp_path / name)]
        for name, keys in (("single", {}), ("split", {"mesh": mesh}))
    )
    np.testing.assert_allclose(split, single, rtol=1e-4)


def transformers_config(config: TrainConfig) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values: Any = config.model.config
    return CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))


def test_sizes_of_heads_and_patterns_that_contradict_are_errors() -> None:
    base = {name: TINY[name].config().to_dict() for name in HYBRIDS}
    for name, changes, text in (
        ("mamba2", {"head_dim": 8}, "`num_heads` is 8 and `head_dim` is 8; expected heads of one size"),
        ("bamba", {"mamba_n_heads": 7}, "`mamba_n_heads` is 7"),
        ("bamba", {"attn_layer_indices": ["1"]}, "`attn_layer_indices` is"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "`hybrid_override_pattern` is 'MX'",
        ),
    ):
        with pytest.raises(ShapeError, match=text):
            ModelConfig.from_dict({**base[name], **changes})


def test_granite_without_experts_has_a_dense_network() -> None:
    values = {**TINY["granitemoehybrid"].config().to_dict(), "num_local_experts": 0, "num_experts_per_tok": 0}
    config = ModelConfig.from_dict({**values, "position_embedding_type": "rope"})
    assert config.experts is None and config.intermediate_size == 40
    assert [kind.mixer.rope.partial for kind in config.layers] == [0.0, 1.0, 0.0]
    assert ModelConfig.from_dict(config.to_dict()) == config
