"""Short convolutions within a decoder (LFM2): packed rows, gradients, published configurations, what is declined."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models_families import TINY
from vishwamai import ShapeError, UnsupportedError
from vishwamai.models import Decoder, ModelConfig
from vishwamai.models.axes import MeshAxes


def values(**changes: Any) -> dict[str, Any]:
    """Keys of a tiny model of two layers."""
    types = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    return {**TINY["lfm2"].config().to_dict(), **types, **changes}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(ModelConfig.from_dict(values()), rngs=nnx.Rngs(0))


@pytest.mark.turns(6)
def test_packed_sequences_do_not_mix(model: Decoder) -> None:
    first, second = (np.random.default_rng(i).integers(3, 131, n) for i, n in enumerate((9, 14)))
    row, ids = np.concatenate([first, second])[None], np.repeat([1, 2], (9, 14))[None]
    positions = np.concatenate([np.arange(9), np.arange(14)])[None]
    packed = model(*(jnp.asarray(x, jnp.int32) for x in (row, positions, ids)))
    single = jnp.concatenate([model(jnp.asarray(x[None])) for x in (first, second)], axis=1)
    np.testing.assert_allclose(packed, single, atol=2e-5)


@pytest.mark.turns(3)
def test_every_parameter_has_a_gradient(model: Decoder) -> None:
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 131, (1, 20)))
    gradient = nnx.jit(nnx.grad(lambda m, t: jnp.sum(jnp.square(m.logits(m(t))))))(model, tokens)
    layers: Any = nnx.to_pure_dict(gradient)["layers"]
    zero = {name for layer in layers.values() for name, g in layer.items() if not float(jnp.abs(g).max()) > 0}
    assert not zero


def test_split_rows_are_declined_by_name(model: Decoder) -> None:
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UnsupportedError, match="need whole rows; set mesh.sequence=1"):
        model(tokens, tokens, axes=MeshAxes(sequence="sequence"))


def test_sizes_and_types_that_follow_from_other_keys() -> None:
    """The keys of LFM2-350M, as Liquid AI published them; and values that no size follows from."""
    old = {"block_ff_dim": 6656, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "full_attn_idxs": [1]}
    config = ModelConfig.from_dict({**values(), **old, "block_ffn_dim_multiplier": 1.0, "layer_types": None})
    assert config.intermediate_size == 4608
    assert [kind.mixer.layer_type for kind in config.layers] == ["conv", "full_attention"]
    with pytest.raises(ShapeError, match="`block_multiple_of` is 0; expected"):
        ModelConfig.from_dict({**values(), **old, "block_multiple_of": 0})
    with pytest.raises(UnsupportedError, match="`conv_bias` is True"):
        ModelConfig.from_dict(values(conv_bias=True))
