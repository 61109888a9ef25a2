"""Quantized weights over a mesh: the numbers of one device, values and scales split by the same rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rotation
from published import write
from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import QTensor
from vishwamai.inference import Engine, Limits, Sampling, plan_load
from vishwamai.inference.memory import weight_bytes
from vishwamai.inference.pools import make_pools
from vishwamai.inference.sharding import on_mesh, place_model, serving_mesh, serving_rules
from vishwamai.models import Decoder, ModelConfig, PagedBatch, from_pretrained, save_pretrained

LIMITS = Limits(max_sequences=1, max_tokens=8, mixed_tokens=8, max_length=80, page_size=4)  # few programs
VALUES = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
VALUES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MOE |= {"norm_topk_prob": True, "head_dim": 16}


def save(directory: Path, **changed: Any) -> Path:
    save_pretrained(Decoder(ModelConfig.from_dict({**VALUES, **changed}), rngs=nnx.Rngs(0)), directory)
    return directory


def states(model: Decoder, mesh: Any) -> np.ndarray:
    """Hidden states of 7 tokens, by a serving step."""
    batch = PagedBatch(jnp.array([7], jnp.int32), jnp.arange(2, dtype=jnp.int32)[None], jnp.array([0, 7], jnp.int32))
    pools = make_pools(model, 4, 2, jnp.dtype(jnp.float32), (), mesh)
    with on_mesh(mesh):
        step = jax.jit(lambda model, pools: model.step(jnp.arange(7, dtype=jnp.int32), pools, batch)[0])
        return jax.device_get(step(model, pools))


def bytes_of_devices(model: Decoder, mesh: Any) -> set[int]:
    each = dict.fromkeys(mesh.devices.flat, 0)
    for shard in (shard for x in jax.tree.leaves(model) for shard in x.addressable_shards):
        each[shard.device] += shard.data.nbytes
    return set(each.values())


def check(directory: Path, quantize: str, axes: str, stacked: bool) -> Decoder:
    """Loads over a mesh what one device has, and compares weights, states and planned bytes."""
    mesh, options = serving_mesh(axes), {"dtype": jnp.float32, "quantize": quantize, "stacked": stacked}
    one = from_pretrained(directory, **options)
    model = from_pretrained(directory, mesh=mesh, rules=serving_rules(one.config, mesh.shape), **options)
    for found, expected in zip(jax.tree.leaves(model), jax.tree.leaves(one), strict=True):
        digits = 1e-6 * jnp.issubdtype(expected.dtype, jnp.floating)  # a scale is searched by sums, in another order
        np.testing.assert_allclose(jax.device_get(found), jax.device_get(expected), rtol=digits, atol=0)
    assert bytes_of_devices(model, mesh) == {
        weight_bytes(one.config, 4, quantize=quantize, mesh=mesh, directory=directory)
    }
    found, expected = states(model, mesh), states(one, None)
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()
    return model


@pytest.mark.parametrize(
    ("quantize", "axes", "changed", "stacked"),
    rotation.in_turn(
        2,
        [
            ("int8", "tensor=4", {}, True),
            ("int4", "tensor=4", {"hidden_size": 128}, False),
            ("fp8", "tensor=2", {}, False),
            ("int4", "expert=2,tensor=2", MOE, False),
        ],
    ),
)
def test_weights_are_rounded_and_split(
    quantize: str, axes: str, changed: dict[str, Any], stacked: bool, tmp_path: Path
) -> None:
    model = check(save(tmp_path, **changed), quantize, axes, stacked)
    size = serving_mesh(axes).shape["tensor"]
    output = model.layers[0].arrays()["output"]
    assert isinstance(output, QTensor)
    blocks = output.scales.shape[-2]
    assert output.values.addressable_shards[0].data.shape[-2] == output.shape[-2] // size
    assert output.scales.addressable_shards[0].data.shape[-2] == (blocks if blocks == 1 else blocks // size)


@pytest.mark.parametrize(
    ("name", "axes"),
    rotation.in_turn(3, [("gptq-symmetric", "tensor=2"), ("compressed-tensors", "tensor=2"), ("mxfp4", "expert=3")]),
)
def test_published_weights_are_kept_and_split(name: str, axes: str, tmp_path: Path) -> None:
    published, _ = write(name, tmp_path, intermediate_size=96 if name == "mxfp4" else 128)
    check(published, "keep", axes, False)


@pytest.mark.turns(6)
def test_64_greedy_tokens_are_those_of_one_device(tmp_path: Path) -> None:
    """Also where a model of one device is split by the engine."""
    published, _ = write("gptq-symmetric", tmp_path, intermediate_size=128, hidden_size=128, num_key_value_heads=4)
    options = Sampling(max_new_tokens=64, ignore_eos=True)
    one = from_pretrained(published, dtype=jnp.float32, quantize="keep", stacked=False)
    expected = Engine(one, limits=LIMITS).generate([[3, 4, 5]], options)[0].token_ids
    mesh = serving_mesh("tensor=4")
    assert Engine(one, limits=LIMITS, mesh=mesh).generate([[3, 4, 5]], options)[0].token_ids == expected
    assert len(set(expected)) > 3


def test_blocks_that_a_mesh_cuts_are_named(tmp_path: Path) -> None:
    directory = save(tmp_path, intermediate_size=96)
    mesh = serving_mesh("tensor=2")
    named = r"layers/0/down has 96 rows \('mlp'\) in blocks of 32 .* 2 parts of 48; choose a mesh whose parts are mult"
    config = ModelConfig.from_dict({**VALUES, "intermediate_size": 96})
    rules = serving_rules(config, mesh.shape)
    with pytest.raises(ShapeError, match=f"from_pretrained: {named}"):
        from_pretrained(directory, quantize="int4", mesh=mesh, rules=rules)
    with pytest.raises(ShapeError, match=named):
        plan_load(directory, quantize="int4", mesh="tensor=2", max_length=16)
    with pytest.raises(ShapeError, match=r"Engine: down has 96 rows"):
        place_model(from_pretrained(directory, quantize="int4", stacked=False), mesh)
