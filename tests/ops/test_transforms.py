"""The promises about transforms, kept by every implementation: jit, grad, vmap, remat, shard_map, jax.export, whole
programs on sharded operands.

One small call of every op, with every kind of array it takes; what each transform must give is the reference's own
result without it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import contract
import rotation
import vishwamai
from vishwamai.core.errors import UnsupportedError

ON_THIS_CPU = [
    pytest.param(op, impl, id=f"{op.name}-{impl.name}") for op, impl in contract.pairs() if impl.platform != "tpu"
]


def every_second(start):
    """Half of those by default: what a transform does is the same code for all of them."""
    return [
        pytest.param(*given.values, id=given.id, marks=rotation.one_in(3, start + i))
        for i, given in enumerate(ON_THIS_CPU)
    ]


CHOSEN = [pytest.param(op.op, id=name) for name, op in contract.OPERATIONS.items()]


@functools.cache
def setting(name):
    """(case, arrays, cotangents, reference's outputs and gradients)."""
    case = contract.OPERATIONS[name].facts.small
    arrays = case.make()
    cotangents = contract.cotangents_for(case, contract.output_shapes(case))
    expected = contract.evaluate(case, contract.OPERATIONS[name].reference, arrays)
    return case, arrays, cotangents, expected


def loss(case, impl, cotangents):
    """A scalar function of the differentiable arrays: the outputs, each weighted by its cotangent (0 where it is
    -inf).
    """

    def run(arrays):
        outputs = case.run(arrays, implementation=impl)
        leaves = zip(jax.tree.leaves(outputs), jax.tree.leaves(cotangents), strict=True)
        return sum(jnp.sum(jnp.where(jnp.isfinite(y), y, 0.0) * c) for y, c in leaves)

    return run


def split(case, arrays):
    floats = {name: arrays[name] for name in case.differentiable}
    return floats, {name: x for name, x in arrays.items() if name not in floats}


@pytest.mark.parametrize("op, impl", ON_THIS_CPU)
def test_eager_is_jitted(op, impl):
    """Without jit, op by op, an implementation gives what it gives inside one program."""
    contract.skip_unless_built(impl)
    case, arrays, _, (outputs, _) = setting(op.name)
    contract.close(case.run(arrays, implementation=impl.name), outputs)


@pytest.mark.parametrize(
    "op, impl, mapped",
    [
        pytest.param(
            op,
            impl,
            mapped,
            id=f"{mapped}-{op.name}-{impl.name}",
            marks=rotation.one_in(12 if impl.platform == "tpu" else 3, i + j),
        )
        for i, (op, impl) in enumerate(contract.pairs())
        for j, mapped in enumerate(("all", "first half", "second half"))
    ],
)
def test_vmap(op, impl, mapped):
    """Outputs and gradients with some arrays mapped (over axis 0 or 1) and the others shared, element by element the
    reference's.
    """
    contract.skip_unless_built(impl)
    case, arrays, cotangents, _ = setting(op.name)
    names = list(arrays)
    chosen = {"first half": names[::2], "second half": names[1::2] or names, "all": names}[mapped]
    rng = np.random.default_rng(0)

    def copies(name):
        x = arrays[name]
        return x, (rng.permutation(x.reshape(-1)).reshape(x.shape))

    axes: dict[str, Any] = {n: (i % min(2, arrays[n].ndim) if n in chosen else None) for i, n in enumerate(names)}
    stacked = {n: x if axes[n] is None else np.stack(copies(n), axes[n]) for n, x in arrays.items()}
    run = contract.value_and_gradients(case, implementation=impl.name)
    with contract.running(impl):
        got = jax.block_until_ready(jax.jit(jax.vmap(lambda a: run(a, cotangents), (axes,)))(stacked))
    for i in range(2):
        one = {n: x if axes[n] is None else np.take(x, i, axes[n]) for n, x in stacked.items()}
        expected = contract.evaluate(case, contract.OPERATIONS[op.name].reference, one)
        contract.close(jax.tree.map(lambda x, i=i: x[i], got), expected)


@pytest.mark.parametrize("op, impl", every_second(0))
def test_remat(op, impl):
    """Under `jax.checkpoint` the gradients stay, and nothing but the arrays is kept."""
    contract.skip_unless_built(impl)
    case, arrays, cotangents, (_, gradients) = setting(op.name)
    floats, rest = split(case, arrays)
    function = jax.checkpoint(lambda floats: loss(case, impl.name, cotangents)({**floats, **rest}))
    contract.close(jax.jit(jax.grad(function))(floats), gradients)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "op, impl, check_vma",
    [
        pytest.param(*given.values, check_vma, id=f"{check_vma}-{given.id}", marks=given.marks)
        for start, check_vma in enumerate((True, False))
        for given in every_second(start)
    ],
)
def test_shard_map(op, impl, check_vma):
    """On eight devices, batch split and the rest shared: the outputs in parts, the gradients of shared arrays
    summed.
    """
    contract.skip_unless_built(impl)
    case, arrays, cotangents, expected = setting(op.name)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    floats, rest = split(case, arrays)
    batched = contract.OPERATIONS[op.name].facts.batched
    specs = {name: P("x") if name in batched else P() for name in arrays}

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=({n: specs[n] for n in floats}, {n: specs[n] for n in rest}),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    def sharded(floats, rest):
        return case.run({**floats, **rest}, implementation=impl.name)

    @jax.jit
    def run(floats, rest):
        outputs, pull = jax.vjp(lambda f: sharded(f, rest), floats)
        return outputs, pull(cotangents)[0]

    contract.close(run(floats, rest), expected)


