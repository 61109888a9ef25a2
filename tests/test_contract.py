"""The numerics contract, kept by every implementation of every operation on every case: values, gradients, refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import contract
import oracle
from vishwamai.core import ffi
from vishwamai.core.cases import ArrayInit, Case

# Why an implementation declines contract cases. A refusal that is not here, or is no longer one, fails the test.
EXPECTED_REFUSALS: dict[tuple[str, str], dict[str, str]] = {
    ("attention", "native_cpu"): {
        "no keys": "an axis is empty",
    },
    ("sparse", "pallas_tpu"): {
        "small blocks": "the blocks are 16 x 8",
        "one row": "the blocks are 16 x 24",
        "float16": "`dense` is float16",
        "float64": "`dense` is float64",
        "no blocks": "an array is empty",
    },
    ("sparse", "triton"): {
        "float64": "`dense` is float64",
        "no blocks": "an array is empty",
    },
    ("attention", "pallas_tpu"): {
        "full f16": "float16",
        "full f64": "float64",
        "no keys": "empty",
    },
    ("loss", "pallas_tpu"): {
        "float16": "`x` is float16",
        "float64": "`x` is float64",
        "high": 'precision="high"',
        "no tokens": "there are no tokens",
    },
    ("moe", "pallas_tpu"): {
        "float16": "`lhs` is float16",
        "float64": "`lhs` is float64",
        "no rows": "an array is empty",
    },
    ("moe", "triton"): {
        "float64": "`lhs` is float64",
        "no rows": "an array is empty",
    },
    ("matmul", "pallas_tpu"): {
        "float16": "`a` is float16",
        "float64": "`a` is float64",
        "no depth": "an array is empty",
        "no rows": "an array is empty",
        "no batch": "an array is empty",
    },
    ("matmul", "native_cpu"): {
        "int8 weight in blocks": "blocks of K",
        "fp8 weight in blocks": "blocks of K",
        "mxfp4 weight": "blocks of K",
        "mxfp8 both": "blocks of K",
        "int4 weight in blocks": "blocks of K",
    },
    ("matmul", "triton"): {
        "int4 weight": "`b` is int4",
        "int8 weight in blocks": "blocks of K",
        "fp8 weight in blocks": "blocks of K",
        "mxfp4 weight": "blocks of K",
        "mxfp8 both": "blocks of K",
        "int4 weight in blocks": "blocks of K",
        "float64": "`a` is float64",
        "no depth": "an array is empty",
        "no rows": "an array is empty",
        "no batch": "an array is empty",
    },
    ("attention", "triton"): {
        "full f64": "`query` is float64",
        "head dim 2000": "heads of 2000",
        "no keys": "an axis is empty",
    },
    ("norm", "triton"): {
        "layer float64": "`x` is float64",
        "rms empty": "the array is empty",
    },
    ("gated", "pallas_tpu"): {
        "float16": "`x` is float16",
        "float64": "`x` is float64",
        "no rows": "an array is empty",
    },
    ("loss", "native_cpu"): {
        "no tokens": "there are no tokens",
    },
    ("loss", "triton"): {
        "float64": "`x` is float64",
        "no tokens": "there are no tokens",
    },
    ("gated", "triton"): {
        "float64": "`x` is float64",
        "no rows": "an array is empty",
    },
    ("activation", "triton"): {
        "gelu float64": "`x` is float64",
        "relu2 empty": "the array is empty",
    },
    ("rope", "triton"): {
        "float64": "`x` is float64",
        "no positions": "an array is empty",
    },
    ("rope", "pallas_tpu"): {
        "float16": "`x` is float16",
        "float64": "`x` is float64",
        "no positions": "an array is empty",
    },
    ("paged_attention", "pallas_tpu"): {
        "no tokens": "the batch is empty",
        "float16": "`query` is float16",
        "float64": "`query` is float64",
        "three kv heads": "6 rows of bfloat16",
        "wide heads": "256 columns",
    },
    ("paged_attention", "triton"): {
        "no tokens": "the batch is empty",
        "float64": "`query` is float64",
    },
    ("softmax", "triton"): {
        "softmax middle axis": "`axis` is not the last",
        "log_softmax float64": "`x` is float64",
        "softmax empty": "the array is empty",
    },
    ("softmax", "pallas_tpu"): {
        "softmax middle axis": "`axis` is not the last",
        "softmax float16": "`x` is float16",
        "log_softmax float64": "`x` is float64",
        "softmax empty": "the array is empty",
    },
    ("norm", "pallas_tpu"): {
        "rms float16": "`x` is float16",
        "layer float64": "`x` is float64",
        "rms empty": "the array is empty",
    },
}


# Where an implementation is coarser than the dtypes of its results, and why: the relative rounding unit to allow for.
COARSER: dict[tuple[str, str, str], float] = {
    # Three bfloat16 products for one of float32 keep 16 bits; the reference on a CPU keeps 24.
    ("matmul", "pallas_tpu", "high"): 2.0**-16,
    ("matmul", "native_cpu", "high"): 2.0**-16,
    ("matmul", "triton", "high"): 2.0**-16,
    ("gated", "triton", "high"): 2.0**-16,
    ("gated", "native_cpu", "high"): 2.0**-16,
    ("loss", "native_cpu", "high"): 2.0**-16,
    ("loss", "triton", "high"): 2.0**-16,
    # The backward product takes the float32 cotangent in bfloat16, beside operands of 8 bits; the scale's gradient is float32.
    ("matmul", "pallas_tpu", "float8_e4m3fn"): 2.0**-8,
    ("matmul", "native_cpu", "float8_e4m3fn"): 2.0**-8,
    ("matmul", "triton", "float8_e4m3fn"): 2.0**-8,
}


@pytest.mark.parametrize("op, impl", list(contract.pairs()), ids=lambda x: x.name)
def test_refusals(op, impl):
    """Every refusal is known here by name and reason, so that no case is passed over silently."""
    contract.skip_unless_built(impl)
    expected = EXPECTED_REFUSALS.get((op.name, impl.name), {})
    refused = {case.name: contract.declines(impl, case) for case in contract.OPERATIONS[op.name].cases}
    refused = {name: reason for name, reason in refused.items() if reason is not None}
    assert set(refused) == set(expected), refused
    for name, reason in refused.items():
        assert expected[name] in reason


def test_reasons_name_the_build():
    """Where the native kernels are missing, the reason says how to get them."""
    reason = ffi.why_not()
    assert reason is None or re.search(r"not built|cannot be loaded", reason) and "pip install" in reason


@pytest.mark.parametrize("op, impl, case", contract.triples())
def test_numbers(op, impl, case):
    """Outputs and gradients under jit, against float64, within twice the reference's error and a floor."""
    contract.skip_if_declined(impl, case)
    if impl is contract.OPERATIONS[op.name].reference:
        contract.check_all(contract.by_reference(case), contract.truth(case), None)
    else:
        unit = COARSER.get((op.name, impl.name, case.name), 0.0)
        contract.check_all(contract.evaluate(case, impl), contract.truth(case), contract.by_reference(case), unit)


