"""Rotary embeddings: every scaling beside transformers, the cache, exact angles, errors; see test_contract.py for every
case.
"""

# Calls take NumPy arrays here, and values that are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import vishwamai
from vishwamai import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MRopeScaling,
    NtkScaling,
    RotaryCache,
    ShapeError,
    YarnScaling,
    apply_rope,
    explain,
)
from vishwamai.core import ffi
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.target import Target
from vishwamai.ops.rope import tpu
from vishwamai.ops.rope.scaling import parse_scaling

THETA, HEAD_DIM = 500000.0, 64
_LIST = {"short": tuple(1 + 0.01 * i for i in range(32)), "long": tuple(1 + 0.3 * i for i in range(32))}

# (our scaling, transformers' rope_parameters, length of the sequence)
SCALINGS = {
    "default": (None, {"rope_type": "default"}, 40),
    "linear": (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}, 40),
    "dynamic short": (NtkScaling(4.0, 64), {"rope_type": "dynamic", "factor": 4.0}, 40),
    "dynamic long": (NtkScaling(4.0, 64), {"rope_type": "dynamic", "factor": 4.0}, 200),
    "llama3": (
        Llama3Scaling(8.0, 1.0, 4.0, 64),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        200,
    ),
    "yarn": (
        YarnScaling(4.0, 64),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        200,
    ),
    "yarn of DeepSeek": (
        YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.7),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        200,
    ),
    "longrope short": (
        LongRopeScaling(_LIST["short"], _LIST["long"], 64, factor=4.0),
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": list(_LIST["short"]),
            "long_factor": list(_LIST["long"]),
            "original_max_position_embeddings": 64,
        },
        40,
    ),
}
SCALINGS["longrope long"] = (*SCALINGS["longrope short"][:2], 200)


def normal(shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def by_transformers(parameters, positions, query, key):
    """Query and key as Llama of transformers rotates them, with its own frequencies for these positions."""
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": THETA, **parameters},
    )
    rotary = modeling.LlamaRotaryEmbedding(config)
    q, k = (torch.tensor(np.asarray(x)) for x in (query, key))
    cos, sin = rotary(q, torch.tensor(np.asarray(positions), dtype=torch.long))
    return [x.numpy() for x in modeling.apply_rotary_pos_emb(q, k, cos, sin)]


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_scalings_are_those_of_transformers(name, jitted):
    """With positions that only the program knows, and counted from 0; from our classes and from transformers' own
    dictionary.
    """
    scaling, parameters, length = SCALINGS[name]
    query, key = normal((2, 4, length, HEAD_DIM)), normal((2, 2, length, HEAD_DIM), 1)
    positions = np.broadcast_to(np.arange(length), (2, length))
    expected = by_transformers(parameters, positions, query, key)

    def run(positions, scaling=scaling):
        return apply_rope((query, key), positions, theta=THETA, scaling=scaling)

    results = [(jax.jit(run) if jitted else run)(jnp.asarray(positions)), run(None)]
    if "dynamic" not in name:
        results.append(run(None, parameters))
    for got in results:
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_fixed_ntk_stretches_the_slowest_pair_by_the_factor():
    plain = NtkScaling(1.0).frequencies(64, 10000.0, 0)
    stretched = NtkScaling(4.0).frequencies(64, 10000.0, 0)
    np.testing.assert_allclose(stretched[[0, -1]], plain[[0, -1]] / [1, 4])


@pytest.mark.turns(3)
@pytest.mark.parametrize("model, sections", [("Qwen2VL", [8, 12, 12]), ("Qwen3VL", [12, 10, 10])])
def test_mrope_is_that_of_qwen(model, sections):
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    folder = model.replace("VL", "_vl").lower()
    modeling = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    configuration = pytest.importorskip(f"transformers.models.{folder}.configuration_{folder}")
    rotary = getattr(modeling, "Qwen3VLTextRotaryEmbedding", None) or modeling.Qwen2VLRotaryEmbedding
    interleaved = model == "Qwen3VL"
    parameters = {"rope_theta": THETA, "rope_type": "default", "mrope_section": sections}
    parameters |= {"mrope_interleaved": True} if interleaved else {}
    config = getattr(configuration, f"{model}TextConfig")(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, rope_parameters=parameters
    )
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 50, (3, 2, 17))
    query, key = normal((2, 4, 17, HEAD_DIM)), normal((2, 2, 17, HEAD_DIM), 1)
    q, k = (torch.tensor(np.asarray(x)) for x in (query, key))
    cos, sin = rotary(config)(q, torch.tensor(positions))
    expected = [x.numpy() for x in modeling.apply_rotary_pos_emb(q, k, cos, sin)]
    scaling = MRopeScaling(sections, interleaved)
    cache = RotaryCache(HEAD_DIM, 50, THETA, scaling)
    ways: list[dict[str, Any]] = [{"theta": THETA, "scaling": scaling}, {"scaling": parameters}, {"cache": cache}]
    for options in ways:
        for ours, theirs in zip(apply_rope((query, key), positions, **options), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)
    # Three equal coordinates are one.
    same = jnp.broadcast_to(positions[0], positions.shape)
    plain = apply_rope(query, positions[0], theta=THETA)
    np.testing.assert_allclose(apply_rope(query, same, theta=THETA, scaling=scaling), plain, atol=1e-6)
    np.testing.assert_allclose(apply_rope(query, positions[0], cache=cache), plain, atol=1e-6)


