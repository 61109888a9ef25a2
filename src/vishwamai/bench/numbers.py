"""Are the numbers right: a part of a result against the reference computed in float64, with the tolerance of the contract suite.

An implementation may err twice as much as the reference does in the same dtype, plus a floor: two units in the last place of the largest entry, and half
a unit in the root mean square. What is not finite must be equal, and integers must be exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.bench.subject import Sample
from vishwamai.core.errors import FallbackWarning

_FLOOR_LARGEST, _FLOOR_RMS = 2.0, 0.5


@dataclasses.dataclass(frozen=True)
class Numbers:
    """How near the truth a result is.

    Attributes:
      right: every error is within what is allowed.
      error, allowed: the largest absolute error of any output, and what the contract allows there (the output that is worst in that share).
      what: which part was looked at; of a wrong result, what is wrong.
    """

    right: bool
    error: float
    allowed: float
    what: str


@dataclasses.dataclass(frozen=True)
class Truth:
    """The sample's outputs in float64, and what errors of theirs the contract allows: (largest, root mean square) for each."""

    outputs: tuple[np.ndarray, ...]
    allowed: tuple[tuple[float, float], ...]
    words: str


def as_tuple(result: Any) -> tuple[np.ndarray, ...]:
    """The outputs as NumPy arrays."""
    return tuple(np.asarray(leaf) for leaf in jax.tree.leaves(result))


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Computes on the CPU, which has float64, whatever the default device is."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _errors(got: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """(largest, root-mean-square) difference; infinite where a NaN, an infinity or an integer differs."""
    if got.shape != true.shape:
        return np.inf, np.inf
    got = np.asarray(got, np.float64)
    finite = np.isfinite(true)
    if not np.array_equal(got[~finite], true[~finite]) or not np.isfinite(got[finite]).all():
        return np.inf, np.inf
    difference = np.abs(got[finite] - true[finite])
    return (float(difference.max()), float(np.sqrt(np.mean(difference**2)))) if difference.size else (0.0, 0.0)


def _bound(dtype: Any, true: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0, 0.0
    unit = float(jnp.finfo(dtype).eps)
    size = np.abs(true[np.isfinite(true)])
    largest, rms = (float(size.max()), float(np.sqrt(np.mean(size**2)))) if size.size else (0.0, 0.0)
    theirs = _errors(reference, true)
    return 2 * theirs[0] + _FLOOR_LARGEST * unit * largest, 2 * theirs[1] + _FLOOR_RMS * unit * rms


def truth(sample: Sample) -> Truth:
    """Computes the sample by the reference implementation, in float64 and in its own dtypes, on the CPU."""
    options = dict(sample.case.options)
    if "out_dtype" in options and jnp.issubdtype(jnp.dtype(options["out_dtype"]), jnp.floating):
        options["out_dtype"] = "float64"
    exact_case = dataclasses.replace(sample.case, options=options)
    with on_host(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        reference = as_tuple(jax.jit(lambda a: sample.case.run(a, implementation="xla"))(sample.arrays))
        with jax.enable_x64(True):
            wide = {name: _wide(x) for name, x in sample.arrays.items()}
            exact = as_tuple(jax.jit(lambda a: exact_case.run(a, implementation="xla"))(wide))
    bounds = tuple(_bound(r.dtype, e, r) for r, e in zip(reference, exact, strict=True))
    return Truth(exact, bounds, sample.words)


def raised(error: Exception) -> Numbers:
    """What is said of a candidate that raised instead of giving a result."""
    first = (str(error).strip() or "nothing said").splitlines()[0]
    return Numbers(False, np.inf, 0.0, f"it raised {type(error).__name__}: {first[:300]}")


def check(outputs: tuple[np.ndarray, ...], sample: Sample, right: Truth) -> Numbers:
    """Compares the sample's part of a whole result with the truth."""
    part = sample.pick(outputs)
    if len(part) != len(right.outputs):
        return Numbers(False, np.inf, 0.0, f"{len(part)} outputs instead of {len(right.outputs)}")
    worst = Numbers(True, 0.0, 0.0, right.words)
    for i, (got, true, (largest, rms)) in enumerate(zip(part, right.outputs, right.allowed, strict=True)):
        errors = _errors(got, true)
        if errors[0] > largest or errors[1] > rms:
            what = f"output {i}, {right.words}: largest error {errors[0]:.3g} (allowed {largest:.3g}), root mean square {errors[1]:.3g} (allowed {rms:.3g})"
            return Numbers(False, errors[0], largest, what)
        if worst.allowed == 0 or errors[0] / max(largest, 1e-300) > worst.error / worst.allowed:
            worst = Numbers(True, errors[0], largest, right.words)
    return worst
