"""What the contract suite shares: the operations and their cases, one way to run a case on any implementation, one
measure of its error.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import oracle
import ref_views
import rotation
from jax_inside import simulator
from vishwamai.core import ffi
from vishwamai.core.cases import Case
from vishwamai.core.errors import FallbackWarning, UnsupportedError
from vishwamai.core.observe import record_plans
from vishwamai.core.op import Implementation, Op
from vishwamai.core.target import Target
from vishwamai.measure import tolerance
from vishwamai.measure.tolerance import Errors, errors, magnitude
from vishwamai.ops import catalogue

OPERATIONS = {
    name: dataclasses.replace(operation, cases=operation.tagged("contract"))
    for name, operation in catalogue.operations().items()
}
"""Every operation by name, with the cases that all its implementations run."""


def label(case: Case) -> str:
    """A case's name as a test id."""
    return re.sub(r"[^\w.+=-]+", "_", case.name).strip("_")


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter is chosen for a whole process: one that was started with it tests the Triton kernels and nothing
else (`make test-gpu`).
"""
TRITON = INTERPRETED or os.environ.get("TRITON_ON_GPU") == "1"
"""A process that tests the Triton kernels and nothing else: interpreted, or on a GPU (`make test-on-gpu`)."""


def pairs() -> Iterator[tuple[Op, Implementation]]:
    """Every op with every implementation that runs or is simulated on a CPU."""
    platforms = ("cuda",) if TRITON else (None, "cpu", "tpu")
    for operation in OPERATIONS.values():
        for impl in operation.op.implementations:
            if impl.platform in platforms:
                yield operation.op, impl


# One in so many of an implementation's cases runs by default. Kernels that are simulated or interpreted are slow.
SHARES = {None: 4, "cpu": 4, "tpu": 12, "cuda": 12}


def by_default(op: Op, impl: Implementation) -> frozenset[str]:
    """Names of the cases that an implementation runs by default."""
    operation = OPERATIONS[op.name]
    declined = operation.facts.declines.get(impl.name, {})
    return rotation.share(operation.cases, declined, SHARES[impl.platform])


def triples() -> list[Any]:
    """op x implementation x contract case that it serves, as pytest parameters.

    All implementations of a case stand in a row, the reference first, so a case's oracle and reference are computed
    once, and remembered while its other implementations are compared with them.
    """
    chosen = {(op.name, impl.name): by_default(op, impl) for op, impl in pairs()}
    return [
        pytest.param(
            operation.op,
            impl,
            case,
            id=f"{name}-{label(case)}-{impl.name}",
            marks=rotation.marks(case.name in chosen[name, impl.name]),
        )
        for name, operation in OPERATIONS.items()
        for case in operation.cases
        for impl in reversed([impl for of, impl in pairs() if of is operation.op])
        if case.name not in operation.facts.declines.get(impl.name, {})
    ]


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


def declines(impl: Implementation, case: Case, target: Target | None = None) -> str | None:
    """The implementation's reason not to serve the case on `target` (default: its own platform, built on this machine),
    or None.
    """
    return impl.why_not(case_spec(case), target or Target(impl.platform or "cpu", local=True))


def skip_if_declined(impl: Implementation, case: Case) -> None:
    """Passes over a case that the implementation declines; test_contract.py::test_declines knows each by name."""
    skip_unless_built(impl)
    if reason := declines(impl, case):
        pytest.skip(f"declined: {reason}")


def declined(impl: Implementation, case: Case) -> bool:
    """Whether the implementation declines the case; the call then raises its reason. Passes over kernels that are not
    built.
    """
    skip_unless_built(impl)
    reason = declines(impl, case)
    if reason:
        with pytest.raises(UnsupportedError, match=re.escape(reason)):
            evaluate(case, impl)
    return bool(reason)


def x64(case: Case) -> Any:
    """Turns on 64-bit types for a case that needs them."""
    needed = any(init.dtype == "float64" for init in case.arrays.values())
    return jax.enable_x64(True) if needed else contextlib.nullcontext()


@contextlib.contextmanager
def simulated_tpu(**params: Any) -> Iterator[None]:
    """Runs Pallas TPU kernels on the CPU, strictly.

    Memory starts as NaN, "parallel" grid axes are walked in a random order, and a data race in any kernel fails the
    test.
    """
    races = []

    class Recorded(simulator.RaceDetectionState):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            races.append(self)

    strict = {"uninitialized_memory": "nan", "detect_races": True, "random_seed": 0} | params
    original = simulator.RaceDetectionState
    simulator.RaceDetectionState = Recorded  # type: ignore[misc]
    try:
        with ref_views.readable_views(), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**strict)):
            yield
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    finally:
        simulator.RaceDetectionState = original  # type: ignore[misc]
    assert races, "no kernel ran in the simulator"
    assert not any(state.races_found for state in races), "a kernel races: races_found"


@contextlib.contextmanager
def garbage_memory() -> Iterator[None]:
    """Fills memory that the C library hands out with 0x7f, huge numbers in every floating dtype, so that a native
    kernel reads none of it unseen.
    """
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
        from triton_kernels import triton_serves

        return triton_serves()
    return garbage_memory() if impl.platform == "cpu" else contextlib.nullcontext()


def on_its_device(impl: Implementation) -> Any:
    """JAX's default device where it is the implementation's own; else the CPU, which also serves as the reference where
    the default device is a GPU.
    """
    own = impl.platform == "cuda" or jax.default_backend() == "cpu"
    return contextlib.nullcontext() if own else jax.default_device(jax.devices("cpu")[0])


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
        reference = OPERATIONS[case.op].reference.name  # the others' kernels would be traced for nothing
        return jax.eval_shape(lambda arrays: case.run(arrays, implementation=reference), case.shapes())


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
    with x64(case), running(impl, **(simulation or {})), on_its_device(impl):
        if cotangents is None:
            program = _program(case, impl.name, tuple((simulation or {}).items()), tuple(how.items()))
        else:
            program = _with_cotangents(case, impl.name, cotangents, how)
        return jax.tree.map(np.asarray, jax.block_until_ready(program(arrays)))


def _with_cotangents(case: Case, implementation: str, cotangents: Any, how: Mapping[str, Any]) -> Any:
    run = value_and_gradients(case, implementation=implementation, **how)
    # float0 is static: an integer output has none to be traced
    return jax.jit(lambda arrays: run(arrays, cotangents))


@functools.lru_cache(maxsize=32)
def _program(case: Case, implementation: str, simulation: Any, how: tuple[tuple[str, Any], ...]) -> Any:
    """The program of a case with its own cotangents: compiled once, whatever the arrays."""
    del simulation  # a part of what is traced
    return _with_cotangents(case, implementation, cotangents_for(case, output_shapes(case)), dict(how))


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


def check(
    name: str, got: np.ndarray, true: np.ndarray, reference: np.ndarray | None, group: Errors, unit: float = 0.0
) -> None:
    """Asserts that an array is as near the truth as the contract demands (`vishwamai.measure.tolerance`); integers must
    be equal.
    """
    problem = tolerance.wrong(got, true, tolerance.bound(got.dtype, true, reference, group, unit))
    assert problem is None, f"{name}: {problem}"


def check_all(got: Any, true: Any, reference: Any, unit: float = 0.0) -> None:
    """`check` of every output and gradient: `got`, `true` and `reference` are pairs (outputs, gradients by name).

    Args:
      unit: least relative rounding unit to allow for, where an implementation has a reason to be coarser than its
        dtypes.
    """
    for part, what in enumerate(("output", "gradient of ")):
        paths = jax.tree_util.tree_leaves_with_path(got[part])
        trues = jax.tree.leaves(true[part])
        theirs = [None] * len(paths) if reference is None else jax.tree.leaves(reference[part])
        assert len(paths) == len(trues) == len(theirs)
        group = tolerance.largest_of([magnitude(x) for x in trues] if what != "output" else [])
        for (path, ours), right, other in zip(paths, trues, theirs, strict=True):
            check(what + jax.tree_util.keystr(path), ours, right, other, group, unit)


def close(got: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Asserts that trees agree entry by entry within `tolerance` of each array's largest entry: for transforms, where
    the meaning is at stake.
    """
    got, expected = (jax.tree.map(np.asarray, tree) for tree in (got, expected))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for path, ours in jax.tree_util.tree_leaves_with_path(got):
        theirs = functools.reduce(lambda tree, key: tree[key.key if hasattr(key, "key") else key.idx], path, expected)
        assert ours.dtype == theirs.dtype
        right = np.asarray(theirs, np.float64)
        allowed = tolerance * magnitude(right).largest
        assert errors(ours, right).largest <= allowed, jax.tree_util.keystr(path)
