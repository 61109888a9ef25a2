"""What the contract suite shares: the operations and their cases, one way to run a case on any implementation, one measure of its error."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import os
import pkgutil
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

import oracle
import ref_views
import vishwamai.ops
from vishwamai.core import ffi
from vishwamai.core.cases import Case
from vishwamai.core.errors import FallbackWarning
from vishwamai.core.explain import record_plans
from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation, Op


@dataclasses.dataclass(frozen=True)
class Operation:
    """An op with its cases."""

    op: Op
    cases: tuple[Case, ...]

    @property
    def reference(self) -> Implementation:
        return self.op.implementations[-1]


def _operations() -> dict[str, Operation]:
    """Every package of `vishwamai.ops` that has cases."""
    found = {}
    for package in pkgutil.iter_modules(vishwamai.ops.__path__, "vishwamai.ops."):
        folder = next(iter(vishwamai.ops.__path__)) + "/" + package.name.rpartition(".")[2]
        if not os.path.exists(f"{folder}/cases.py"):
            continue
        cases = importlib.import_module(f"{package.name}.cases").CASES
        (op,) = {id(x): x for x in vars(importlib.import_module(package.name)).values() if isinstance(x, Op)}.values()
        assert {case.op for case in cases} == {op.name}
        found[op.name] = Operation(op, tuple(case for case in cases if "contract" in case.tags))
    return found


OPERATIONS = _operations()


def label(case: Case) -> str:
    """A case's name as a test id."""
    return re.sub(r"[^\w.+=-]+", "_", case.name).strip("_")


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter is chosen for a whole process: one that was started with it tests the Triton kernels and nothing else (`make test-gpu`)."""


def pairs() -> Iterator[tuple[Op, Implementation]]:
    """Every op with every implementation that runs or is simulated on a CPU."""
    platforms = ("cuda",) if INTERPRETED else (None, "cpu", "tpu")
    for operation in OPERATIONS.values():
        for impl in operation.op.implementations:
            if impl.platform in platforms:
                yield operation.op, impl


def one_in(n: int, index: int) -> Any:
    """The marks of the index-th of many like tests: one in n runs by default, the others are `long`."""
    return () if index % n == 0 else pytest.mark.long


def simulated_one_in(n: int, index: int, impl: Implementation) -> Any:
    """The same for a kernel that is simulated here, which is slow; the others run whatever their index."""
    return one_in(n, index) if impl.platform in ("tpu", "cuda") else ()


def triples() -> list[Any]:
    """op x implementation x contract case, as pytest parameters: all implementations of a case in a row, the reference first.

    So a case's oracle and reference are computed once, and remembered while its other implementations are compared with them. Simulated kernels run one
    case in four by default.
    """
    return [
        pytest.param(
            op.op,
            impl,
            case,
            id=f"{op.op.name}-{label(case)}-{impl.name}",
            marks=simulated_one_in(4, index, impl),
        )
        for op in OPERATIONS.values()
        for index, case in enumerate(op.cases)
        for impl in reversed([impl for of, impl in pairs() if of is op.op])
    ]


# --- Running a case --------------------------------------------------------------------------------------------------------------------------------


def skip_unless_built(impl: Implementation) -> None:
    """Passes over the native CPU kernels, with the reason, where they are not built."""
    if impl.platform == "cpu" and (reason := ffi.why_not()):
        pytest.skip(reason)


@functools.cache
def case_spec(case: Case) -> Any:
    """The spec that the case's call gives its op."""
    with x64(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        plans = [plan for plan in record_plans(case.run, case.shapes()) if plan.op.name == case.op]
    assert plans, f"{case.op}/{case.name} never reaches its op"
    return plans[0].spec


def declines(impl: Implementation, case: Case, chip: Chip | None = None) -> str | None:
    """The implementation's reason not to serve the case, or None."""
    return impl.why_not(case_spec(case), chip)


def skip_if_declined(impl: Implementation, case: Case) -> None:
    """Passes over a case that the implementation declines; test_contract.py::test_refusals knows each by name."""
    skip_unless_built(impl)
    if reason := declines(impl, case):
        pytest.skip(f"declined: {reason}")


def x64(case: Case) -> Any:
    """Turns on 64-bit types for a case that needs them."""
    needed = any(init.dtype == "float64" for init in case.arrays.values())
    return jax.enable_x64(True) if needed else contextlib.nullcontext()


@contextlib.contextmanager
def simulated_tpu(**params: Any) -> Iterator[None]:
    """Runs Pallas TPU kernels on the CPU, strictly.

    Memory starts as NaN, "parallel" grid axes are walked in a random order, and a data race in any kernel fails the test.
    """
    races = []

    class Recorded(interpret_pallas_call.RaceDetectionState):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            races.append(self)

    strict = {"uninitialized_memory": "nan", "detect_races": True, "random_seed": 0} | params
    original = interpret_pallas_call.RaceDetectionState
    interpret_pallas_call.RaceDetectionState = Recorded  # type: ignore[misc]
    try:
        with ref_views.readable_views(), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**strict)):
            yield
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    finally:
        interpret_pallas_call.RaceDetectionState = original  # type: ignore[misc]
    assert races, "no kernel ran in the simulator"
    assert not any(state.races_found for state in races)


