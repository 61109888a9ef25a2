"""Every operation where the caller has JAX's stricter settings, maps a branch, or exports with a symbolic size."""

import pkgutil

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import contract
import rotation
import toy_ops
import vishwamai as vm

STRICT = {"rank": lambda: jax.numpy_rank_promotion("raise"), "dtype": lambda: jax.numpy_dtype_promotion("strict")}
SETTINGS = [
    pytest.param(name, case, setting, id=f"{setting}-{name}-{contract.label(case)}", marks=rotation.one_in(24, i + j))
    for i, (name, case) in enumerate((n, c) for n, o in contract.OPERATIONS.items() for c in o.cases)
    for j, setting in enumerate(STRICT)
]
NAMES = list(contract.OPERATIONS)
TOYS = {module.name for module in pkgutil.iter_modules(toy_ops.__path__)}  # operations of the tests


@pytest.mark.turns(4)
@pytest.mark.parametrize("name, case, setting", SETTINGS)
def test_stricter_promotion(name, case, setting):
    """Outputs and gradients, traced with the caller's setting in force, within a program and differentiated outside of
    it; the first case of an operation runs, too.
    """
    arrays = case.make()
    cotangents = contract.cotangents_for(case, contract.output_shapes(case))
    both = contract.value_and_gradients(case, implementation=None)
    with contract.x64(case), STRICT[setting]():
        jax.eval_shape(lambda arrays: both(jax.tree.map(lambda x: x, arrays), cotangents), arrays)
        jax.eval_shape(jax.jit(lambda arrays: case.run(arrays)), arrays)
        if case is contract.OPERATIONS[name].cases[0]:
            contract.close(case.run(arrays), contract.evaluate(case, contract.OPERATIONS[name].reference, arrays)[0])


def small(name):
    """(function of the floating arrays, those arrays) of an operation's small call."""
    case = contract.OPERATIONS[name].facts.small
    arrays = case.make()
    floats = {n: jnp.asarray(arrays[n]) for n in case.differentiable}
    rest = {n: x for n, x in arrays.items() if n not in floats}

    def run(floats):
        return jax.tree.leaves(case.run({**floats, **rest}))[0].astype(jnp.float32).sum()

    return run, floats


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_branch_of_a_mapped_cond(name):
    """The predicate is mapped, so both branches run: forward, and the gradient through the branch."""
    run, floats = small(name)
    pair = jax.tree.map(lambda x: jnp.stack([x, x]), floats)

    def chosen(flag, floats):
        return jax.lax.cond(flag, run, lambda floats: jnp.float32(0), floats)

    got = jax.vmap(chosen)(jnp.array([True, False]), pair)
    np.testing.assert_allclose(got, [run(floats), 0], rtol=1e-5)
    if floats and name != "paged_attention":
        gradients = jax.vmap(jax.grad(chosen, 1))(jnp.array([True, False]), pair)
        for of_pair, of_one in zip(*map(jax.tree.leaves, (gradients, jax.grad(run)(floats))), strict=True):
            np.testing.assert_allclose(of_pair[0].astype(np.float32), of_one.astype(np.float32), rtol=1e-4, atol=1e-5)
            assert not of_pair[1].astype(np.float32).any()


def test_packing_is_mapped():
    weights = jnp.arange(2 * 20 * 17, dtype=jnp.float32).reshape(2, 20, 17)
    data = jax.jit(jax.vmap(lambda w: vm.pack_weight(w).data))(weights)
    for got, weight in zip(data, weights, strict=True):
        np.testing.assert_array_equal(got, vm.pack_weight(weight).data)


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


