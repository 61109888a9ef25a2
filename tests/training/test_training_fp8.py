"""Training with 8-bit products: what is rounded, how scales follow, and that a run learns as in bfloat16."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vishwamai
from test_training import LLAMA, small
from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.training.config import MeshSection
from vishwamai.training.fp8 import SCALES, FP8Optimizer
from vishwamai.training.fp8_products import TENSORS, FP8Weight, Recipe
from vishwamai.training.gather import over_devices
from vishwamai.training.run import train
from vishwamai.training.sharding import make_layout
from vishwamai.training.step import accumulated

MOE = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def zeros(scaling):
    return {t: jnp.float32(0) for t in TENSORS} if scaling == "delayed" else {}


def rounded(x, dtype, axis=None):
    """What 8 bits hold of an array, by numpy in float64: with one scale, or one for 128 numbers along an axis."""
    x = np.asarray(x, np.float64)
    largest = float(jnp.finfo(dtype).max)
    if axis is None:
        scale = np.abs(x).max() * 1.01 / largest
    else:
        moved = np.moveaxis(x, axis, -1)
        padded = np.pad(moved, [(0, 0)] * (x.ndim - 1) + [(0, -moved.shape[-1] % 128)])
        most = np.abs(padded.reshape(*padded.shape[:-1], -1, 128)).max(-1)
        scale = np.moveaxis(np.repeat(most / largest, 128, -1)[..., : moved.shape[-1]], -1, axis)
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


SCALINGS = ["delayed", pytest.param("current", marks=pytest.mark.long), pytest.param("block", marks=pytest.mark.long)]


@pytest.mark.turns(3)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")
def test_products_are_those_of_rounded_operands(scaling):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (2, 24, 160)), jax.random.normal(keys[1], (160, 96)) * 0.02
    g = jax.random.normal(keys[2], (2, 24, 96)) * 1e-5

    def run(x, w, scales):
        return FP8Weight(w, scales, Recipe(scaling)).product(x, jnp.float32)

    out, pull = jax.vjp(run, x, w, zeros(scaling))
    dx, dw, largest = pull(g)
    blocks = scaling == "block"
    e4m3, low = jnp.float8_e4m3fn, jnp.float8_e4m3fn if blocks else jnp.float8_e5m2
    at = (lambda axis: axis) if blocks else (lambda axis: None)
    rows, given = np.asarray(x).reshape(-1, 160), np.asarray(g).reshape(-1, 96)
    expected = rounded(rows, e4m3, at(-1)) @ rounded(w, e4m3, at(-2))
    # Blocks dequantize to bfloat16 tile by tile.
    near = functools.partial(np.testing.assert_allclose, rtol=2e-2 if blocks else 1e-4)
    near(out.reshape(-1, 96), expected, atol=np.abs(expected).max() * (5e-3 if blocks else 1e-5))
    expected = rounded(given, low, at(-1)) @ rounded(w, e4m3, at(-1)).T
    near(dx.reshape(-1, 160), expected, atol=np.abs(expected).max() * (5e-3 if blocks else 1e-5))
    expected = rounded(rows, e4m3, at(-2)).T @ rounded(given, low, at(-2))
    near(dw, expected, atol=np.abs(expected).max() * (5e-3 if blocks else 1e-5))
    if scaling == "delayed":
        for name, array in zip(TENSORS, (x, w, g)):
            assert float(largest[name]) == float(jnp.abs(array).max())


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["delayed", "block"])
def test_grouped_products_are_near_those_of_wide_operands(scaling):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (30, 160)), jax.random.normal(keys[1], (3, 160, 96)) * 0.02
    sizes, g = jnp.array([10, 0, 20]), jax.random.normal(keys[2], (30, 96)) * 1e-5

    def run(x, w):
        return FP8Weight(w, zeros(scaling), Recipe(scaling)).grouped(x, sizes)

    found, wide = (jax.vjp(f, x, w) for f in (run, lambda x, w: vishwamai.grouped_gemm(x, w, sizes)))
    for ours, plain in zip((found[0], *found[1](g)), (wide[0], *wide[1](g))):
        assert jnp.linalg.norm(ours - plain) < 0.08 * jnp.linalg.norm(plain)
    assert (found[1](g)[1][1] == 0).all()  # a group without rows


def step(optimizer, params, state, x):
    def loss(trained):
        return jnp.sum(optimizer.attach(trained)["layers"][0]["up"].product(x, jnp.float32))

    gradients = jax.grad(loss)(optimizer.with_scales(params, state))
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.turns(3)
def test_scales_follow_the_history_and_a_bad_step_changes_nothing():
    params = {"layers": {0: {"up": jnp.full((4, 2), 0.5)}}}
    optimizer = FP8Optimizer(inner=optax.sgd(0.1), margin=0.0, history=2)
    still = dataclasses.replace(optimizer, dynamic_scale=False)
    state = fixed = optimizer.init(params)
    seen = []
    for size in (448.0, 4480.0, 448.0, 448.0):
        state = step(optimizer, params, state, jnp.full((3, 4), size))[1]
        fixed = step(still, params, fixed, jnp.full((3, 4), size))[1]
        seen.append(float(state.scales["layers/0/up"]["input"]))
        assert float(fixed.scales["layers/0/up"]["input"]) == 1.0
    assert seen == pytest.approx([1, 10, 10, 1])
    after, same = step(optimizer, params, state, jnp.full((3, 4), jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, (after, same), (params, state))


@pytest.mark.turns(2)
def test_magnitudes_are_those_of_all_microbatches_and_devices():
    params = {"layers": {0: {"up": jnp.full((4, 2), 0.5)}}}
    optimizer = FP8Optimizer(inner=optax.sgd(0.1))
    trained = optimizer.with_scales(params, optimizer.init(params))
    batch = {"tokens": jnp.array([[1.0] * 4, [2.0] * 4, [7.0] * 4, [3.0] * 4])}

    def loss(trained, batch):
        total = jnp.sum(optimizer.attach(trained)["layers"][0]["up"].product(batch["tokens"], jnp.float32))
        return total, {"loss": total}

    layout = make_layout(MeshSection(data=4), params, {"up": (None, None)}, 4, 1)
    spread = over_devices(layout, functools.partial(accumulated, loss, microbatches=1), trained)
    for gradients, sums in (accumulated(loss, trained, batch, 1.0, microbatches=4), spread(trained, batch, 1.0)):
        largest = gradients[SCALES]["layers/0/up"]
        assert (float(largest["input"]), float(largest["weight"]), float(largest["gradient"])) == (7.0, 0.5, 1.0)
        assert float(sums["loss"]) == pytest.approx(52, rel=0.05)
        np.testing.assert_allclose(gradients["layers"][0]["up"], 13.0, rtol=0.05)


@pytest.mark.turns(4)
def test_an_optax_loop_in_three_lines():
    """Parameters of any tree; `x @ w` multiplies in 8 bits, and the update is that of the optimizer inside."""
    params = {"dense": {"w": jax.random.normal(jax.random.key(0), (16, 8)), "b": jnp.zeros(8)}}
    x = jax.random.normal(jax.random.key(1), (32, 16))

    def loss(params, x):
        return jnp.mean((x @ params["dense"]["w"] + params["dense"]["b"] - 1) ** 2)

    optimizer = FP8Optimizer(0.01, True, inner=optax.sgd(0.1), targets="dense/w")
    state, losses = optimizer.init(params), []
    for _ in range(20):
        value, gradients = optimizer.value_and_grad(loss)(params, state, x)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    assert losses[0] != float(loss(params, x)) and losses[-1] < 0.5 * losses[0]
    assert float(state.scales["dense/w"]["input"]) == pytest.approx(float(jnp.abs(x).max()) * 1.01 / 448)
    update: Any = optimizer.update
    rule = optax.GradientTransformation(optimizer.init, update)
    chained = optax.chain(optax.clip_by_global_norm(1.0), rule)
    plain = jax.grad(loss)(params, x)
    updates, _ = chained.update(plain, chained.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_what_cannot_be_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match="`scaling` is 'never'; pass 'delayed', 'current' or 'block'"):
        FP8Optimizer(scaling="never")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="dynamic_scale=False keeps scales, but 'block' scaling has none"):
        FP8Optimizer(scaling="block", dynamic_scale=False)
    with pytest.raises(ConfigError, match="`targets` 'upp' matches no parameter"):
        FP8Optimizer(targets="upp").init({"layers": {0: {"up": jnp.ones((4, 2))}}})
    assert SCALES not in FP8Optimizer(scaling="current").with_scales(
        {}, FP8Optimizer(scaling="current").init({"layers": {0: {"up": jnp.ones((4, 2))}}})
    )


def test_a_chip_without_a_unit_is_named():
    a, b = jnp.ones((16, 128), jnp.float8_e4m3fn), jnp.ones((128, 128), jnp.float8_e4m3fn)
    for name in ("v5e", "cpu", "a100"):
        assert "cost time" in str(vishwamai.explain(vishwamai.gemm, a, b, target=name)), name
    for name in ("h100", "tpu7x"):
        assert "cost time" not in str(vishwamai.explain(vishwamai.gemm, a, b, target=name)), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (LLAMA, {}),
        (LLAMA, {"fp8": {"scaling": "current"}}),
        (LLAMA, {"fp8": {"scaling": "block"}}),
        (MOE, {"remat": "full", "microbatches": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")
def test_a_run_learns_as_in_bfloat16(tmp_path, model, changes):
    common = {"model": {"config": model, "compute_dtype": "bfloat16"}, "steps": 12}
    losses = {}
    for name, precision in (("wide", {}), ("narrow", {"precision": "fp8"} | changes)):
        extra = {k: v for k, v in changes.items() if k != "fp8"} | precision
        losses[name] = [r.loss for r in train(small(tmp_path, **common, **extra), tmp_path / name)]
    assert losses["narrow"] != losses["wide"]
    assert np.mean(losses["narrow"][-4:]) == pytest.approx(np.mean(losses["wide"][-4:]), rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_run_on_many_devices_is_that_on_one(tmp_path, scaling):
    common = {"steps": 4, "batch_size": 16, "optimizer": {"learning_rate": 0.01, "eps": 1e-4}, "precision": "fp8"}
    common |= {"fp8": {"scaling": scaling}, "remat": "full"}
    alone = [r.loss for r in train(small(tmp_path, **common), tmp_path / "one")]
    spread = {"mesh": {"data": 2, "fsdp": 4}}
    losses = [r.loss for r in train(small(tmp_path, **common, **spread), tmp_path / "all")]
    # Sums in another order round to another neighbour of 8 bits here and there; an update moves the more.
    assert losses[0] == pytest.approx(alone[0], abs=1e-3)
    assert losses == pytest.approx(alone, abs=2e-2)


GPT_OSS = MOE | {"model_type": "gpt_oss", "head_dim": 8, "sliding_window": 8}


@pytest.mark.turns(2)
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.long)])
def test_experts_with_biases_and_a_clamped_unit_are_those_of_one_device(overlap):
    """With the scales of earlier steps each row rounds alike wherever it is; wide experts are near."""
    keys = jax.random.split(jax.random.key(0), 8)
    tokens, g = (jax.random.normal(key, (32, 16)) for key in keys[:2])
    router = jax.random.normal(keys[2], (16, 4))
    shapes = {"gate": (4, 16, 24), "up": (4, 16, 24), "down": (4, 24, 16)}
    wide = [0.5 * jax.random.normal(key, shape) for key, shape in zip(keys[3:], shapes.values())]
    biases = [jax.random.normal(keys[6], (4, shape[2])) for shape in shapes.values()]
    scales = {"input": jnp.float32(0.05), "weight": jnp.float32(0.01), "gradient": jnp.float32(1e-3)}
    narrow = [FP8Weight(w, scales, Recipe()) for w in wide]

    def gradients(weights, biases, tokens, g, axis=None):
        def loss(weights, biases, tokens):
            own = {"top_k": 2, "activation": "swigluoai", "limit": 1.5, "biases": biases}
            own |= {} if axis is None else {"expert_axis": axis, "overlap": overlap}
            out = vishwamai.moe_layer(tokens, router, *weights, **own).out
            return jnp.sum(out * g), out

        found, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(weights, biases, tokens)
        if axis is not None:
            joined = lambda scale: jax.lax.pmax(scale, axis)  # noqa: E731
            found = [dataclasses.replace(w, scales=jax.tree.map(joined, w.scales)) for w in found[0]], *found[1:]
        return out, found

    split, whole = jax.P("expert"), jax.P()
    placed = [FP8Weight(split, dict.fromkeys(TENSORS, whole), Recipe())] * 3  # pyright: ignore[reportArgumentType]
    spread = jax.shard_map(
        functools.partial(gradients, axis="expert"),
        mesh=jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(placed, split, split, split),
        out_specs=(split, (placed, split, split)),
        check_vma=False,
    )
    alone = jax.jit(gradients)(narrow, biases, tokens, g)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    jax.tree.map(near, jax.jit(spread)(narrow, biases, tokens, g), alone)
    plain = jax.jit(gradients)(wide, biases, tokens, g)
    assert (alone[0] != plain[0]).any()
    unwrapped = alone[0], ([w.weight for w in alone[1][0]], *alone[1][1:])
    for ours, other in zip(jax.tree.leaves(unwrapped), jax.tree.leaves(plain), strict=True):
        assert jnp.linalg.norm(ours - other) < 0.2 * jnp.linalg.norm(other)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "mesh", "changes"),
    [
        (GPT_OSS, {"expert": 2, "fsdp": 2}, {}),
        (MOE | {"vocab_size": 300}, {"expert": 2, "tensor": 2}, {"fp8": {"scaling": "current"}, "remat": "full"}),
        (GPT_OSS | {"num_hidden_layers": 4}, {"pipeline": 2, "expert": 2}, {"microbatches": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")
def test_a_run_of_experts_is_that_on_one_device(tmp_path, model, mesh, changes):
    common = {"steps": 4, "batch_size": 8, "optimizer": {"learning_rate": 0.01, "eps": 1e-4}, "precision": "fp8"}
    common |= {"model": {"config": model}} | changes
    alone = [r.loss for r in train(small(tmp_path, **common), tmp_path / "one")]
    losses = [r.loss for r in train(small(tmp_path, **common, mesh=mesh), tmp_path / "all")]
    # A row that rounds otherwise may go to another expert.
    assert losses[0] == pytest.approx(alone[0], abs=2e-3)
    assert losses == pytest.approx(alone, abs=5e-2)


def test_adapters_and_8_bit_products_do_not_mix(tmp_path):
    lora = {"lora": {"rank": 4}, "model": {"start_from": "x"}}
    with pytest.raises(UnsupportedError, match=r"lora\.quantize=fp8"):
        next(train(small(tmp_path, precision="fp8", **lora), tmp_path / "run"))