@contextlib.contextmanager
def garbage_memory() -> Iterator[None]:
    """Fills memory that the C library hands out with 0x7f, huge numbers in every floating dtype, so that a native kernel reads none of it unseen."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc
        yield
        return
    perturb = -6  # M_PERTURB of malloc.h; malloc fills with the complement
    libc.mallopt(perturb, 0x80)
    try:
        yield
    finally:
        libc.mallopt(perturb, 0)


def running(impl: Implementation, **params: Any) -> Any:
    """The context in which an implementation runs on this machine, its unused memory full of what must not be read."""
    if impl.platform == "tpu":
        return simulated_tpu(**params)
    if impl.platform == "cuda":
        from vishwamai.torch.interpret import interpreted

        return interpreted()
    return garbage_memory() if impl.platform == "cpu" else contextlib.nullcontext()


def cotangents_for(case: Case, outputs: Any) -> Any:
    """Random cotangents of the outputs, the same in every process; float0 for integer outputs."""
    rng = np.random.default_rng(zlib.crc32(f"cotangents of {case.name}".encode()))

    def draw(y: Any) -> Any:
        if not jnp.issubdtype(y.dtype, jnp.floating):
            return np.zeros(y.shape, jax.dtypes.float0)
        return rng.standard_normal(y.shape).astype(y.dtype)

    return jax.tree.map(draw, outputs)


@functools.cache
def output_shapes(case: Case) -> Any:
    """Shapes and dtypes of the case's outputs."""
    with x64(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return jax.eval_shape(case.run, case.shapes())


def value_and_gradients(case: Case, **how: Any) -> Any:
    """The function `(arrays, cotangents) -> (outputs, gradients by name)` of a case."""
    names = case.differentiable

    def run(arrays: Mapping[str, Any], cotangents: Any) -> tuple[Any, dict[str, Any]]:
        chosen = {name: arrays[name] for name in names}
        rest = {name: x for name, x in arrays.items() if name not in names}
        outputs, pull = jax.vjp(lambda chosen: case.run({**rest, **chosen}, **how), chosen)
        differentiable = any(jnp.issubdtype(y.dtype, jnp.floating) for y in jax.tree.leaves(outputs))
        return outputs, pull(cotangents)[0] if differentiable and names else {}

    return run


def evaluate(
    case: Case,
    impl: Implementation,
    arrays: Any = None,
    cotangents: Any = None,
    simulation: Mapping[str, Any] | None = None,
    **how: Any,
) -> tuple[Any, dict[str, np.ndarray]]:
    """Outputs and gradients of a case on an implementation, as NumPy arrays."""
    arrays = case.make() if arrays is None else arrays
    cotangents = cotangents_for(case, output_shapes(case)) if cotangents is None else cotangents
    run = value_and_gradients(case, implementation=impl.name, **how)
    with x64(case), running(impl, **(simulation or {})):
        # float0 cotangents are static: an integer output has none that could be traced
        results = jax.jit(lambda arrays: run(arrays, cotangents))(arrays)
        return jax.tree.map(np.asarray, jax.block_until_ready(results))


@functools.lru_cache(maxsize=64)
def truth(case: Case) -> tuple[Any, dict[str, np.ndarray]]:
    """Outputs and gradients of a case in float64, from the oracle."""
    outputs, gradients = oracle.evaluate(case.call, case.make(), case.options, case.differentiable)
    cotangents = cotangents_for(case, output_shapes(case))
    if not case.differentiable or any(c.dtype == jax.dtypes.float0 for c in jax.tree.leaves(cotangents)):
        return outputs, {}
    return outputs, gradients(cotangents)


@functools.lru_cache(maxsize=64)
def by_reference(case: Case) -> tuple[Any, dict[str, np.ndarray]]:
    """Outputs and gradients of a case from the reference implementation, in the case's own dtypes."""
    return evaluate(case, OPERATIONS[case.op].reference)


# --- Errors ----------------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far an array is from the truth: largest and root-mean-square difference."""

    largest: float
    rms: float


def errors(got: np.ndarray, true: np.ndarray) -> Errors:
    """The errors of the finite entries; the others must be equal."""
    assert got.shape == true.shape
    got = got.astype(np.float64)
    finite = np.isfinite(true)
    np.testing.assert_array_equal(got[~finite], true[~finite])
    if not finite.any():
        return Errors(0.0, 0.0)
    difference = np.abs(got[finite] - true[finite])
    return Errors(float(difference.max()), float(np.sqrt((difference**2).mean())))


def magnitude(true: np.ndarray) -> Errors:
    """Largest and root-mean-square magnitude of the finite entries."""
    return errors(np.where(np.isfinite(true), 0.0, true), true)


FLOOR = {2: Errors(2.0, 0.5), 4: Errors(8.0, 2.0), 8: Errors(8.0, 2.0)}
"""By the bytes of the dtype, in units of its eps times the array's own magnitude. In 16 bits the result's own rounding rules: two units in the last
place of the largest entry, and the root mean square of roundings to the nearest (0.29) with some room. In 32 and 64 bits it is the rounding of sums,
which grows with their length and differs with their order."""
CEILING = {2: Errors(8.0, 2.0), 4: Errors(128.0, 32.0), 8: Errors(128.0, 32.0)}
"""The same for the reference itself, which has no other to be compared with."""
FLOOR[1], CEILING[1] = FLOOR[2], CEILING[2]


CANCELLATION = 1 / 4
"""The magnitude of a gradient counts as at least this share of the largest gradient of its case: where a sum cancels (the gradient of one sink, or of a
query with one key, which is 0), rounding is as large as the terms, not as the sum."""


def at_least(size: Errors, group: Errors) -> Errors:
    return Errors(max(size.largest, CANCELLATION * group.largest), max(size.rms, CANCELLATION * group.largest))


def bound(dtype: Any, true: np.ndarray, reference: np.ndarray | None, group: Errors, unit: float) -> Errors:
    """The errors that are allowed: twice the reference's and a floor; for the reference itself (None) a ceiling."""
    unit, size = max(unit, float(jnp.finfo(dtype).eps)), at_least(magnitude(true), group)
    units = (CEILING if reference is None else FLOOR)[np.dtype(dtype).itemsize]
    theirs = Errors(0.0, 0.0) if reference is None else errors(reference, true)
    return Errors(
        2 * theirs.largest + units.largest * unit * size.largest, 2 * theirs.rms + units.rms * unit * size.rms
    )


def check(
    name: str, got: np.ndarray, true: np.ndarray, reference: np.ndarray | None, group: Errors, unit: float = 0.0
) -> None:
    """Asserts that an array is as near the truth as the contract demands; integers must be equal."""
    if not jnp.issubdtype(got.dtype, jnp.floating):
        np.testing.assert_array_equal(got, true, err_msg=name)
        return
    assert not np.isnan(got.astype(np.float64)).any(), f"{name}: NaN"
    allowed, ours = bound(got.dtype, true, reference, group, unit), errors(got, true)
    assert ours.largest <= allowed.largest, f"{name}: largest error {ours.largest:.3g}, allowed {allowed.largest:.3g}"
    if true.size >= 16:  # the mean of fewer errors is no steadier than the largest of them
        assert ours.rms <= allowed.rms, f"{name}: root-mean-square error {ours.rms:.3g}, allowed {allowed.rms:.3g}"


def check_all(got: Any, true: Any, reference: Any, unit: float = 0.0) -> None:
    """`check` of every output and gradient: `got`, `true` and `reference` are pairs (outputs, gradients by name).

    Args:
      unit: least relative rounding unit to allow for, where an implementation has a reason to be coarser than its dtypes.
    """
    for part, what in enumerate(("output", "gradient of ")):
        paths = jax.tree_util.tree_leaves_with_path(got[part])
        trues = jax.tree.leaves(true[part])
        theirs = [None] * len(paths) if reference is None else jax.tree.leaves(reference[part])
        assert len(paths) == len(trues) == len(theirs)
        sizes = [magnitude(x) for x in trues] if what != "output" else []
        group = Errors(max((s.largest for s in sizes), default=0.0), max((s.rms for s in sizes), default=0.0))
        for (path, ours), right, other in zip(paths, trues, theirs, strict=True):
            check(what + jax.tree_util.keystr(path), ours, right, other, group, unit)


def close(got: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Asserts that trees agree entry by entry within `tolerance` of each array's largest entry: for transforms, where the meaning is at stake."""
    got, expected = (jax.tree.map(np.asarray, tree) for tree in (got, expected))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for path, ours in jax.tree_util.tree_leaves_with_path(got):
        theirs = functools.reduce(lambda tree, key: tree[key.key if hasattr(key, "key") else key.idx], path, expected)
        assert ours.dtype == theirs.dtype
        right = np.asarray(theirs, np.float64)
        allowed = tolerance * magnitude(right).largest
        assert errors(ours, right).largest <= allowed, jax.tree_util.keystr(path)