@pytest.mark.parametrize("op, impl", list(contract.pairs()), ids=lambda x: x.name)
def test_same_bits_twice(op, impl):
    """Same inputs, same config, same machine: the same bits, whatever the order of threads or parallel grid steps."""
    contract.skip_unless_built(impl)
    case = next(case for case in contract.OPERATIONS[op.name].cases if contract.declines(impl, case) is None)
    first = contract.evaluate(case, impl)
    second = contract.evaluate(case, impl, simulation={"random_seed": 1})
    for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        np.testing.assert_array_equal(a, b)


# --- Rows with nothing to attend to ----------------------------------------------------------------------------------------------------------------


def _ids(*lengths):
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]


def _nothing(name, shape, mask=None, **options):
    """An attention case of which some rows see no key and some keys are seen by no row. `shape` is (heads, kv heads, q_len, kv_len)."""
    heads, kv_heads, rows, columns = shape
    arrays = {
        "query": ArrayInit((1, heads, rows, 16)),
        "key": ArrayInit((1, kv_heads, columns, 16)),
        "value": ArrayInit((1, kv_heads, columns, 24)),
    }
    call = contract.OPERATIONS["attention"].cases[0].call
    if mask is not None:
        options["mask"] = mask
    return Case(name, "attention", call, arrays, options | {"return_lse": True})


_ROWS_OFF = np.ones((1, 1, 40, 40), bool)
_ROWS_OFF[..., 7:29, :] = False
_ROWS_OFF[..., 11] = False
_ALL_OFF = np.zeros((1, 2, 20, 30), bool)

NOTHING = [
    _nothing("all masked", (2, 2, 20, 30), _ALL_OFF),
    _nothing("rows and a key masked", (4, 2, 40, 40), _ROWS_OFF),
    _nothing("rows masked, causal", (2, 1, 40, 40), _ROWS_OFF, causal=True),
    _nothing("causal, more rows than keys", (2, 2, 50, 20), causal=True, causal_align="bottom_right"),
    _nothing("window beside the keys", (2, 2, 150, 20), window=(3, 0)),
    _nothing("segments without a partner", (2, 2, 40, 30), segment_ids=(_ids(10, 20, 10), _ids(20, 10) * 2)),
    _nothing("rows and softcap", (2, 2, 40, 40), _ROWS_OFF, softcap=2.0),
]


def nothing_parameters():
    return [
        pytest.param(
            impl, case, id=f"{contract.label(case)}-{impl.name}", marks=contract.simulated_one_in(3, index, impl)
        )
        for index, case in enumerate(NOTHING)
        for op, impl in contract.pairs()
        if op.name == "attention"
    ]


