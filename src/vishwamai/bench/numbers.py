"""Are the numbers right: a part of a result against the reference computed in float64, with the tolerance of the
contract suite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.bench.subject import Sample
from vishwamai.core.errors import FallbackWarning
from vishwamai.measure.tolerance import Errors, bound, errors, largest_of, magnitude, wrong


@dataclasses.dataclass(frozen=True)
class Numbers:
    """How near the truth a result is.

    Attributes:
      right: every error is within what is allowed.
      error, allowed: the largest absolute error of any output, and what the contract allows there (the output that is
        worst in that share).
      detail: which part was looked at; of a wrong result, what is wrong.
    """

    right: bool
    error: float
    allowed: float
    detail: str


@dataclasses.dataclass(frozen=True)
class Truth:
    """The sample's outputs in float64, and the errors that the contract allows each of them."""

    outputs: tuple[np.ndarray, ...]
    allowed: tuple[Errors, ...]
    words: str


def as_tuple(result: object) -> tuple[np.ndarray, ...]:
    """The outputs as NumPy arrays."""
    return tuple(np.asarray(leaf) for leaf in jax.tree.leaves(result))


@contextlib.contextmanager
def with_float64(*arrays: np.ndarray) -> Iterator[None]:
    """Computes on a device that has float64: JAX's own GPU, else the CPU; on the CPU too where arrays are 8-bit
    integers: on an H100 what XLA (jax 0.11.2) made of one product was neither our kernel's result nor torch's, which
    agreed.
    """
    device = jax.devices()[0]
    trusted = device.platform == "gpu" and all(x.dtype != np.int8 for x in arrays)
    with jax.default_device(device if trusted else jax.devices("cpu")[0]):
        yield


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def truth(sample: Sample, gradients: bool = False, unit: float = 0.0) -> Truth:
    """Computes the sample by the reference implementation, in float64 and in its own dtypes, see `with_float64`.

    Args:
      gradients: its results are the gradients of one call.
      unit: least relative rounding unit to allow for.
    """
    options = dict(sample.case.options)
    if "out_dtype" in options and jnp.issubdtype(jnp.dtype(options["out_dtype"]), jnp.floating):
        options["out_dtype"] = "float64"
    exact_case = dataclasses.replace(sample.case, options=options)
    with with_float64(*sample.arrays.values()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        reference = as_tuple(jax.jit(lambda a: sample.case.run(a, implementation="xla"))(sample.arrays))
        with jax.enable_x64(True):
            wide = {name: _wide(x) for name, x in sample.arrays.items()}
            exact = as_tuple(jax.jit(lambda a: exact_case.run(a, implementation="xla"))(wide))
    group = largest_of([magnitude(e) for e in exact] if gradients else [])
    bounds = tuple(bound(r.dtype, e, r, group, unit) for r, e in zip(reference, exact, strict=True))
    return Truth(exact, bounds, sample.words)


def raised(error: Exception) -> Numbers:
    """What is said of a candidate that raised instead of giving a result."""
    first = (str(error).strip() or "nothing said").splitlines()[0]
    return Numbers(False, np.inf, 0.0, f"it raised {type(error).__name__}: {first[:300]}")


def check(outputs: tuple[np.ndarray, ...], sample: Sample, right: Truth, slack: float = 1.0) -> Numbers:
    """Compares the sample's part of a whole result with the truth; `slack` times the contract's errors are allowed."""
    part = sample.pick(outputs)
    if len(part) != len(right.outputs):
        return Numbers(False, np.inf, 0.0, f"{len(part)} outputs instead of {len(right.outputs)}")
    worst = Numbers(True, 0.0, 0.0, right.words)
    for i, (got, true, bounds) in enumerate(zip(part, right.outputs, right.allowed, strict=True)):
        allowed = Errors(slack * bounds.largest, slack * bounds.rms)
        ours = errors(got, true)
        problem = wrong(got, true, allowed, ours)
        if problem is not None:
            return Numbers(False, ours.largest, allowed.largest, f"output {i}, {right.words}: {problem}")
        if worst.allowed == 0 or ours.largest / max(allowed.largest, 1e-300) > worst.error / worst.allowed:
            worst = Numbers(True, ours.largest, allowed.largest, right.words)
    return worst
