"""The numerics contract, kept by every implementation of every operation on every case: values, gradients, refusals."""

import re

import jax
import numpy as np
import pytest

import contract
from vishwamai.core import ffi

# Why an implementation declines contract cases. A refusal that is not here, or is no longer one, fails the test.
EXPECTED_REFUSALS: dict[tuple[str, str], dict[str, str]] = {
    ("attention", "native_cpu"): {"no keys": "an axis is empty"},
    ("attention", "pallas_tpu"): {
        "full f16": "float16",
        "full f64": "float64",
        "no keys": "empty",
    },
    ("matmul", "pallas_tpu"): {
        "float16": "`a` is float16",
        "float64": "`a` is float64",
        "no depth": "an array is empty",
        "no rows": "an array is empty",
        "no batch": "an array is empty",
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
    # The backward product takes the float32 cotangent in bfloat16, beside operands of 8 bits; the scale's gradient is float32.
    ("matmul", "pallas_tpu", "float8_e4m3fn"): 2.0**-8,
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
