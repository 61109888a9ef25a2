"""The numerics contract, kept by every implementation of every operation on every case: values, gradients, what is
declined.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import contract
import rotation
from vishwamai.core import ffi

pytestmark = pytest.mark.interpreter


@pytest.mark.turns(6)
@pytest.mark.parametrize("op, impl", list(contract.pairs()), ids=lambda x: x.name)
def test_declines(op, impl):
    """Every case that is declined is known to the operation's facts, by name and reason, so that none is passed over
    silently.
    """
    contract.skip_unless_built(impl)
    expected = contract.OPERATIONS[op.name].facts.declines.get(impl.name, {})
    found = {case.name: contract.declines(impl, case) for case in contract.OPERATIONS[op.name].cases}
    declined = {name: reason for name, reason in found.items() if reason is not None}
    assert set(declined) == set(expected), declined
    for name, reason in declined.items():
        assert expected[name] in reason


def pairs_in_turn(start):
    """Every op with every implementation; of the simulated kernels one in four by default."""
    places = {name: start + i for i, name in enumerate(contract.OPERATIONS)}
    return [
        pytest.param(
            op,
            impl,
            id=f"{op.name}-{impl.name}",
            marks=rotation.one_in(4 if impl.platform in ("tpu", "cuda") else 1, places[op.name]),
        )
        for op, impl in contract.pairs()
    ]


def test_reasons_name_the_build():
    """Where the native kernels are missing, the reason says how to get them."""
    reason = ffi.why_not()
    assert reason is None or re.search(r"not built|cannot be loaded", reason) and "pip install" in reason


@pytest.mark.turns(4)
@pytest.mark.parametrize("op, impl, case", contract.triples())
def test_numbers(op, impl, case):
    """Outputs and gradients under jit, against float64, within twice the reference's error and a floor."""
    contract.skip_if_declined(impl, case)
    if impl is contract.OPERATIONS[op.name].reference:
        contract.check_all(contract.by_reference(case), contract.truth(case), None)
    else:
        unit = contract.OPERATIONS[op.name].facts.coarser.get(case.name, {}).get(impl.name, 0.0)
        contract.check_all(contract.evaluate(case, impl), contract.truth(case), contract.by_reference(case), unit)


NAMES = [name for name in contract.OPERATIONS if not contract.TRITON]
EVERY = pytest.param(True, marks=pytest.mark.long, id="every case")


@pytest.mark.filterwarnings("ignore::vishwamai.FallbackWarning")
@pytest.mark.parametrize("every", [pytest.param(False, id="one case"), EVERY])
@pytest.mark.parametrize("name", NAMES)
def test_concrete_arrays(name, every):
    """Outside of jit, on arrays of JAX whose values are known, an operation gives what its program gives."""
    cases = contract.OPERATIONS[name].cases
    start = rotation.SEED % len(cases)
    for case in cases if every else cases[start : start + 1]:
        with contract.x64(case):
            arrays = {key: jnp.asarray(x) for key, x in case.make().items()}
            contract.close(case.run(arrays), jax.jit(case.run)(arrays), 1e-2)


@pytest.mark.turns(3)
@pytest.mark.parametrize("op, impl", pairs_in_turn(0))
def test_same_bits_twice(op, impl):
    """Same inputs, same config, same machine: the same bits, whatever the order of threads or parallel grid steps."""
    contract.skip_unless_built(impl)
    case = next(case for case in contract.OPERATIONS[op.name].cases if contract.declines(impl, case) is None)
    first = contract.evaluate(case, impl)
    second = contract.evaluate(case, impl, simulation={"random_seed": 1})
    for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.turns(3)
@pytest.mark.parametrize("op, impl", pairs_in_turn(1))
def test_a_nan_stays_in_its_row(op, impl):
    """What one row holds never reaches another through padding, a shared tile or a masked tail."""
    contract.skip_unless_built(impl)
    operation = contract.OPERATIONS[op.name]
    poison = operation.facts.poison
    (case,) = (case for case in operation.cases if case.name == poison.case)
    arrays = {name: x.copy() for name, x in case.make().items()}
    np.moveaxis(arrays[poison.array], poison.axis, 0)[-1] = np.nan
    clean, _ = contract.evaluate(case, impl)
    got, _ = contract.evaluate(case, impl, arrays)
    others, expected = (np.moveaxis(y, poison.axis, 0)[:-1] for y in (got, clean))
    # Not bit by bit: a kernel may take another path, as exact, for operands that are not all finite.
    assert np.isfinite(others).all()
    contract.close(others, expected, 1e-5)
    assert np.isnan(got.astype(np.float64)).any()


@pytest.mark.parametrize("op, impl", list(contract.pairs()), ids=lambda x: x.name)
def test_every_implementation_has_a_case_by_default(op, impl):
    """With gradients, whatever the seed, if the operation has any."""
    operation = contract.OPERATIONS[op.name]
    chosen = [case for case in operation.cases if case.name in contract.by_default(op, impl)]
    assert chosen
    assert any(case.differentiable for case in chosen) or not any(case.differentiable for case in operation.cases)


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


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the simulator's callbacks hang on a GPU's runtime")
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

    # The simulator records a race for `simulated_tpu` to report; that of jax 0.12 also raises where it happens.
    races = (AssertionError, jax.errors.JaxRuntimeError)
    with pytest.raises(races, match="races_found|RACE DETECTED"), contract.simulated_tpu(num_cores_or_threads=2):
        jax.block_until_ready(jax.jit(racing)(np.ones((8, 128), np.float32)))