@pytest.mark.parametrize("impl, case", nothing_parameters())
def test_nothing_to_attend_to(impl, case):
    """Output 0, logsumexp -inf, and a gradient of exactly 0 to such rows and to keys that nobody sees."""
    contract.skip_if_declined(impl, case)
    arrays = case.make()
    (_, heads, rows, _), (_, kv_heads, columns, _) = arrays["query"].shape, arrays["key"].shape
    names = ("mask", "causal", "causal_align", "window", "segment_ids")
    see = oracle.visible(1, heads, rows, columns, **{k: v for k, v in case.options.items() if k in names})
    no_key = ~see.any(-1)  # [1, heads, rows]
    no_row = ~see.reshape(1, kv_heads, -1, columns).any(-2)  # [1, kv_heads, columns]
    assert no_key.any()
    (out, logsumexp), gradients = contract.evaluate(case, impl)
    assert (out[no_key] == 0).all()
    np.testing.assert_array_equal(np.isneginf(logsumexp), no_key)
    assert (gradients["query"][no_key] == 0).all()
    assert (gradients["key"][no_row] == 0).all() and (gradients["value"][no_row] == 0).all()
    assert all(np.isfinite(x).all() for x in (out, *gradients.values()))
    # And the rest is right.
    contract.check_all(((out, logsumexp), gradients), contract.truth(case), contract.by_reference(case))


# --- Neighbours ------------------------------------------------------------------------------------------------------------------------------------


def _poisoned(case):
    """(arrays with NaN in one row of the first array, function that keeps what a NaN there must not reach)."""
    arrays = {name: x.copy() for name, x in case.make().items()}
    if case.op == "attention":  # the last query row of every head
        arrays["query"][:, :, -1] = np.nan
        return arrays, lambda out: out[:, :, :-1]
    if case.op == "rope":  # the last position of every head
        arrays["query"][:, :, -1] = np.nan
        return arrays, lambda out: out[:, :, :-1]
    if case.op == "sparse":
        arrays["dense"][-1] = np.nan
        return arrays, lambda out: out[:-1]
    if case.op == "moe":
        arrays["lhs"][-1] = np.nan
        return arrays, lambda out: out[:-1]
    if case.op == "matmul":
        arrays["a"][..., -1, :] = np.nan
        return arrays, lambda out: out[..., :-1, :]
    name = "query" if case.op == "paged_attention" else "x"
    arrays[name][-1] = np.nan
    return arrays, lambda out: out[:-1]


NEIGHBOURS = {
    "attention": "value dim 100 of 64",
    "loss": "each token (5, 7) 50 words",
    "matmul": "100x192x300 float32",
    "moe": "tiles shared by groups",
    "norm": "layer (63, 100) float32",
    "activation": "gelu float32",
    "gated": "63x100x300 float32",
    "rope": "interleaved bfloat16",
    "paged_attention": "mixed bf16",
    "sparse": "unsorted and twice",
    "softmax": "softmax (63, 100) float32",
}


@pytest.mark.parametrize("op, impl", list(contract.pairs()), ids=lambda x: x.name)
def test_a_nan_stays_in_its_row(op, impl):
    """What one row holds never reaches another through padding, a shared tile or a masked tail."""
    contract.skip_unless_built(impl)
    (case,) = (case for case in contract.OPERATIONS[op.name].cases if case.name == NEIGHBOURS[op.name])
    arrays, others = _poisoned(case)
    clean, _ = contract.evaluate(case, impl)
    got, _ = contract.evaluate(case, impl, arrays)
    # Not bit by bit: a kernel may take another path, as exact, for operands that are not all finite.
    assert np.isfinite(others(got)).all()
    contract.close(others(got), others(clean), 1e-5)
    assert np.isnan(got.astype(np.float64)).any()


# --- The suite itself ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, slip", [("float32", 1e-4), ("float32", 3e-6), ("bfloat16", 0.03), ("float64", 1e-12)])
def test_the_measure_notices(dtype, slip):
    """An error a little above the dtype's own is not let through: of one entry, or of all."""
    rng = np.random.default_rng(0)
    true = rng.standard_normal((64, 64))
    rounded = true.astype(jnp.dtype(dtype))
    contract.check("x", rounded, true, rounded, contract.Errors(0, 0))
    scaled = (true * (1 + slip)).astype(rounded.dtype)
    with pytest.raises(AssertionError, match="x: .* error"):
        contract.check("x", scaled, true, rounded, contract.Errors(0, 0))
    one = rounded.copy()
    one[3, 4] += 4 * slip * np.abs(true).max()
    with pytest.raises(AssertionError, match="x: largest error"):
        contract.check("x", one, true, rounded, contract.Errors(0, 0))
    one[3, 4] = np.nan
    with pytest.raises(AssertionError, match="NaN"):
        contract.check("x", one, true, rounded, contract.Errors(0, 0))


def test_the_simulator_notices_a_race():
    """Two parallel steps that write the same block are found, though the result may look right."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def racing(x):
        return pl.pallas_call(
            body,
            grid=(4,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        )(x)

    with pytest.raises(AssertionError), contract.simulated_tpu(num_cores_or_threads=2):
        jax.block_until_ready(jax.jit(racing)(np.ones((8, 128), np.float32)))
