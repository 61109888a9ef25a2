"""The promises about transforms, kept by every implementation: jit, grad, vmap, remat, shard_map, jax.export, whole programs on sharded operands.

One small call of every op, with every kind of array it takes; what each transform must give is the reference's own result without it.
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
import vishwamai
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.ops.gated.cases import gated as gated_by_name
from vishwamai.ops.loss.cases import Labels
from vishwamai.ops.paged_attention.cases import ForwardCase, Table
from vishwamai.ops.rope.cases import rope as rope_by_name


def paged_batch(query, kv_pages, kv_lens, page_indices, sinks, **options):
    """Eight batches of two sequences, of one and two new tokens, by vmap: the operation itself has no batch axis but the sequences."""
    starts: Any = np.array([0, 1, 3], np.int32)

    def one(query, kv_pages, kv_lens, page_indices):
        return vishwamai.ragged_paged_attention(
            query, kv_pages, kv_lens, page_indices, starts, sinks=sinks, max_q_len=2, **options
        )

    return jax.vmap(one)(query, kv_pages, kv_lens, page_indices)


SMALL = {
    "paged_attention": ForwardCase(
        "small",
        "paged_attention",
        paged_batch,
        {
            "query": ArrayInit((8, 3, 2, 16)),
            "kv_pages": ArrayInit((8, 4, 4, 2, 16)),
            "kv_lens": Table((8, 2), "int32", values=(5, 3, 8, 8, 2, 4, 1, 2) * 2),
            "page_indices": Table((8, 2, 2), "int32", values=(0, 1, 3, 2) * 8),
            "sinks": ArrayInit((2,)),
        },
        {"softcap": 4.0},
    ),
    "sparse": Case(
        "small",
        "sparse",
        vishwamai.block_sparse_matmul,
        {"dense": ArrayInit((8, 6, 256)), "values": ArrayInit((4, 128, 128), scale=0.1)},
        {"indices": np.array([[0, 1], [1, 0], [0, 0], [1, 2]]), "shape": (256, 384)},
    ),
    "activation": Case("small", "activation", vishwamai.silu, {"x": ArrayInit((8, 6, 40))}),
    "gated": Case(
        "small",
        "gated",
        gated_by_name,
        {
            "x": ArrayInit((8, 9, 20)),
            "gate": ArrayInit((20, 24), scale=0.2),
            "up": ArrayInit((20, 24), scale=0.2),
        },
    ),
    "rope": Case(
        "small",
        "rope",
        rope_by_name,
        {
            "query": ArrayInit((8, 4, 12, 8)),
            "key": ArrayInit((8, 2, 12, 8)),
            "positions": ArrayInit((8, 12), "int32", "segments"),
        },
    ),
    "softmax": Case("small", "softmax", vishwamai.softmax, {"x": ArrayInit((8, 6, 40))}),
    "attention": Case(
        "small",
        "attention",
        vishwamai.flash_attention,
        {
            "query": ArrayInit((8, 4, 12, 8)),
            "key": ArrayInit((8, 2, 20, 8)),
            "value": ArrayInit((8, 2, 20, 16)),
            "bias": ArrayInit((1, 4, 12, 20)),
            "mask": ArrayInit((8, 1, 1, 20), "bool", "mask"),
            "sinks": ArrayInit((4,)),
        },
        {"causal": True, "causal_align": "bottom_right", "window": (9, 2), "softcap": 4.0, "return_lse": True},
    ),
    "loss": Case(
        "small",
        "loss",
        vishwamai.linear_cross_entropy,
        {
            "x": ArrayInit((8, 6, 40)),
            "weight": ArrayInit((50, 40), scale=0.3),
            "labels": Labels((8, 6), "int32", "integers", words=50),
            "bias": ArrayInit((50,)),
        },
        {"softcap": 4.0, "label_smoothing": 0.1, "z_loss": 0.1, "reduction": "none", "return_logsumexp": True},
    ),
    "matmul": Case(
        "small",
        "matmul",
        vishwamai.gemm,
        {
            "a": ArrayInit((8, 9, 20)),
            "b": ArrayInit((20, 24), scale=0.2),
            "bias": ArrayInit((24,)),
            "scale_a": ArrayInit((8, 9), "float32", "positive"),
        },
        {"activation": "gelu"},
    ),
    "moe": Case(
        "small",
        "moe",
        vishwamai.grouped_gemm,
        {"lhs": ArrayInit((8, 6, 20)), "rhs": ArrayInit((3, 20, 24), scale=0.2)},
        {"group_sizes": np.array([2, 0, 3], np.int32)},
    ),
    "norm": Case(
        "small",
        "norm",
        vishwamai.layer_norm,
        {
            "x": ArrayInit((8, 6, 40)),
            "scale": ArrayInit((40,)),
            "offset": ArrayInit((40,)),
            "residual": ArrayInit((8, 6, 40)),
        },
    ),
}
# The leading axis of these is the batch of 8.
BATCHED = {
    "sparse": ("dense",),
    "attention": ("query", "key", "value", "mask"),
    "loss": ("x", "labels"),
    "matmul": ("a", "scale_a"),
    "moe": ("lhs",),
    "norm": ("x", "residual"),
    "activation": ("x",),
    "gated": ("x",),
    "rope": ("query", "key", "positions"),
    "paged_attention": ("query", "kv_pages", "kv_lens", "page_indices"),
    "softmax": ("x",),
}
ON_THIS_CPU = [
    pytest.param(op, impl, id=f"{op.name}-{impl.name}") for op, impl in contract.pairs() if impl.platform != "tpu"
]
CHOSEN = [pytest.param(op.op, id=name) for name, op in contract.OPERATIONS.items()]


def test_every_operation_is_here():
    assert set(SMALL) == set(BATCHED) == set(contract.OPERATIONS)


@functools.cache
def setting(name):
    """(case, arrays, cotangents, reference's outputs and gradients)."""
    case = SMALL[name]
    arrays = case.make()
    cotangents = contract.cotangents_for(case, contract.output_shapes(case))
    expected = contract.evaluate(case, contract.OPERATIONS[name].reference, arrays, cotangents)
    return case, arrays, cotangents, expected


def loss(case, impl, cotangents):
    """A scalar function of the differentiable arrays: the outputs, each weighted by its cotangent (0 where it is -inf)."""

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
        pytest.param(op, impl, mapped, id=f"{mapped}-{op.name}-{impl.name}", marks=contract.one_in(3, i + j))
        for i, (op, impl) in enumerate(contract.pairs())
        for j, mapped in enumerate(("all", "first half", "second half"))
    ],
)
def test_vmap(op, impl, mapped):
    """Outputs and gradients with some arrays mapped (over axis 0 or 1) and the others shared, element by element the reference's."""
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
        expected = contract.evaluate(case, contract.OPERATIONS[op.name].reference, one, cotangents)
        contract.close(jax.tree.map(lambda x, i=i: x[i], got), expected)