@pytest.mark.parametrize("start", [0, 131072, 2**24, -5])
def test_angles_are_exact_at_any_position(start):
    """The float32 product `p f` is off by 0.008 at 131072 and by a radian at 2^24."""
    positions = start + np.arange(8)
    ones = jnp.ones((1, 1, 8, 64))
    frequencies = 10000.0 ** (-np.arange(32) / 32)
    angles = np.asarray(positions, np.longdouble)[:, None] * frequencies
    expected = np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], -1)
    got = apply_rope(ones, positions)[0, 0]
    np.testing.assert_allclose(got, expected.astype(np.float64), atol=3e-6)


def test_backward_is_the_inverse_rotation_and_keeps_nothing_of_the_queries():
    query, key = normal((2, 4, 9, 16)), normal((2, 2, 9, 16), 1)
    rotated, pull = jax.vjp(lambda *x: apply_rope(x), query, key)
    for back, x in zip(pull(rotated), (query, key), strict=True):
        np.testing.assert_allclose(back, x, atol=1e-5)


@pytest.mark.turns(4)
def test_cache():
    query = normal((2, 3, 10, 16))
    positions = jnp.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    cache = RotaryCache(16, 10, rotary_dim=8, dtype=jnp.bfloat16)
    assert (cache.max_positions, cache.cos.shape, cache.cos.dtype) == (10, (10, 4), jnp.bfloat16)
    exact = RotaryCache(16, 10, rotary_dim=8)
    for where in (None, positions):
        plain = apply_rope(query, where, rotary_dim=8)
        np.testing.assert_allclose(apply_rope(query, where, cache=exact), plain, atol=1e-6)
        np.testing.assert_allclose(apply_rope(query, where, cache=cache), plain, atol=0.03)
    assert cache.grow(7) is cache
    longer = cache.grow(33)
    assert longer.max_positions == 33 and longer.rotary_dim == 8 and longer.cos.dtype == jnp.bfloat16
    np.testing.assert_array_equal(longer.cos[:10], cache.cos)
    # A pytree: through jit as an argument, and back.
    again = jax.jit(lambda c: jax.tree.map(lambda x: x, c))(cache)
    assert isinstance(again, RotaryCache) and again.theta == cache.theta
    jitted = jax.jit(lambda c, x, p: apply_rope(x, p, cache=c))
    np.testing.assert_allclose(jitted(exact, query, positions), apply_rope(query, positions, rotary_dim=8), atol=1e-6)


def test_positions_outside_the_cache_are_nan_not_wrong():
    query = jnp.ones((1, 1, 3, 8))
    got = apply_rope(query, jnp.array([0, 10, -1]), cache=RotaryCache(8, 10))
    np.testing.assert_array_equal(np.isnan(got[0, 0, :, 0]), [False, True, True])


