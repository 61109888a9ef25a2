"""Sharded operands on eight devices: a sharding may change the speed, never the answer, whoever partitions the
program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rotation
import toy
from vishwamai.core.errors import DeviceError
from vishwamai.core.sharding import assign

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(shape, names, kind):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


@pytest.fixture(params=[AUTO, EXPLICIT], ids=["auto", "explicit"])
def mesh(request):
    """Four ways of "x" times two ways of "y"."""
    return mesh_of((4, 2), ("x", "y"), request.param)


def put(mesh, arrays, specs):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


def value_and_gradients(*args):
    y, pull = jax.vjp(toy.toy, *args)
    return y, pull(jnp.cos(y))


def in_mesh(mesh, function, *args):
    with jax.set_mesh(mesh):
        return jax.jit(function)(*args)


# (specs of q, k and weight, shape of q in the kernel): batch 4, heads 8, length 24.
LAYOUTS = {
    "whole": ((P(), P(), P()), (4, 8, 24)),
    "batch": ((P("x"), P("x"), P()), (1, 8, 24)),
    "heads": ((P(None, "x"), P(None, "x"), P("x")), (4, 2, 24)),
    "batch and heads": ((P("x", "y"), P("x", "y"), P("y")), (1, 4, 24)),
    "both axes on heads": ((P(None, ("x", "y")), P(None, ("x", "y")), P(("x", "y"))), (4, 1, 24)),
    "sequence": ((P(None, None, "x"), P(None, None, "x"), P()), (4, 8, 24)),
    "sequence of one operand": ((P(), P(None, None, ("x", "y")), P()), (4, 8, 24)),
    "batch and sequence": ((P("x", None, "y"), P("x", None, "y"), P()), (1, 8, 24)),
    "operands disagree": ((P("x"), P(None, "x"), P("y")), None),
    "axes swapped": ((P("x", "y"), P("y", "x"), P()), (1, 4, 24)),
    "weight alone": ((P(), P(), P("x")), None),
}


@functools.cache
def on_one_device():
    """The arrays of `LAYOUTS`, with the value and the gradients of them whole."""
    arrays = toy.inputs(4, 8, 24)
    expected = jax.jit(value_and_gradients)(*arrays)
    np.testing.assert_allclose(expected[0], toy.truth(*arrays), rtol=1e-5, atol=1e-5)
    return arrays, expected


@pytest.mark.parametrize("layout", rotation.in_turn(2, LAYOUTS))
def test_any_sharding_gives_the_same_answer(mesh, layout):
    """Forward and gradients, whatever is split; the kernel sees its share of batch and heads and the whole sequence."""
    specs, local = LAYOUTS[layout]
    arrays, expected = on_one_device()
    jax.clear_caches()
    toy.SEEN.clear()
    got = in_mesh(mesh, value_and_gradients, *put(mesh, arrays, specs))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    shapes = {(direction, shape) for direction, shape, _ in toy.SEEN}
    assert all(shape[-1] == 24 for _, shape in shapes)
    if local is not None:
        assert {("forward", local), ("backward", local)} <= shapes


def test_the_kernel_is_wrong_on_half_a_sequence():
    """The test above can fail: were the sequence split, the answer would differ."""
    q, k, weight = toy.inputs(1, 1, 24)
    halves = np.concatenate(
        [toy.truth(q[..., :12], k[..., :12], weight), toy.truth(q[..., 12:], k[..., 12:], weight)], -1
    )
    assert np.abs(halves - toy.truth(q, k, weight)).max() > 0.1


def test_no_gathering_of_what_may_be_split(mesh):
    """Batch and heads stay where they are: the compiled program moves nothing but the gradient of the shared weight."""
    specs, _ = LAYOUTS["batch and heads"]
    with jax.set_mesh(mesh):
        text = jax.jit(value_and_gradients).lower(*put(mesh, toy.inputs(4, 8, 24), specs)).compile().as_text() or ""
    assert "all-gather" not in text and "all-to-all" not in text
    assert "all-reduce" in text


def test_uneven_heads_are_gathered(mesh):
    """Six heads do not divide by four: they stay whole, and the answer is right."""
    arrays = toy.inputs(4, 6, 8)
    specs = (P("y", None), P("y", None), P())
    expected = jax.jit(value_and_gradients)(*arrays)
    got = in_mesh(mesh, value_and_gradients, *put(mesh, arrays, specs))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_explicit_results_are_split_as_the_operands():
    mesh = mesh_of((4, 2), ("x", "y"), EXPLICIT)
    q, k, weight = put(mesh, toy.inputs(4, 8, 24), LAYOUTS["batch and heads"][0])
    with jax.set_mesh(mesh):
        y = jax.jit(toy.toy)(q, k, weight)
        assert jax.typeof(y).sharding.spec == P("x", "y", None)
        eager = toy.toy(q, k, weight)
    np.testing.assert_array_equal(y, eager)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", [None, "matrix"])
def test_shard_map(check_vma, implementation):
    """Inside the caller's own shard_map an op is local; the gradient of a shared operand is summed over the shards."""
    mesh = mesh_of((8,), ("x",), AUTO)
    arrays = toy.inputs(8, 2, 12)

    def run(q, k, weight):
        return toy.toy(q, k, weight, implementation=implementation)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P("x"), P("x"), P()), out_specs=P("x"), check_vma=check_vma)

    def loss(function, *args):
        return jnp.sum(jnp.sin(function(*args)))

    np.testing.assert_allclose(jax.jit(sharded)(*arrays), toy.truth(*arrays), rtol=1e-5, atol=1e-5)
    got = jax.jit(jax.grad(lambda *a: loss(sharded, *a), (0, 1, 2)))(*arrays)
    expected = jax.jit(jax.grad(lambda *a: loss(run, *a), (0, 1, 2)))(*arrays)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradient_inside_shard_map():
    """Differentiated per shard, a replicated operand's gradient is already the sum."""
    mesh = mesh_of((8,), ("x",), AUTO)
    arrays = toy.inputs(8, 2, 12)
    gradient = jax.grad(lambda *a: jnp.sum(toy.toy(*a)), (0, 1, 2))
    sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(P("x"), P("x"), P()), out_specs=(P("x"), P("x"), P()))
    for ours, theirs in zip(jax.jit(sharded)(*arrays), jax.jit(gradient)(*arrays), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_vmap_of_sharded_operands(mesh):
    arrays = toy.inputs(4, 8, 24)
    sharded = put(mesh, arrays, (P("x"), P("x"), P()))
    got = in_mesh(mesh, jax.vmap(lambda q, k, w: toy.toy(q[None], k[None], w)[0], (0, 0, None)), *sharded)
    np.testing.assert_allclose(got, toy.truth(*arrays), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "specs, expected",
    [
        ([("x",), ()], {"b": ("x",)}),
        ([(), ("y",)], {"b": ("y",)}),  # the second operand decides where the first says nothing
        ([(None, "x"), ()], {"h": ("x",)}),
        ([(None, None, "x"), ()], {}),  # t is not splittable
        ([("x", "x2"), ()], {"b": ("x",), "h": ("x2",)}),
        ([(("x", "y"),), ()], {"b": ("x", "y")}),
        ([("z",), ()], {}),  # three does not divide
        ([("x",), (None, "x")], {"b": ("x",)}),  # an axis serves one factor
    ],
)
def test_assign(specs, expected):
    """The first operand that splits a factor decides, if every dimension of the factor divides."""
    dims = [("b", "h", "t"), ("b", "h")]
    sizes = {"x": 2, "x2": 2, "y": 4, "z": 3}
    assert assign(dims, frozenset("bh"), [(8, 4, 6), (8, 2)], specs, sizes) == expected


def test_assign_demands_that_grouped_heads_divide():
    """Query and kv heads share a factor: it is split only if both divide."""
    dims, sizes = [("b", "h"), ("b", "h")], {"x": 4}
    assert assign(dims, frozenset("bh"), [(1, 8), (1, 2)], [(None, "x"), ()], sizes) == {}
    assert assign(dims, frozenset("bh"), [(1, 8), (1, 4)], [(None, "x"), ()], sizes) == {"h": ("x",)}
    assert assign(dims, frozenset("bh"), [(1, 8), (1, 1)], [(None, "x"), ()], sizes) == {"h": ("x",)}


def test_an_array_beside_a_mesh_is_put_there(mesh):
    """Outside of `jax.set_mesh`: a weight that was never placed beside activations that were."""
    arrays = toy.inputs(4, 8, 24)
    q = jax.device_put(arrays[0], NamedSharding(mesh, P("x")))
    y, gradients = value_and_gradients(q, *arrays[1:])
    _, (expected, expected_gradients) = on_one_device()
    for a, b in zip((y, *gradients), (expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_two_meshes_are_an_error():
    q, k, weight = toy.inputs(4, 8, 24)
    with pytest.raises(DeviceError, match=r"on two meshes, with axes {'x': 4, 'y': 2} and {'z': 8}"):
        toy.toy(
            jax.device_put(q, NamedSharding(mesh_of((4, 2), ("x", "y"), EXPLICIT), P("x"))),
            jax.device_put(k, NamedSharding(mesh_of((8,), ("z",), EXPLICIT), P(None, "z"))),
            weight,
        )
