"""Floating-point operations of a traced program: of its products, and of our operations as they count themselves.

XLA's own count lacks what kernels compute and takes a loop's body once. So the traced program is counted: a product of
JAX by its shapes, a pass of an operation by its spec, a loop as often as it runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from jax.extend.core import jaxprs_in_params

from vishwamai.core.types import PyTree
from vishwamai.measure.measurement import compute_dtype, pass_flops
from vishwamai.measure.peaks import Peaks
from vishwamai.measure.profiling import pass_of, trace_passes


@dataclasses.dataclass(frozen=True)
class ProgramFlops:
    """FLOP of a program, on all its devices together.

    Attributes:
      by_dtype: FLOP by the dtype whose peak counts; a multiply-add is two.
      unknown_loops: loops whose number of turns is not known; their body is counted once.
    """

    by_dtype: dict[str, float]
    unknown_loops: int = 0

    @property
    def total(self) -> float:
        """The sum over the dtypes."""
        return sum(self.by_dtype.values())

    def seconds(self, peaks: Peaks) -> float | None:
        """What they take at the peak of one device; None where a peak is not known."""
        rates = {dtype: peaks.flops(dtype) for dtype in self.by_dtype}
        return (
            sum(self.by_dtype[dtype] / rate for dtype, rate in rates.items() if rate) if all(rates.values()) else None
        )


def program_flops(function: Callable[..., object], *arguments: object) -> ProgramFlops:
    """The FLOP of `function(*arguments)`, by tracing it; shapes are enough.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    >>> program_flops(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y @ x.T @ x, x), x).by_dtype
    {'float32': 12288.0}
    """
    counts: dict[str, float] = defaultdict(float)
    loops = _count(trace_passes(function, *arguments).jaxpr, 1.0, counts)
    return ProgramFlops({dtype: flops for dtype, flops in counts.items() if flops}, loops)


def _count(jaxpr: Any, times: float, totals: dict[str, float]) -> int:
    """Adds the FLOP of a jaxpr that runs `times` times; the loops in it whose turns are not known."""
    unknown = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        ours = pass_of(equation)
        if ours is not None:
            totals[compute_dtype(ours[0])] += times * (pass_flops(*ours) or 0)
        elif name in _PRODUCTS:
            wider = max((v.aval.dtype for v in equation.invars[:2]), key=lambda dtype: dtype.itemsize)
            totals[wider.name] += times * 2.0 * _PRODUCTS[name](equation)
        elif name == "pallas_call" and params.get("cost_estimate") is not None:
            totals[equation.outvars[0].aval.dtype.name] += times * params["cost_estimate"].flops
        elif name == "cond":
            branches: list[dict[str, float]] = [defaultdict(float) for _ in params["branches"]]
            unknown += max(_count(branch.jaxpr, times, counts) for branch, counts in zip(params["branches"], branches))
            for dtype, flops in max(branches, key=lambda counts: sum(counts.values())).items():
                totals[dtype] += flops
        else:
            unknown += name == "while"
            for inner in jaxprs_in_params(params):
                unknown += _count(inner, times * _turns(name, params), totals)
    return unknown


def _turns(name: str, params: dict[str, PyTree]) -> float:
    """How often what an equation holds runs."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return params["mesh"].size
    return math.prod(params["grid_mapping"].grid) if name == "pallas_call" else 1


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs = equation.invars[0].aval.shape
    return math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracted)


def _convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / max(features, 1)


def _ragged(equation: Any) -> float:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    lhs, groups = equation.invars[0].aval.shape, equation.invars[2].aval.shape[-1]
    # A ragged axis that is summed over is split among the groups, each with a result of its own.
    shared = groups if numbers.lhs_ragged_dimensions[0] in contracted else 1
    return math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracted) / max(shared, 1)


_PRODUCTS: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged,
}
"""Multiply-adds of JAX's products."""