def test_a_long_cache_holds_the_frequencies_of_its_own_length():
    scaling = SCALINGS["longrope long"][0]
    query = normal((1, 2, 8, HEAD_DIM))
    long = apply_rope(query, cache=RotaryCache(HEAD_DIM, 200, scaling=scaling))
    positions = jnp.arange(200)
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, 192), (0, 0)))
    np.testing.assert_allclose(long, apply_rope(padded, positions, scaling=scaling)[:, :, :8], atol=1e-5)
    assert np.abs(long - apply_rope(query, scaling=scaling)).max() > 0.01


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: apply_rope(x[0]), ["`x`", "(3, 9, 16)", "(batch, heads, seq, head_dim)", "'bhsd'"]),
        (lambda x: apply_rope(x.astype(jnp.int32)), ["`x`", "int32", "float32"]),
        (lambda x: apply_rope((x, x, x)), ["sequence of 3", "(query, key)"]),
        (
            lambda x: apply_rope((x, x[:, :, :5])),
            ["`x[1]`", "`x[0]` has seq = 9", "(2, 3, 5, 16)", "(2, key_heads, 9, 16)"],
        ),
        (lambda x: apply_rope((x, x.astype(jnp.bfloat16))), ["float32", "bfloat16"]),
        (
            lambda x: apply_rope(x, jnp.arange(8)),
            ["(8,)", "`x` has seq = 9", "(2, 9)", "without leading axes"],
        ),
        (lambda x: apply_rope(x, jnp.zeros(9)), ["`positions`", "float32", "integers"]),
        (lambda x: apply_rope(x, rotary_dim=7), ["`rotary_dim`", "7", "even"]),
        (lambda x: apply_rope(x, rotary_dim=32), ["`rotary_dim`", "32", "head_dim = 16"]),
        (lambda x: apply_rope(x[..., :15]), ["head_dim is 15", "rotary_dim"]),
        (lambda x: apply_rope(x, theta=0.0), ["`theta`", "0.0", "10000.0"]),
        (lambda x: apply_rope(x, layout="sbhd"), ["`layout`", "'sbhd'", "bshd"]),
        (lambda x: apply_rope(x, scaling="yarn"), ["`scaling`", "'yarn'", "YarnScaling"]),
        (lambda x: apply_rope(x, scaling={"rope_type": "xpos"}), ["'xpos'", "llama3"]),
        (lambda x: apply_rope(x, scaling={"rope_type": "linear"}), ["'linear'", "factor", "pass"]),
        (lambda x: apply_rope(x, scaling={"rope_type": "linear", "factor": 2, "beta": 1}), ["'beta'", "factor"]),
        (lambda x: apply_rope(x, scaling={"rope_type": "dynamic", "factor": 2}), ["original_max_position_embeddings"]),
        (lambda x: apply_rope(x, scaling=LinearScaling(0.0)), ["factor = 0.0", "above 0"]),
        (lambda x: apply_rope(x, scaling=MRopeScaling((1, 2, 3))), ["(1, 2, 3)", "8 pairs", "add up to 8"]),
        (lambda x: apply_rope(x, scaling=MRopeScaling((2, 3, 3), True)), ["(2, 3, 3)", "cannot take turns", "8 pairs"]),
        (lambda x: apply_rope(x, scaling=LongRopeScaling((1,), (1,), 8)), ["short_factor", "8 numbers"]),
        (lambda x: apply_rope(x, cache=RotaryCache(16, 4)), ["`cache` holds 4", "has 9", "cache.grow(9)"]),
        (lambda x: apply_rope(x, cache=RotaryCache(8, 9)), ["head_dim 8", "16 features"]),
        (lambda x: apply_rope(x, cache=RotaryCache(16, 9), theta=5e5), ["`theta`", "500000.0", "RotaryCache"]),
        (lambda x: RotaryCache(16, 0), ["`max_positions`", "0"]),
        (lambda x: RotaryCache(16, 4, dtype=jnp.int32), ["`dtype`", "int32"]),
    ],
)
def test_errors_name_the_argument_the_values_and_the_fix(call, words):
    with pytest.raises(ShapeError) as caught:
        call(normal((2, 3, 9, 16)))
    for word in words:
        assert word in str(caught.value)