@pytest.mark.parametrize("op, impl", ON_THIS_CPU)
def test_remat(op, impl):
    """Under `jax.checkpoint` the gradients stay, and nothing but the arrays is kept."""
    contract.skip_unless_built(impl)
    case, arrays, cotangents, (_, gradients) = setting(op.name)
    floats, rest = split(case, arrays)
    function = jax.checkpoint(lambda floats: loss(case, impl.name, cotangents)({**floats, **rest}))
    contract.close(jax.jit(jax.grad(function))(floats), gradients)


@pytest.mark.parametrize("op, impl", ON_THIS_CPU)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(op, impl, check_vma):
    """On eight devices, batch split and the rest shared: the outputs in parts, the gradients of shared arrays summed."""
    contract.skip_unless_built(impl)
    case, arrays, cotangents, expected = setting(op.name)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    floats, rest = split(case, arrays)
    specs = {name: P("x") if name in BATCHED[op.name] else P() for name in arrays}

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


@pytest.mark.parametrize("op, impl", ON_THIS_CPU)
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
            operation.op, kind, layout, id=f"{layout}-{kind.name.lower()}-{name}", marks=contract.one_in(5, i + j)
        )
        for i, (name, operation) in enumerate(contract.OPERATIONS.items())
        for kind in (AxisType.Auto, AxisType.Explicit)
        for j, layout in enumerate(SPECS)
    ],
)
def test_sharded_operands(op, kind, layout):
    """Whatever dimension is split, on explicit or automatic axes, the chosen implementation's answer is that of one device."""
    case, arrays, cotangents, expected = setting(op.name)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)

    def spec(name, x):
        if name not in BATCHED[op.name]:
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
