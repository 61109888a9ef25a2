"""The layers of `vishwamai.nnx` give what Flax's own give, and so do their gradients; what they leave out says so."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vishwamai
from vishwamai import nnx as ours
from vishwamai.core.errors import KernelError, ShapeError, UnsupportedError
from vishwamai.core.precision import precision_of

RNG = np.random.default_rng(0)


def arrays(*shapes, dtype=np.float32):
    return [jnp.asarray(RNG.standard_normal(shape), dtype) for shape in shapes]


def close(found, expected, tolerance=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)


Q, K, V = (2, 37, 8, 16), (2, 53, 2, 16), (2, 53, 2, 16)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.3},
        {"bias": (1, 8, 37, 53)},
        {"mask": (2, 1, 37, 53)},
        {"mask": (2, 1, 37, 53), "bias": (1, 1, 1, 53)},
        {"local_window_size": 7},
        {"local_window_size": (30, 2)},
        {"key_value_seq_lengths": (53, 20)},
    ],
    ids=str,
)
def test_attention_is_that_of_jax(options: dict[str, Any]):
    q, k, v = arrays(Q, K, V)
    options = dict(options)
    if "bias" in options:
        (options["bias"],) = arrays(options["bias"])
    if "mask" in options:
        options["mask"] = jnp.asarray(RNG.random(options["mask"]) < 0.7).at[..., 0].set(True)
    if "key_value_seq_lengths" in options:
        options["key_value_seq_lengths"] = jnp.asarray(options["key_value_seq_lengths"])

    def loss(attend):
        return lambda *qkv: attend(*qkv, **options).astype(jnp.float32).var()

    close(ours.dot_product_attention(q, k, v, **options), jax.nn.dot_product_attention(q, k, v, **options))
    grads = [jax.grad(loss(f), (0, 1, 2))(q, k, v) for f in (ours.dot_product_attention, jax.nn.dot_product_attention)]
    close(*grads)


@pytest.mark.turns(3)
def test_rows_past_the_query_lengths_give_zero():
    q, k, v = arrays(Q, K, V)
    lens = jnp.array([10, 37])
    options: dict[str, Any] = {"query_seq_lengths": lens, "key_value_seq_lengths": jnp.array([53, 11])}
    out, lse = ours.dot_product_attention(q, k, v, return_residual=True, **options)
    expected, residual = jax.nn.dot_product_attention(q, k, v, return_residual=True, **options)
    assert not np.any(out[0, 10:]) and np.all(np.isneginf(lse[0, 10:]))
    close((out[0, :10], lse[0, :10], out[1], lse[1]), (expected[0, :10], residual[0, :10], expected[1], residual[1]))


@pytest.mark.turns(3)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_any_number_of_batch_axes(batch):
    q, k, v = (x[0] if not batch else jnp.broadcast_to(x, (2, 3, *x.shape[1:])) for x in arrays(*[(3, 20, 4, 8)] * 3))
    mask = jnp.asarray(RNG.random((*batch, 1, 20, 20)) < 0.7).at[..., 0].set(True)
    close(ours.dot_product_attention(q, k, v, mask=mask), nnx.dot_product_attention(q, k, v, mask=mask))
    close(
        ours.dot_product_attention(q, k, v, mask=mask[..., :1, :]),
        nnx.dot_product_attention(q, k, v, mask=mask[..., :1, :]),
    )


def test_dropout_needs_its_key_and_can_be_turned_off():
    q, k, v = arrays(Q, K, V)
    options: dict[str, Any] = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5}
    whole = ours.dot_product_attention(q, k, v)
    close(ours.dot_product_attention(q, k, v, deterministic=True, **options), whole, 0)
    assert not np.allclose(ours.dot_product_attention(q, k, v, **options), whole)
    with pytest.raises(ShapeError, match="dropout_key"):
        ours.dot_product_attention(q, k, v, dropout_rate=0.5)


def pair(name, *args, **options):
    """Our layer and Flax's, with the same parameters, which are not those of the start."""
    theirs = "MultiHeadAttention" if name == "Attention" else name
    made = [getattr(m, n)(*args, rngs=nnx.Rngs(0), **options) for m, n in ((ours, name), (nnx, theirs))]
    state = jax.tree.map(
        lambda x: x + 0.1 * RNG.standard_normal(x.shape).astype(x.dtype), nnx.state(made[1], nnx.Param)
    )
    for module in made:
        nnx.update(module, state)
    return made


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "name, args, options",
    [
        ("RMSNorm", (48,), {}),
        ("RMSNorm", (48,), {"use_scale": False, "epsilon": 0.1}),
        ("LayerNorm", (48,), {}),
        ("LayerNorm", (48,), {"use_bias": False}),
        ("LayerNorm", (48,), {"use_bias": False, "use_scale": False}),
        ("Linear", (48, 33), {}),
        ("Linear", (48, 33), {"use_bias": False}),
        ("Attention", (8, 48), {"decode": False}),
        ("Attention", (8, 48), {"decode": False, "num_kv_heads": 2, "normalize_qk": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [None, pytest.param(jnp.bfloat16, marks=pytest.mark.long)], ids=str)
def test_a_layer_is_that_of_flax(name, args, options, dtype):
    mine, theirs = pair(name, *args, dtype=dtype, **options)
    (x,) = arrays((2, 20, 48))

    def loss(module, x):
        y = module(x).astype(jnp.float32)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    assert mine(x).dtype == theirs(x).dtype
    tolerance = 1e-4 if dtype is None else 5e-2
    close(mine(x).astype(jnp.float32), theirs(x).astype(jnp.float32), tolerance)
    graphs = [nnx.split(module) for module in (mine, theirs)]
    found, expected = (
        jax.jit(jax.grad(lambda state, x, graph=graph: loss(nnx.merge(graph, state), x), (0, 1), allow_int=True))(
            state, x
        )
        for graph, state in graphs
    )
    assert jax.tree.structure(nnx.to_pure_dict(found[0])) == jax.tree.structure(nnx.to_pure_dict(expected[0]))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        if jnp.issubdtype(b.dtype, jnp.floating):
            a, b = (np.asarray(leaf, np.float32) for leaf in (a, b))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.turns(4)
def test_decoding_with_a_cache_is_that_of_flax():
    mine, theirs = pair("Attention", 4, 32, decode=True)
    (x,) = arrays((2, 5, 32))
    for module in (mine, theirs):
        module.init_cache((2, 5, 32))
    for i in range(5):
        close(mine(x[:, i : i + 1]), theirs(x[:, i : i + 1]), 1e-4)


def test_a_linear_layer_of_a_vector():
    mine, theirs = pair("Linear", 48, 33)
    (x,) = arrays((48,))
    close(mine(x), theirs(x), 1e-4)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ours.RMSNorm(4, reduction_axes=(0, 1), rngs=nnx.Rngs(0)), "RMSNorm: `reduction_axes`"),
        (lambda: ours.LayerNorm(4, axis_name="i", rngs=nnx.Rngs(0)), "LayerNorm: `axis_name`"),
        (lambda: ours.RMSNorm(4, rngs=nnx.Rngs(0))(jnp.ones((2, 4)), mask=jnp.ones((2, 4), bool)), "RMSNorm: `mask`"),
        (lambda: ours.Linear(4, 4, dot_general=jax.lax.dot, rngs=nnx.Rngs(0)), "Linear: `dot_general`"),
        (lambda: ours.Linear(4, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 4)), out_sharding="x"), "Linear: `out_sharding`"),
        (lambda: ours.Attention(2, 4, decode=False, rngs=nnx.Rngs(0))(jnp.ones((2, 4)), sow_weights=True), "`module`"),
    ],
)
def test_what_is_left_out_says_so(make, words):
    with pytest.raises(UnsupportedError, match=words):
        make()


