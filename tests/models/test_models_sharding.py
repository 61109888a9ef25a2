"""Decoders on a mesh: the numbers of one device, with parameters that each device has its part of only."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import rotation
from vishwamai import ShapeError
from vishwamai.models import Decoder, ModelConfig, from_pretrained, save_pretrained

VALUES = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
RULES = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_pretrained(Decoder(ModelConfig.from_dict(VALUES), rngs=nnx.Rngs(0)), path)
    return path


def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    return (model.logits(model(tokens)) ** 2).mean()


TOKENS = jnp.arange(24).reshape(4, 6)


@functools.cache
def on_one_device(directory: Path, stacked: bool) -> Decoder:
    """The gradients of `loss`."""
    return jax.jit(jax.grad(loss))(from_pretrained(directory, dtype=jnp.float32, stacked=stacked), TOKENS)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("stacked", rotation.in_turn(2, [False, True]))
def test_a_mesh_gives_what_one_device_gives(axes: AxisType, stacked: bool, directory: Path) -> None:
    expected = on_one_device(directory, stacked)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axes, axes))
    with jax.set_mesh(mesh):
        model = from_pretrained(directory, dtype=jnp.float32, mesh=mesh, rules=RULES, stacked=stacked)
        query = model.layers[0].arrays()["query"]
        assert query.addressable_shards[0].data.shape[-2:] == (32, 32)  # half of the heads
        found = jax.jit(jax.grad(loss))(model, jax.device_put(TOKENS, NamedSharding(mesh, PartitionSpec("data"))))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max() + 1e-9


def test_rules_that_do_not_fit_are_named(directory: Path, tmp_path: Path) -> None:
    mesh = jax.make_mesh((1, 8), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    with pytest.raises(
        ShapeError, match="map 'mlp' .axis 1 of layers.0.gate. to 'model', but the mesh's axes are data"
    ):
        from_pretrained(directory, mesh=mesh, rules={"mlp": "model"})
    with pytest.raises(ShapeError, match="embed has 20 along axis 0 .'vocab'., which tensor=8 does not divide"):
        save_pretrained(Decoder(ModelConfig.from_dict({**VALUES, "vocab_size": 20}), rngs=nnx.Rngs(0)), tmp_path)
        from_pretrained(tmp_path, mesh=mesh, rules=RULES)
    with pytest.raises(ShapeError, match="`rules` have 'head'; a decoder's axes are named vocab, embed, heads"):
        from_pretrained(directory, mesh=mesh, rules={"head": "tensor"})
    with pytest.raises(ShapeError, match="`rules` are given without a `mesh`"):
        from_pretrained(directory, rules=RULES)
