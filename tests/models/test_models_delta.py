"""Gated delta nets within a decoder: packed rows, gradients, and what the engine and split rows decline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models_families import TINY
from vishwamai import UnsupportedError
from vishwamai.models import Decoder, ModelConfig
from vishwamai.models.axes import MeshAxes
from vishwamai.training.config_file import from_dict
from vishwamai.training.flops import flops_per_token
from vishwamai.training.run import train


@pytest.fixture(scope="module")
def model() -> Decoder:
    values = TINY["qwen3_5_text"].config().to_dict()
    values |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = ModelConfig.from_dict(values)
    return Decoder(config, rngs=nnx.Rngs(0), stacked=True)


@pytest.mark.turns(6)
def test_packed_sequences_do_not_mix(model: Decoder) -> None:
    first, second = (np.random.default_rng(i).integers(3, 131, n) for i, n in enumerate((9, 14)))
    row, ids = np.concatenate([first, second])[None], np.repeat([1, 2], (9, 14))[None]
    positions = np.concatenate([np.arange(9), np.arange(14)])[None]
    packed = model(*(jnp.asarray(x, jnp.int32) for x in (row, positions, ids)))
    single = jnp.concatenate([model(jnp.asarray(x[None])) for x in (first, second)], axis=1)
    np.testing.assert_allclose(packed, single, atol=2e-5)


@pytest.mark.turns(6)
def test_every_parameter_has_a_gradient(model: Decoder) -> None:
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 131, (1, 20)))
    loss = nnx.jit(nnx.grad(lambda m, t: jnp.sum(jnp.square(m.logits(m(t))))))
    layers: Any = nnx.to_pure_dict(loss(model, tokens))["layers"]
    zero = {name for layer in layers.values() for name, g in layer.items() if not float(jnp.abs(g).max()) > 0}
    assert not zero


def test_split_rows_are_declined_by_name(model: Decoder) -> None:
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UnsupportedError, match="need whole rows; set mesh.sequence=1"):
        model(tokens, tokens, axes=MeshAxes(sequence="sequence"))


def test_the_state_counts_the_same_at_any_length(model: Decoder) -> None:
    attention = sum(kind.mixer.layer_type == "full_attention" for kind in model.config.layers)
    more = flops_per_token(model.config, 200) - flops_per_token(model.config, 100)
    assert attention == 1 and more == 12 * model.config.num_heads * model.config.head_dim * 100


@pytest.mark.long
def test_a_mesh_does_not_change_a_run(tmp_path: Path) -> None:
    """A device of the mesh axis "tensor" has the whole delta net, and its part of attention."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "max_position_embeddings": 64}
    model = {
        **TINY["qwen3_5_text"].options,
        **sizes,
        "model_type": "qwen3_5_text",
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }
    values = {
        "model": {"config": model, "compute_dtype": "float32"},
        "tokenizer": {"vocab_size": 288},
        "data": {"sources": [{"paths": [str(tmp_path / "text.txt")]}], "sequence_length": 32},
        "optimizer": {"learning_rate": 0.01},
        "steps": 3,
        "batch_size": 4,
    }
    single, split = (
        [r.loss for r in train(from_dict({**values, **mesh}), tmp_path / name)]
        for name, mesh in (("single", {}), ("split", {"mesh": {"fsdp": 2, "tensor": 2}}))
    )
    assert single[-1] < single[0]
    np.testing.assert_allclose(split, single, rtol=1e-4)