def test_dictionaries_of_models():
    llama = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert parse_scaling(llama) == Llama3Scaling()
    assert parse_scaling({"type": "mrope", "mrope_section": [16, 24, 24]}) == MRopeScaling()


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_a_dictionary_brings_theta_and_the_rotated_share(kind):
    """The form that transformers 5 writes: `rope_parameters`."""
    x, factor = normal((2, 3, 9, 16)), {} if kind == "default" else {"factor": 4.0}
    given = {"rope_type": kind, "rope_theta": 5e5, "partial_rotary_factor": 0.5, **factor}
    plain = None if kind == "default" else LinearScaling(4.0)
    want = apply_rope(x, theta=5e5, rotary_dim=8, scaling=plain)
    np.testing.assert_array_equal(apply_rope(x, scaling=given), want)
    np.testing.assert_array_equal(apply_rope(x, scaling=given, theta=5e5, rotary_dim=8), want)
    cache = RotaryCache(16, 9, scaling=given)
    assert (cache.theta, cache.rotary_dim) == (5e5, 8)
    np.testing.assert_array_equal(apply_rope(x, cache=cache), want)
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    from vishwamai.torch import apply_rope as of_torch

    np.testing.assert_allclose(of_torch(torch.tensor(np.asarray(x)), scaling=given), want, rtol=1e-5, atol=1e-6)
    for options, words in (
        ({"theta": 1e6}, ["`theta`", "1000000.0", "rope_theta = 500000.0"]),
        ({"rotary_dim": 16}, ["`rotary_dim`", "16", "partial_rotary_factor = 0.5", "8 of 16"]),
        ({"scaling": {**given, "partial_rotary_factor": 1.5}}, ["partial_rotary_factor = 1.5", "up to 1"]),
    ):
        with pytest.raises(ShapeError) as caught:
            apply_rope(x, **{"scaling": given, **options})
        assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("chip", TPUS.values(), ids=TPUS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "heads, length, head_dim",
    [
        (32, 4096, 128),
        (128, 4096, 192),
        (8, 1, 128),
        (1, 100, 64),
        (9, 1, 64),
        (32, 1, 128),
        (40, 3, 128),
        (64, 6, 128),
    ],
)
def test_blocks_fit_the_chip(heads, length, head_dim, layout, chip):
    shape = (2, heads, length, head_dim) if layout == "bhsd" else (2, length, heads, head_dim)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with vishwamai.kernel_config(target=chip.name):
        (plan,) = record_plans(lambda q, k: apply_rope((q, k), layout=layout), x, x)
    assert tpu.why_not(plan.spec, Target("tpu", chip)) is None
    config = tpu.heuristic(plan.spec, Target("tpu", chip))
    assert config.block_positions % config.chunk_positions == 0 and config.block_positions % 8 == 0
    assert config.vmem_bytes <= chip.vmem_bytes * 3 // 4
    for block_size in (1, 7, 100):  # whole tiles of the tables' rows
        assert config.with_block_size(block_size).block_positions % 8 == 0


@pytest.mark.turns(5)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_several_steps_and_a_ragged_one(layout):
    from jax.experimental.pallas import tpu as pltpu

    query, key = (normal((2, 40, 37, 128) if layout == "bhsd" else (2, 37, h, 128), h) for h in (40, 3))
    key = key if layout == "bshd" else key[:, :3]
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        got = apply_rope((query, key), implementation="pallas_tpu", layout=layout, config=tpu.RopeConfig(16, 8))
    for ours, theirs in zip(got, apply_rope((query, key), implementation="xla", layout=layout), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.turns(5)
def test_second_order_and_the_tables_gradient():
    """Reverse over reverse goes through the reference; cos and sin have gradients, for what is learned in front of
    them.
    """
    query = normal((1, 2, 5, 8))

    def energy(cache, x):
        return jnp.sum(jnp.sin(apply_rope(x, cache=cache)))

    cache = RotaryCache(8, 5)
    gradient = jax.grad(energy)(cache, query)

    def bumped(by):
        other = jax.tree.map(lambda x: x, cache)
        other.cos = cache.cos.at[2, 1].add(by)
        return energy(other, query)

    np.testing.assert_allclose(gradient.cos[2, 1], (bumped(1e-2) - bumped(-1e-2)) / 2e-2, rtol=0.01)
    curvature = jax.grad(lambda x: jnp.sum(jax.grad(energy, 1)(cache, x) ** 2))(query)
    direct = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(x)))(x) ** 2))
    # The rotation keeps the length of the gradient, so both energies agree in the rotated frame.
    np.testing.assert_allclose(apply_rope(curvature, cache=cache), direct(apply_rope(query, cache=cache)), atol=1e-5)


def test_explain_says_what_runs():
    x = jax.ShapeDtypeStruct((1, 8, 64, 128), jnp.bfloat16)
    assert explain(apply_rope, x, target="v5e").calls[0].runs == "pallas_tpu"
    assert explain(apply_rope, x).calls[0].runs == ("xla" if ffi.why_not() else "native_cpu")


@pytest.mark.turns(5)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_one_kv_head_beside_query_heads_on_several_devices(kind, layout):
    """Every device has the key whole: its rotation is not a sum over them."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    heads = 1 if layout == "bhsd" else 2
    draw = np.random.default_rng(0)
    query, key = (np.moveaxis(draw.normal(size=(2, h, 3, 8)).astype(np.float32), 1, heads) for h in (4, 1))

    def run(query, key):
        out, pull = jax.vjp(lambda *pair: apply_rope(pair, layout=layout), query, key)
        return out, pull(jax.tree.map(jnp.cos, out))

    spec: list[str | None] = [None] * 4
    spec[heads] = "x"
    with jax.set_mesh(mesh):
        split = jax.device_put(query, jax.NamedSharding(mesh, jax.P(*spec)))
        got = jax.jit(run)(split, jax.device_put(key, jax.NamedSharding(mesh, jax.P())))
    for ours, expected in zip(jax.tree.leaves(got), jax.tree.leaves(run(query, key)), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
