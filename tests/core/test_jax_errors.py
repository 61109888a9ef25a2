"""Each text of JAX that `core.jax_errors` matches, provoked: a version of JAX that words one in another way fails here,
and nowhere in silence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.core import jax_errors


@jax.custom_vjp
def gradient_only(x):
    return x


gradient_only.defvjp(lambda x: (x, None), lambda _, g: (g,))

no_rule = Primitive("no_rule")
no_rule.def_abstract_eval(lambda x: x)


def copy(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def sort(x_ref, out_ref):
    out_ref[...] = jax.lax.sort(x_ref[...])


def call(kernel, x, **how):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), name="probe", **how)(x)


def lower_for_tpu(kernel, x, **how):
    jax.jit(lambda x: call(kernel, x, **how)).trace(x).lower(lowering_platforms=("tpu",))


def test_forward_mode():
    with pytest.raises(TypeError) as caught:
        jax.jvp(gradient_only, (1.0,), (1.0,))
    assert jax_errors.lacks_forward_mode(caught.value)
    with pytest.raises(TypeError) as other:
        jax.jvp(gradient_only, (1.0,), (1,))
    assert not jax_errors.lacks_forward_mode(other.value)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="these programs are illegal on the CPU")
@pytest.mark.parametrize("function", [lambda x: call(copy, x), no_rule.bind], ids=["pallas", "primitive"])
def test_another_platform(function):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        jax.jit(function)(jnp.ones((8, 128)))
    assert jax_errors.lacks_platform(caught.value)
    assert not jax_errors.from_pallas_lowering(caught.value)


def test_out_of_memory():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jnp.zeros((1 << 50,), jnp.int8).block_until_ready()
    assert jax_errors.out_of_memory(caught.value)


def test_missing_primitive():
    with pytest.raises(NotImplementedError) as caught:
        lower_for_tpu(sort, jnp.ones((8, 128)))
    assert jax_errors.from_pallas_lowering(caught.value)
    assert jax_errors.missing_primitive(str(caught.value)) == "sort"


def test_block_shape():
    spec = pl.BlockSpec((7, 100), lambda i, j: (i, j))
    with pytest.raises(ValueError) as caught:
        lower_for_tpu(copy, jnp.ones((70, 300)), grid=(10, 3), in_specs=[spec], out_specs=spec)
    text = str(caught.value)
    assert jax_errors.from_pallas_lowering(caught.value) and jax_errors.illegal_block_shape(text)
    found = jax_errors.block_shape(text)
    assert found is not None and __file__ in found.where
    assert found[0] == "probe" and found[2:] == ("(7, 100)", "(70, 300)")


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_partitioned_kernel():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    with pytest.raises(NotImplementedError) as caught:
        lower_for_tpu(copy, x)
    assert jax_errors.from_pallas_lowering(caught.value)
    assert jax_errors.cannot_partition_kernel(str(caught.value))


def test_other_errors():
    error = ValueError("operands could not be broadcast together")
    assert not any(
        test(error)
        for test in (
            jax_errors.lacks_forward_mode,
            jax_errors.lacks_platform,
            jax_errors.out_of_memory,
            jax_errors.from_pallas_lowering,
        )
    )
    text = str(error)
    assert jax_errors.missing_primitive(text) is None and jax_errors.block_shape(text) is None
    assert not jax_errors.cannot_partition_kernel(text) and not jax_errors.unreadable_program(text)
