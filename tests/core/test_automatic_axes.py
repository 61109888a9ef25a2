"""Kernels for TPUs under automatic mesh axes: `Mesh(devices, ["data", "model"])` and nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import vishwamai
from vishwamai import aot
from vishwamai.core.automatic_axes import automatic_assignment
from vishwamai.core.config import kernel_config

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")


def _block(x, scale, w_qkv, w_out=None, gate=None, up=None):
    """One layer of a decoder, `[batch, seq, features]`, of four heads; or its first product alone."""
    batch, seq, features = x.shape
    h = vishwamai.rms_norm(x, scale)
    if w_out is None:
        return vishwamai.gemm(h, w_qkv)
    heads = vishwamai.gemm(h, w_qkv).reshape(batch, seq, 3, 4, -1).transpose(2, 0, 3, 1, 4)
    mixed = vishwamai.flash_attention(*heads, causal=True)
    x = x + vishwamai.gemm(mixed.transpose(0, 2, 1, 3).reshape(batch, seq, features), w_out)
    return x + vishwamai.gated_linear_unit(x, (gate, up))


def _loss(*arrays):
    return jnp.sum(_block(*arrays).astype(jnp.float32) ** 2)


def _arrays(batch, seq, features, dtype):
    shapes = [(batch, seq, features), (features,), (features, 3 * features), *[(features, features)] * 3]
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s) / (1 if s == shapes[0] else 8), dtype) for s in shapes]


SPECS = (P("data"), P(), P(None, "model"), P("model", None), P(None, "model"), P(None, "model"))


def _gradients(*arrays):
    return jax.value_and_grad(_loss, argnums=tuple(range(len(arrays))))(*arrays)


def test_the_names_of_axes_say_what_they_split():
    attention = [("batch", "heads", "q_len", "d"), ("batch", "heads", "kv_len", "d")]
    both, sizes = frozenset(("batch", "heads")), {"replica": 2, "data": 2, "model": 2}
    shapes = [(4, 8, 16, 4), (4, 2, 16, 4)]
    assert automatic_assignment(attention, shapes, both, sizes) == {"batch": ("replica", "data"), "heads": ("model",)}
    one_kv_head = [shapes[0], (4, 1, 16, 4)]
    assert automatic_assignment(attention, one_kv_head, both, {"model": 8}) == {"heads": ("model",)}
    assert automatic_assignment(attention, shapes, both, {"model": 4, "data": 3}) == {}


ELSEWHERE = (P("model"), P("data"), P("data"), P(), P("data", "model"), P())


@pytest.mark.parametrize("specs", [SPECS[:3], pytest.param(ELSEWHERE, marks=pytest.mark.long)])
def test_numbers_are_those_of_one_device(specs):
    """The kernels in the interpreter, whether the arrays lie as the names say or not."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ["data", "model"])
    arrays = _arrays(2, 16, 32, jnp.float32)[: len(specs)]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    run = _gradients if len(specs) == 6 else _block
    want = jax.jit(run)(*arrays)
    with pltpu.force_tpu_interpret_mode(), kernel_config(implementation="pallas_tpu"):
        lowered = jax.jit(run).lower(*placed)
        outputs = lowered.compile()(*placed)
    assert lowered.as_text().count("manual_computation") >= (6 if run is _gradients else 2)
    for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


def test_explain_says_how_a_kernel_is_split():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ["data", "model"])
    x = jax.device_put(jnp.ones((8, 128)), NamedSharding(mesh, P("data")))
    said = str(vishwamai.explain(vishwamai.gemm, x, jnp.ones((128, 256)), target="v5e"))
    assert "gemm over automatic mesh axes data, model, on TPU: m over data, n over model" in said


@pytest.mark.turns(4)
@needs_libtpu
@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.long)])
def test_libtpu_compiles_a_layer(gradients):
    devices = aot.mesh_for("v5e:2x2", {"data": 2, "model": 2}).devices
    mesh = Mesh(devices, ["data", "model"])
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(jax.eval_shape(lambda: _arrays(4, 256, 512, jnp.bfloat16)), SPECS, strict=True)
    ]
    program = aot.compile_for(_gradients if gradients else _block, *arrays, target="v5e:2x2")
    text = program.compiled.as_text() or ""
    kernels = re.findall(r"= (.*) custom-call.*tpu_custom_call", text)
    assert len(kernels) >= (10 if gradients else 5)
    assert any("bf16[2,2,256,128]" in kernel for kernel in kernels)  # two of four entries, two of four heads