@pytest.mark.parametrize("op, impl", every_second(1))
def test_export(op, impl):
    """Outputs and gradients survive `jax.export`, to bytes and back."""
    contract.skip_unless_built(impl)
    case, arrays, cotangents, expected = setting(op.name)
    run = contract.value_and_gradients(case, implementation=impl.name)
    # The native kernels are custom calls of ours; whoever loads the program registers them by importing vishwamai.
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in native_targets(impl)]
    exported = jax.export.export(jax.jit(lambda a: run(a, cotangents)), platforms=["cpu"], disabled_checks=checks)(
        arrays
    )
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.platforms == ("cpu",)
    contract.close(loaded.call(arrays), expected)


def native_targets(impl):
    return list(contract.ffi.native().registrations()) if impl.platform == "cpu" else []


@pytest.mark.turns(3)
@pytest.mark.parametrize("op", CHOSEN)
def test_export_for_tpu(op):
    """A program for a TPU is written on a machine without one, with the kernels inside."""
    case, arrays, cotangents, _ = setting(op.name)
    run = contract.value_and_gradients(case)
    exported = jax.export.export(jax.jit(lambda a: run(a, cotangents)), platforms=["tpu"])(arrays)
    text = jax.export.deserialize(exported.serialize()).mlir_module()
    kernels = [impl for impl in op.implementations if impl.platform == "tpu"]
    assert ("tpu_custom_call" in text) == bool(kernels)


# Which axis of the mesh splits which dimension of the batched arrays; the sequence (attention), the rows, the features.
SPECS = {
    "batch": P("x"),
    "middle": P(None, "x"),
    "last but one": P(None, None, "x"),
    "last": None,
    "mixed": P("y", None, "x"),
}


@pytest.mark.parametrize(
    "op, kind, layout",
    [
        pytest.param(
            operation.op, kind, layout, id=f"{layout}-{kind.name.lower()}-{name}", marks=rotation.one_in(5, i + j)
        )
        for i, (name, operation) in enumerate(contract.OPERATIONS.items())
        for kind in (AxisType.Auto, AxisType.Explicit)
        for j, layout in enumerate(SPECS)
    ],
)
def test_sharded_operands(op, kind, layout):
    """Whatever dimension is split, on explicit or automatic axes, the chosen implementation's answer is that of one
    device.
    """
    case, arrays, cotangents, expected = setting(op.name)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    batched = contract.OPERATIONS[op.name].facts.batched

    def spec(name, x):
        if name not in batched:
            return P()
        wanted = SPECS[layout] or P(*(None,) * (x.ndim - 1), "x")
        entries = [axis if x.shape[i] % 4 == 0 else None for i, axis in enumerate(tuple(wanted)[: x.ndim])]
        return P(*entries)

    placed = {n: jax.device_put(x, NamedSharding(mesh, spec(n, x))) for n, x in arrays.items()}
    floats, rest = split(case, placed)
    function = loss(case, None, cotangents)
    with jax.set_mesh(mesh):
        outputs = jax.jit(case.run)(placed)
        gradients = jax.jit(lambda f, r: jax.grad(lambda f: function({**f, **r}))(f))(floats, rest)
    contract.close((outputs, gradients), expected)


@pytest.mark.turns(6)
def test_linearize_goes_through_the_definition():
    """JAX takes the rules of a gradient, and would fail where the linear function is called."""
    rng = np.random.default_rng(0)
    x, t, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 16), (8, 16), (16, 16)))
    calls = {
        "norm": vishwamai.rms_norm,
        "softmax": vishwamai.softmax,
        "gemm": lambda x: vishwamai.gemm(x, w),
        "attention": lambda x: vishwamai.flash_attention(*(x[None, None],) * 3),
        "loss": lambda x: vishwamai.linear_cross_entropy(x, w, jnp.arange(8)),
    }
    for name, call in calls.items():
        y, linear = jax.linearize(call, x)
        dy = jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape) + 1
        dx = jax.vjp(call, x)[1](dy)[0]
        np.testing.assert_allclose(jnp.vdot(linear(t), dy), jnp.vdot(t, dx), rtol=1e-4, err_msg=name)
    slope = jax.grad(lambda x: jnp.sum(vishwamai.rms_norm(x) ** 3))
    expected = jax.grad(lambda x: jnp.vdot(slope(x), t))(x)  # the Hessian is symmetric
    np.testing.assert_allclose(jax.linearize(slope, x)[1](t), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(UnsupportedError, match="norm: .* no forward mode"):
        jax.linearize(lambda x: vishwamai.rms_norm(x, implementation="native_cpu"), x)
    inner = jax.linearize(jax.jit(lambda x: vishwamai.rms_norm(x, implementation="xla")), x)[1]
    np.testing.assert_allclose(inner(t), jax.linearize(vishwamai.rms_norm, x)[1](t), rtol=1e-5, atol=1e-6)