WEIGHT, EXPERTS, DOWN = numbers(16, 24), numbers(3, 16, 24), numbers(3, 24, 16)
INT8, BLOCKS = vm.quantize(WEIGHT, axis=0), vm.quantize(WEIGHT, axis=0, block_size=8)
PACKED = vm.pack_weight(WEIGHT), vm.pack_weight(INT8)
PAGES = numbers(8, 4, 4, 16)
KEPT_BLOCKS = np.eye(2, dtype=bool)
# Functions of an operation, and the shapes of their arrays: "i:" are integers, all 1 or, of starts, 0 to 7.
SYMBOLIC = {
    "softmax": [(vm.softmax, "b, 16"), (vm.softmax, "4, b"), (lambda x: vm.log_softmax(x, axis=0), "b, 16")],
    "norm": [
        (lambda x: vm.rms_norm(x, jnp.ones(16)), "b, t, 16"),
        (lambda x: vm.layer_norm(x, jnp.ones(16), jnp.ones(16), residual=x)[0], "b, 16"),
    ],
    "activation": [(vm.gelu, "b, t, 16"), (lambda x: vm.fused_gelu_dropout(x, 0.5, key=jax.random.key(0)), "b, 16")],
    "gemm": [
        (lambda x: vm.gemm(x, WEIGHT, bias=jnp.ones(24), activation="silu"), "b, t, 16"),
        (vm.gemm, "b, 4, 16", "b, 16, 8"),
        (vm.gemm, "4, k", "k, 8"),
        (lambda x: vm.gemm(x, INT8), "b, 16"),
        (lambda x: vm.gemm(x, BLOCKS), "b, 16"),
        (lambda x: vm.gemm(x, PACKED[0]), "b, 16"),
        (lambda x: vm.gemm(x, PACKED[1]), "b, 16"),
        (lambda x: vm.einsum("bid,df->bif", x, WEIGHT), "b, t, 16"),
    ],
    "attention": [
        (lambda x: vm.flash_attention(x, x, x, causal=True), "b, 2, 8, 16"),
        (lambda x: vm.flash_attention(x, x, x, causal=True, window=(3, 0), layout="bshd"), "b, t, 2, 16"),
        (lambda x, k, n: vm.flash_attention(x, k, k, kv_lens=n), "b, 2, 1, 16", "b, 2, t, 16", "i: b"),
        (lambda x, ids: vm.flash_attention(x, x, x, segment_ids=(ids, ids)), "b, 2, t, 16", "i: b, t"),
        (lambda x: vm.block_sparse_attention(x, x, x, KEPT_BLOCKS, block_size=4), "b, 2, 8, 16"),
        (lambda x, starts: vm.flash_attention_varlen(x, x, x, starts, starts, 8, 8), "n, 2, 16", "i: b + 1"),
        (lambda x, lse: vm.merge_attention([x, x], [lse, lse])[0], "b, 2, t, 16", "b, 2, t"),
    ],
    "causal_conv1d": [
        (lambda x: vm.causal_conv1d(x, DOWN[0, :16, :4], activation="silu"), "b, t, 16"),
        (lambda x, ids: vm.causal_conv1d(x, DOWN[0, :16, :4], segment_ids=ids), "b, t, 16", "i: b, t"),
    ],
    "indexed_attention": [
        (vm.indexed_attention, "b, 4, t, 16", "b, 2, k, 16", "b, 2, k, 8", "i: b, t, 3"),
        (lambda x, w: vm.lightning_index(x, x[:, 0], w, top_k=3) * w[..., :1], "b, 2, 8, 16", "b, 8, 2"),
    ],
    "gated_delta_rule": [
        (lambda x, decay: vm.gated_delta_rule(0.1 * x, 0.1 * x, x, -(decay**2)), "b, 2, 8, 16", "b, 2, 8"),
        (lambda x: vm.linear_attention(x, x, x), "b, 2, 8, 16"),
        (lambda x, dt: vm.state_space(x, dt**2, -jnp.ones(2), x, x), "b, 2, 8, 16", "b, 2, 8"),
    ],
    "rope": [(vm.apply_rope, "b, 2, t, 16"), (vm.apply_rope, "b, 2, t, 16", "i: b, t")],
    "gated_linear_unit": [
        (lambda x: vm.gated_linear_unit(x, (WEIGHT, WEIGHT)), "b, t, 16"),
        (lambda x: vm.gated_linear_unit(x, (INT8, INT8)), "b, 16"),
    ],
    "linear_cross_entropy": [
        (lambda x, labels: vm.linear_cross_entropy(x, WEIGHT.T, labels), "b, t, 16", "i: b, t"),
    ],
    "grouped_gemm": [
        (lambda x, sizes: vm.grouped_gemm(x, EXPERTS, sizes), "b, 16", "i: 3"),
        (lambda x, sizes: vm.grouped_gemm(x, vm.quantize(EXPERTS, axis=-2), sizes), "b, 16", "i: 3"),
        (lambda x: vm.moe_layer(x, WEIGHT[:, :3], EXPERTS, EXPERTS, DOWN).out, "b, t, 16"),
    ],
    "block_sparse_matmul": [
        (lambda x: vm.block_sparse_matmul(x, DOWN[:2, :8, :8], np.array([[0, 1], [1, 0]]), shape=(16, 16)), "b, 16"),
    ],
    "paged_attention": [
        (lambda x, *tables: vm.ragged_paged_attention(x, PAGES, *tables), "n, 2, 16", "i: b", "i: b, 4", "i: b + 1"),
        (lambda x, *tables: vm.update_pages(PAGES, x, x, *tables), "n, 2, 16", "i: b", "i: b, 4", "i: b + 1"),
    ],
}
SIZES = {"b": 3, "t": 5, "n": 7, "k": 9}


def array_of(text):
    shape = tuple(eval(size, {}, SIZES) for size in text.removeprefix("i:").split(","))
    if text == "i: b + 1":
        return jnp.array([0, 2, 5, 7], jnp.int32)
    return jnp.full(shape, 3 if text == "i: b" else 1, jnp.int32) if text.startswith("i:") else numbers(*shape)


@pytest.mark.turns(6)
@pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in TOYS])
def test_a_symbolic_size_is_exported(name):
    """One program of the definition, and of its gradient, for every size, without a native kernel in it."""
    for call, *texts in SYMBOLIC[name]:
        scope = jax.export.SymbolicScope()
        arrays = [array_of(text) for text in texts]
        structs = [
            jax.ShapeDtypeStruct(jax.export.symbolic_shape(text.removeprefix("i:"), scope=scope), x.dtype)
            for text, x in zip(texts, arrays, strict=True)
        ]
        got = jax.export.export(jax.jit(call))(*structs).call(*arrays)
        np.testing.assert_allclose(got, call(*arrays), rtol=2e-3, atol=1e-4)
        if name != "paged_attention":
            jax.export.export(jax.jit(jax.grad(lambda x, *rest, call=call: call(x, *rest).sum())))(*structs)


def test_a_capacity_of_a_symbol_is_an_error_of_ours():
    struct = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16"), jnp.float32)
    layer = jax.jit(lambda x: vm.moe_layer(x, WEIGHT[:, :3], EXPERTS, EXPERTS, DOWN, capacity_factor=1.25).out)
    with pytest.raises(vm.ShapeError, match=r"capacity_factor=None"):
        jax.export.export(layer)(struct)


def test_a_kernel_asked_for_declines_symbols():
    struct = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16"), jnp.float32)
    with pytest.raises(vm.UnsupportedError, match=r"sizes are symbols"):
        jax.export.export(jax.jit(lambda x: vm.softmax(x, implementation="pallas_tpu")))(struct)