def test_a_wrong_shape_is_named():
    q, k, v = arrays(Q, K, V)
    for arguments, words in [
        ((q, k[0], v), "`key` has shape"),
        ((q[0, 0], k, v), "`query` has shape"),
        ((q, k, v, jnp.ones((3, 1, 1, 1))), "`bias` has shape"),
        ((q, k, v, None, jnp.ones((1, 1, 1, 1, 1), bool)), "`mask` has shape"),
    ]:
        with pytest.raises(ShapeError, match=words):
            ours.dot_product_attention(*arguments)
    with pytest.raises(ShapeError, match="`query_seq_lengths` is"):
        ours.dot_product_attention(q, k, v, query_seq_lengths=jnp.ones(3, jnp.int32))


def test_memory_does_not_grow_with_the_scores():
    """What the page says of it: the program's temporaries, by the compiler."""
    q = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.float32)

    def temporaries(attend):
        lowered = jax.jit(lambda q: attend(q, q, q, is_causal=True)).lower(q)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    scores = 4 * 2048 * 2048 * 4
    assert temporaries(jax.nn.dot_product_attention) >= scores
    with vishwamai.kernel_config(implementation="xla_chunked"):
        assert temporaries(ours.dot_product_attention) < scores / 4


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("precision", "products"),
    [
        ("float32", "highest"),
        ("tensorfloat32", "high"),
        ("fastest", "default"),
        (jax.lax.Precision.HIGH, "high"),
        (("bfloat16", "float32"), "highest"),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3, "high"),
        ("F32_F32_F32", "highest"),
    ],
)
def test_precisions_are_those_of_flax(precision, products):
    read = precision_of("Linear", precision)
    assert read is not None and read.products == products
    (x,) = arrays((2, 7, 16))
    layers: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
        (nnx.Linear, ours.Linear, {"in_features": 16, "out_features": 8}),
        (nnx.MultiHeadAttention, ours.Attention, {"num_heads": 2, "in_features": 16, "decode": False}),
    )
    for theirs, layer, options in layers:
        result, expected = (kind(**options, precision=precision, rngs=nnx.Rngs(0))(x) for kind in (layer, theirs))
        close(result, expected, 2e-5 if products == "highest" else 2e-3)


def test_a_precision_that_flax_does_not_take_is_named():
    layer = ours.Linear(16, 8, precision="exact", rngs=nnx.Rngs(0))
    with pytest.raises(KernelError, match="Linear: `precision` is 'exact'; pass None, a jax.lax.Precision"):
        layer(jnp.ones((2, 16)))
