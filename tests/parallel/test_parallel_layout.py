"""Layouts for a TPU: batches over devices, weights over the sides of a slice, and whole tiles."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vishwamai
from vishwamai import aot
from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.parallel import configure_data_parallel, optimize_kernel_layout, optimize_memory_layout

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")


@pytest.mark.parametrize(
    ("batch", "devices", "most", "held", "parts"),
    [(32, 8, None, 4, 1), (96, 4, 10, 8, 3), (7, 1, 3, 1, 7), (8, 8, 100, 1, 1), (24, 2, 12, 12, 1)],
)
def test_a_batch_over_devices(batch, devices, most, held, parts):
    config = configure_data_parallel(batch, devices, max_per_device=most)
    assert (config.per_device_batch, config.accumulation, config.batch_size) == (held, parts, batch)
    assert dict(config.mesh.shape) == {"data": devices}
    rows = jax.device_put(np.ones((held * devices, 3)), config.input_sharding)
    assert rows.addressable_shards[0].data.shape == (held, 3)


@needs_libtpu
def test_a_batch_over_devices_that_are_not_here():
    config = configure_data_parallel(64, 16)
    assert (config.per_device_batch, config.mesh.size) == (4, 16) and "TPU" in config.mesh.devices.flat[0].device_kind


def test_the_parts_of_a_batch_are_the_batch():
    """Gradients added up over the parts, on four devices, are those of the whole batch on one."""
    config = configure_data_parallel(24, 4, max_per_device=2)
    x = np.random.default_rng(0).standard_normal((24, 5), np.float32)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2) / 24

    w = jax.device_put(jnp.arange(5.0) / 5, jax.NamedSharding(config.mesh, jax.P()))
    total = jnp.zeros(5)
    for part in x.reshape(config.accumulation, -1, 5):
        total += jax.device_get(jax.jit(jax.grad(loss))(w, jax.device_put(part, config.input_sharding)))
    np.testing.assert_allclose(total, jax.grad(loss)(jax.device_get(w), x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((30, 8), "`batch_size` is 30, which 8 devices do not divide; pass 24 or 32"),
        ((3, 8), "which 8 devices do not divide; pass 8"),
        ((9, 9), "`num_devices` is 9, but JAX has 8, and no slice of v5e has as many; pass at most 8, or"),
        ((8, 0), "`num_devices` is 0"),
        ((0, 2), "`batch_size` is 0"),
    ],
)
def test_batches_that_do_not_fit_are_named(arguments, text):
    with pytest.raises(ShapeError, match=text):
        configure_data_parallel(*arguments)
    with pytest.raises(ShapeError, match="`max_per_device` is 0"):
        configure_data_parallel(8, 8, max_per_device=0)


@pytest.mark.parametrize("shape", [(100, 300), (3, 128, 129), (7,), (0, 5)])
def test_a_kernel_in_whole_blocks_and_back(shape):
    kernel = np.random.default_rng(0).standard_normal(shape, np.float32)
    layout = optimize_kernel_layout(kernel)
    assert all(size % 128 == 0 for size in layout.padded.shape[-2:])
    assert layout.padded.shape[:-2] == shape[:-2]
    np.testing.assert_array_equal(layout.restore(), kernel)
    assert np.count_nonzero(np.asarray(layout.padded)) == kernel.size
    assert layout.padded.size * (1 - layout.padding) == pytest.approx(kernel.size if layout.padded.size else 0)


def test_products_and_gradients_of_a_padded_kernel():
    x, kernel = jax.random.normal(jax.random.key(0), (5, 100)), jax.random.normal(jax.random.key(1), (100, 30))
    layout = optimize_kernel_layout(kernel, 32)
    assert layout.padded.shape == (128, 32)

    def product(padded):
        return (jnp.pad(x, ((0, 0), (0, 28))) @ padded)[:, :30]

    np.testing.assert_allclose(product(layout.padded), x @ kernel, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda w: (product(w) ** 2).sum())(layout.padded)
    expected = jax.grad(lambda w: ((x @ w) ** 2).sum())(kernel)
    np.testing.assert_allclose(layout.restore(gradient), expected, rtol=1e-4, atol=1e-4)


def test_a_padded_kernel_is_taken_as_the_weight():
    x, kernel = jax.random.normal(jax.random.key(0), (5, 100)), jax.random.normal(jax.random.key(1), (100, 30))
    layout: Any = optimize_kernel_layout(kernel)
    close: Any = dict(rtol=1e-5, atol=1e-5)
    for product in (vishwamai.gemm(x, layout), x @ layout, jax.jit(vishwamai.gemm)(x, layout)):
        np.testing.assert_allclose(product, x @ kernel, **close)
    gradient = jax.grad(lambda w: vishwamai.gemm(x, w).sum())(layout)
    expected = jax.grad(lambda w: vishwamai.gemm(x, w).sum())(kernel)
    np.testing.assert_allclose(gradient.restore(), expected, **close)


def test_kernels_that_do_not_fit_are_named():
    with pytest.raises(ShapeError, match="`kernel` is a scalar"):
        optimize_kernel_layout(jnp.ones(()))
    with pytest.raises(ShapeError, match="`block_size` is 0"):
        optimize_kernel_layout(jnp.ones((2, 2)), 0)
    with pytest.raises(ShapeError, match=r"has shape \(2, 2\); pass one of shape \(128, 128\)"):
        optimize_kernel_layout(jnp.ones((2, 2))).restore(jnp.ones((2, 2)))


def test_weights_are_laid_over_the_devices_of_this_machine():
    weights = {"w": jnp.arange(512.0 * 64).reshape(512, 64), "layers": [jnp.ones((3, 5))]}
    layout = optimize_memory_layout(weights, "2x2x2")
    assert dict(layout.mesh.shape) == {"x": 2, "y": 2, "z": 2} and layout["w"].sharding == layout.shardings["w"]
    assert len({str(shard.index) for shard in layout["w"].addressable_shards}) == 8
    jax.tree.map(np.testing.assert_array_equal, dict(layout), weights)
    assert isinstance(optimize_memory_layout(layout.shapes, "2x2x2")["w"], jax.ShapeDtypeStruct)


WEIGHTS = {
    "up": jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16),
    "narrow": jax.ShapeDtypeStruct((4096, 32), jnp.bfloat16),
    "odd": jax.ShapeDtypeStruct((6, 100, 50), jnp.float32),
    "scale": jax.ShapeDtypeStruct((1024,), jnp.float32),
}


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1"])
def test_weights_over_a_slice_take_what_the_compiler_says(topology):
    layout = optimize_memory_layout(WEIGHTS, topology)
    before, after = layout.compiled_bytes()
    assert before == pytest.approx(layout.nbytes, rel=0.01)
    assert after == pytest.approx(layout.table.bytes_per_device, rel=0.01)
    assert before > 0.9 * layout.mesh.size * after  # nearly everything is split, and tiles are full
    assert layout.saved == layout.nbytes - layout.table.bytes_per_device
    for name, sharding in layout.shardings.items():
        assert sharding.shard_shape(WEIGHTS[name].shape)


@needs_libtpu
def test_no_split_of_a_weight_holds_less():
    """On two sides of 2 and 4, counted by hand: 30 rows divide by 2 alone, 8 lanes by 4 fill no tile."""
    weights = {"w": jax.ShapeDtypeStruct((30, 512), jnp.float32), "v": jax.ShapeDtypeStruct((5, 7), jnp.float32)}
    layout = optimize_memory_layout(weights, "v5e:2x4")
    assert dict(layout.mesh.shape) == {"x": 2, "y": 4}
    assert layout.shardings["w"].shard_shape((30, 512)) in ((15, 128), (30, 64))
    assert layout.shardings["v"].shard_shape((5, 7)) == (5, 7)
    with pytest.raises(ShapeError, match=r"weights\['w'\] is 3, of type int; pass arrays"):
        optimize_memory_layout({"w": 3}, "v5e:2x4")
    with pytest.raises(ShapeError, match="pass the sides of a slice"):
        optimize_memory_layout(weights, "v5e")
    with pytest.raises(DeviceError, match="3x5"):
        optimize_memory_layout(weights, "v5e:3x5")
