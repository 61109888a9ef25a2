"""Gradients through the layers of an op: what is kept for the backward pass, second order, forward mode, remat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy
from vishwamai import aot
from vishwamai.core.errors import UnsupportedError

LENGTH = 1024
MATRIX_BYTES = LENGTH * LENGTH * 4


def loss(q, k, weight, **how):
    return jnp.sum(jnp.sin(toy.toy(q, k, weight, **how)))


def gradient_in_two_programs(**how):
    """The forward pass as a program of its own, which hands its residuals over to the backward pass."""

    def forward(q, k, weight):
        y, pull = jax.vjp(lambda *args: toy.toy(*args, **how), q, k, weight)
        return y, pull

    return jax.jit(forward)


def structs(batch=1, heads=1, length=LENGTH):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in toy.inputs(batch, heads, length)]


def test_kernels_equal_reference():
    args = toy.inputs()
    gradients = [jax.grad(loss, (0, 1, 2))(*args, implementation=name) for name in (None, "matrix")]
    np.testing.assert_allclose(toy.toy(*args), toy.truth(*args), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_no_square_residual_on_cpu():
    """The reference is a branch of the same traced program, and its T x T matrix is not among what the kernel's
    gradient keeps.
    """
    program = gradient_in_two_programs().lower(*structs()).compile()
    memory = program.memory_analysis()
    assert memory.output_size_in_bytes < MATRIX_BYTES / 16
    assert memory.temp_size_in_bytes < MATRIX_BYTES / 16
    assert f"{LENGTH},{LENGTH}" not in (program.as_text() or "")
    # The measure can see it: the reference alone does keep it.
    reference = gradient_in_two_programs(implementation="matrix").lower(*structs()).compile()
    assert reference.memory_analysis().output_size_in_bytes > MATRIX_BYTES
    assert f"{LENGTH},{LENGTH}" in (reference.as_text() or "")


@pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
def test_no_square_residual_on_tpu():
    program = aot.compile_for(gradient_in_two_programs(), *structs(), target="v5e")
    assert program.memory.outputs + program.memory.temporaries < MATRIX_BYTES / 4
    assert f"{LENGTH},{LENGTH}" not in program.text
    reference = aot.compile_for(gradient_in_two_programs(implementation="matrix"), *structs(), target="v5e")
    assert reference.memory.outputs > MATRIX_BYTES


def test_same_function_lowers_for_every_platform():
    """The choice is made while lowering, so one jitted function serves platforms you do not have."""
    lowered = {
        platform: jax.jit(toy.toy).trace(*structs(length=16)).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu", "cuda")
    }
    loops = {platform: "stablehlo.while" in text for platform, text in lowered.items()}
    assert loops == {"cpu": True, "tpu": True, "cuda": False}


@pytest.mark.turns(3)
@pytest.mark.parametrize("how", [{}, {"implementation": "rows_cpu"}], ids=["chosen", "by name"])
def test_reverse_over_reverse(how):
    """The gradient of a gradient goes through the reference, and equals its second derivative."""
    q, k, weight = toy.inputs(1, 2, 8)
    direction = toy.inputs(1, 2, 8, seed=1)

    def directional(*args, **how):
        gradients = jax.grad(loss, (0, 1, 2))(*args, **how)
        return sum(jnp.vdot(g, d) for g, d in zip(gradients, direction, strict=True))

    ours = jax.jit(jax.grad(lambda *args: directional(*args, **how), (0, 1, 2)))(q, k, weight)
    plain = jax.grad(lambda *args: directional(*args, implementation="matrix"), (0, 1, 2))(q, k, weight)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_forward_mode_through_the_reference():
    """An implementation asked for by name that JAX can differentiate serves forward mode too."""
    args, tangents = toy.inputs(1, 2, 8), toy.inputs(1, 2, 8, seed=1)
    _, along = jax.jvp(lambda *a: loss(*a, implementation="matrix"), args, tangents)
    gradients = jax.grad(loss, (0, 1, 2))(*args)
    np.testing.assert_allclose(along, sum(np.vdot(g, t) for g, t in zip(gradients, tangents, strict=True)), rtol=1e-4)


def test_forward_mode_error_names_the_way():
    args, tangents = toy.inputs(1, 2, 8), toy.inputs(1, 2, 8, seed=1)
    with pytest.raises(UnsupportedError, match=r"toy: .*no forward mode.*implementation='matrix'"):
        jax.jvp(loss, args, tangents)
    with pytest.raises(TypeError, match="forward-mode"):  # inside jit the error is JAX's own, while it lowers
        jax.jit(lambda *a: jax.jvp(loss, a, tangents))(*args)


def test_remat_recomputes():
    """`jax.checkpoint` keeps the operands only, and changes no gradient."""
    args = toy.inputs()
    kept = jax.checkpoint(loss)
    for ours, plain in zip(jax.grad(kept, (0, 1, 2))(*args), jax.grad(loss, (0, 1, 2))(*args), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)
    residuals = jax.jit(lambda *a: jax.vjp(jax.checkpoint(toy.toy), *a)[1]).lower(*structs()).compile()
    assert residuals.memory_analysis().output_size_in_bytes < 4 * LENGTH * 4


def test_scan_and_loops():
    """An op inside `lax.scan`, differentiated."""
    q, k, weight = toy.inputs(1, 2, 8)

    def layers(q, k, weight, **how):
        return jnp.sum(jax.lax.scan(lambda x, _: (toy.toy(x, k, weight, **how) / 8, None), q, None, length=3)[0] ** 2)

    ours = jax.jit(jax.grad(layers, (0, 1, 2)))(q, k, weight)
    plain = jax.grad(lambda *a: layers(*a, implementation="matrix"), (0, 1, 2))(q, k, weight)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (1, None, 0)])
def test_vmap_folds_into_the_batch(in_axes):
    """Every operand mapped or not; a shared one gets a gradient for each mapped element."""
    args = [
        x if axis is None else np.stack([np.roll(x, n) * (1 + 0.1 * n) for n in range(3)], axis)
        for x, axis in zip(toy.inputs(), in_axes, strict=True)
    ]

    @jax.jit
    def each(*args):
        return toy.toy(*args), jax.grad(loss, (0, 1, 2))(*args)

    jax.clear_caches()  # a jax that finds the trace of another test's call (0.11 and later) would trace nothing here
    toy.SEEN.clear()
    got = jax.jit(jax.vmap(each, in_axes))(*args)
    assert {shape[0] for _, shape, _ in toy.SEEN} == {
        2,
        6,
    }  # traced as called, then folded: 3 mapped elements times batch 2
    for n in range(3):
        one = [x if axis is None else np.take(x, n, axis) for x, axis in zip(args, in_axes, strict=True)]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(each(*one)), strict=True):
            np.testing.assert_allclose(a[n], b, rtol=1e-4, atol=1e-5)


def test_nested_vmap():
    q, k, weight = toy.inputs(4, 4, 6)
    got = jax.vmap(jax.vmap(toy.toy, (0, None, None)), (None, 0, None))(q[:, None], k[:, None], weight)
    expected = toy.truth(q[None, :, None].repeat(4, 0), k[:, None, None].repeat(4, 1), weight)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
