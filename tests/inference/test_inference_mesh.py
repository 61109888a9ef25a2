"""An engine over a mesh: the tokens of transformers on one device, with parameters and pages that each device has its
part of.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import models_peer
import rotation
from models_peer import Peer
from vishwamai.core.errors import DeviceError, ShapeError, UnsupportedError
from vishwamai.inference import Engine, Limits, Sampling, plan_load
from vishwamai.inference.memory import page_bytes, weight_bytes
from vishwamai.inference.pools import make_pools
from vishwamai.inference.sharding import on_mesh, place_model, serving_mesh, serving_rules
from vishwamai.models import Decoder, ModelConfig, PagedBatch, from_pretrained, pack_weights

LIMITS = Limits(max_sequences=1, max_tokens=8, mixed_tokens=8, max_length=80, page_size=4)  # few programs
PROMPT = np.random.default_rng(0).integers(3, 128, 13).tolist()
GREEDY = Sampling(max_new_tokens=64, ignore_eos=True)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GPT = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
DEEPSEEK = {"model_type": "deepseek_v3", **LATENT}
VALUES = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
VALUES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def config(**changed):
    return ModelConfig.from_dict({**VALUES, **changed})


@pytest.mark.parametrize(
    ("changed", "axes", "part"),
    rotation.in_turn(
        2,
        [
            ({}, "tensor=2", (2, 4, 2, 8)),
            ({"model_type": "qwen3_moe", "head_dim": 8, "vocab_size": 63, **MOE}, "expert=2,tensor=2", (2, 4, 2, 8)),
            ({"model_type": "qwen3_moe", "head_dim": 8, **MOE}, "expert=4", (2, 4, 4, 8)),
            ({"model_type": "olmo2"}, "tensor=2", (2, 4, 2, 8)),
            (DEEPSEEK, "tensor=4", (2, 4, 128)),  # latent rows have no heads
        ],
    ),
)
def test_a_step_over_a_mesh(changed, axes, part):
    """Of 7 tokens, which two devices do not share evenly."""
    model = Decoder(config(**changed), rngs=nnx.Rngs(0), stacked=False)
    batch = PagedBatch(jnp.array([7], jnp.int32), jnp.arange(2, dtype=jnp.int32)[None], jnp.array([0, 7], jnp.int32))

    def run(mesh):
        pools = make_pools(model, 4, 2, jnp.dtype(jnp.float32), (), mesh)
        with on_mesh(mesh):
            step = jax.jit(lambda model, pools: model.step(jnp.arange(7, dtype=jnp.int32), pools, batch))
            program = step.lower(model, pools).compile()
            hidden, pools = program(model, pools)
        return jax.device_get(hidden), pools, str(program.as_text())

    expected, _, _ = run(None)
    mesh = serving_mesh(axes)
    place_model(model, mesh)
    found, pools, text = run(mesh)
    assert (" all-reduce(" in text) == ("tensor" in axes)
    assert (" all-gather(" in text) == ("expert" in axes)  # the axis "tensor" adds up only
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert {shard.data.shape for shard in pools[0].addressable_shards} == {part}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "axes", "stacked"),
    [
        ("Qwen3", {"head_dim": 16, "num_hidden_layers": 1}, "tensor=2", False),
        ("Qwen3", {"head_dim": 16, "num_key_value_heads": 4, "vocab_size": 132}, "tensor=4", True),
        ("Qwen3Moe", {"head_dim": 16, **MOE}, "tensor=2", True),
        ("Qwen3Moe", {"head_dim": 16, **MOE}, "expert=2,tensor=2", False),
        ("GptOss", GPT, "expert=4,tensor=2", False),
        ("Olmo2", {}, "tensor=2", True),
        ("Olmo2", {"num_key_value_heads": 4}, "tensor=4", False),
        ("DeepseekV3", LATENT, "tensor=2", True),
        ("DeepseekV3", {**LATENT, "q_lora_rank": None}, "tensor=4", False),
        ("DeepseekV2", {**LATENT, "n_routed_experts": 8, "topk_method": "greedy"}, "expert=4,tensor=2", False),
    ],
)
def test_a_mesh_gives_the_tokens_of_one_device(tmp_path, name, options, axes, stacked):
    peer = Peer(name, options).save(tmp_path)
    expected = models_peer.peer_greedy(peer, PROMPT, 64)
    mesh = serving_mesh(axes)
    rules = serving_rules(from_pretrained(tmp_path, stacked=stacked).config, mesh.shape)
    model = from_pretrained(tmp_path, dtype=jnp.float32, stacked=stacked, mesh=mesh, rules=rules)
    engine = Engine(model, limits=LIMITS)  # on the mesh of its parameters
    assert list(engine.generate([PROMPT], GREEDY)[0].token_ids) == expected
    parts = 1 if model.config.latent else mesh.shape["tensor"]
    for pool in engine.programs.pages:
        assert len(pool.addressable_shards) == mesh.size
        assert {shard.data.shape[2] for shard in pool.addressable_shards} == {pool.shape[2] // parts}
    planned = plan_load(tmp_path, dtype="float32", page_size=4, mesh=axes)
    shards = [shard.data.nbytes for x in jax.tree.leaves(model) for shard in x.addressable_shards]
    assert planned.weights == sum(shards)  # devices of a CPU share its memory
    pools = make_pools(model, 4, planned.num_pages, jnp.dtype(jnp.float32), (), mesh)
    assert planned.pages == sum(
        shard.data.nbytes for pool in jax.tree.leaves(pools) for shard in pool.addressable_shards
    )


@pytest.mark.parametrize(
    ("changed", "axes"),
    [
        ({"vocab_size": 63}, "tensor=2"),  # a vocab that stays whole
        ({"tie_word_embeddings": True, "model_type": "qwen3_moe", "head_dim": 8, **MOE}, "expert=4,tensor=2"),
        ({"model_type": "olmo2"}, "tensor=2"),
        (DEEPSEEK, "expert=2,tensor=4"),
    ],
)
def test_the_plan_counts_what_each_device_holds(changed, axes):
    mesh = serving_mesh(axes)
    model = place_model(Decoder(config(**changed), rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16), mesh)

    def held(arrays):
        each = dict.fromkeys(mesh.devices.flat, 0)
        for shard in (shard for x in jax.tree.leaves(arrays) for shard in x.addressable_shards):
            each[shard.device] += shard.data.nbytes
        return set(each.values())

    assert held(model) == {weight_bytes(model.config, 2, mesh=mesh)}
    for dtype in map(jnp.dtype, ("float32", "int8")):
        assert held(make_pools(model, 4, 3, dtype, (), mesh)) == {3 * page_bytes(model.config, 4, dtype, mesh)}
    assert weight_bytes(model.config, 2) == sum(x.nbytes for x in jax.tree.leaves(model))


@pytest.mark.long
@pytest.mark.parametrize(("kv_dtype", "changed"), [("float32", {}), ("int8", {}), ("int8", DEEPSEEK)])
def test_an_engine_splits_a_model_of_one_device(kv_dtype, changed):
    options = Sampling(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=4, logprobs=3)
    one = Decoder(config(**changed), rngs=nnx.Rngs(0), stacked=False)
    expected = Engine(one, limits=LIMITS, kv_dtype=kv_dtype).generate([[3, 4, 5]], options)[0]
    answer = Engine(one, limits=LIMITS, kv_dtype=kv_dtype, mesh=serving_mesh("tensor=2")).generate([[3, 4, 5]], options)
    assert answer[0].token_ids == expected.token_ids
    output = one.layers[0].arrays()["output"]
    assert output.addressable_shards[0].data.shape == (output.shape[0] // 2, 32)


@pytest.mark.parametrize(
    ("changed", "axes", "error", "named"),
    [
        ({}, "tensor=4", ShapeError, 'axis "tensor" has size 4, which .* 2 kv heads; pass one of tensor=1, tensor=2'),
        ({"intermediate_size": 45}, "tensor=2", ShapeError, "45 features .*; pass one of tensor=1\\."),
        ({}, "expert=2", ShapeError, "llama has no experts"),
        (DEEPSEEK, "tensor=8", ShapeError, "4 query heads; pass one of tensor=1, tensor=2, tensor=4"),
        ({}, "data=2", ShapeError, 'axis "data"; pass the axes "tensor" and "expert" only'),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(changed, axes, error, named):
    model = Decoder(config(**changed), rngs=nnx.Rngs(0), stacked=False)
    with pytest.raises(error, match=named):
        Engine(model, limits=LIMITS, mesh=serving_mesh(axes))


def test_what_no_mesh_splits_is_named():
    model = Decoder(config(), rngs=nnx.Rngs(0), stacked=False)
    with pytest.raises(DeviceError, match=r"tensor=16 needs 16 devices, but JAX has 8 \(cpu\); on a CPU, XLA_FLAGS="):
        serving_mesh("tensor=16")
    with pytest.raises(ShapeError, match="tensor: Auto; pass explicit ones"):
        place_model(model, jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,)))
    with pytest.raises(UnsupportedError, match="parameter `query` is a Packed.*, which is not split over a mesh"):
        place_model(pack_weights(model), serving_mesh("tensor=2"))


def test_rules_split_what_a_family_has():
    both = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
    assert serving_rules(config(**DEEPSEEK), {"tensor": 2}) == both
    assert serving_rules(config(**DEEPSEEK), {"expert": 2}) == {"experts": "expert"}
    assert serving_rules(config(model_type="olmo2"), {"tensor": 2}) == both | {"kv_heads": "tensor"}
