"""The backward pass of a part as two functions: the gradient of its input, and later the gradient of its weights.

The backward pass is traced once. The equations that the input gradient needs make the first function, all others the
second. What the second reads of the first is kept between them, so nothing is computed twice. An equation that gives
both at once (a `scan` over layers, or one kernel for both gradients) belongs to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from vishwamai.core.arguments import described
from vishwamai.core.errors import ShapeError
from vishwamai.core.types import PyTree
from vishwamai.parallel.equations import evaluate


class SplitPart(NamedTuple):
    """A part in three functions.

    Attributes:
      forward: `(params, x, *extras) -> (y, residuals)`, or `((y, seen), residuals)`.
      input_gradient: `(params, residuals, dy, *extras) -> (dx, between)`.
      weight_gradient: `(params, residuals, between, *extras) -> dparams`.
      residuals: types of what the backward pass needs of the forward pass, without what the parameters and `extras`
        give.
      between: types of what the weight gradient needs of the input gradient.
    """

    forward: Callable[..., tuple[PyTree, list[jax.Array]]]
    input_gradient: Callable[..., tuple[jax.Array, list[jax.Array]]]
    weight_gradient: Callable[..., PyTree]
    residuals: list[Any]
    between: list[Any]


def split_part(
    part: Callable[..., PyTree], params: PyTree, x: jax.Array, *extras: PyTree, sees: bool = False
) -> SplitPart:
    """Traces `y = part(params, x, *extras)` and takes its backward pass apart.

    Args:
      part: `y` has the shape and dtype of `x`.
      params: pytree of floating arrays, or their types. x: `[rows, ...]`, floating.
      extras: pytrees of arrays without a gradient, such as positions; each function takes them last.
      sees: `part` gives `(y, seen)`, of which `seen` is a pytree without a gradient, such as counts.

    Raises:
      ShapeError: `y` is another array, or a parameter is not floating.

    >>> split = split_part(lambda w, x: jnp.tanh(x @ w), jnp.ones((3, 3)), jnp.ones((2, 3)))
    >>> y, residuals = split.forward(jnp.ones((3, 3)), jnp.ones((2, 3)))
    >>> dx, between = split.input_gradient(jnp.ones((3, 3)), residuals, jnp.ones((2, 3)))
    >>> split.weight_gradient(jnp.ones((3, 3)), residuals, between).shape
    (3, 3)
    """
    types, tree = jax.tree.flatten(params)
    for leaf in [*types, x]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ShapeError(f"pipeline: a parameter or an input is {described(leaf)}; pass floating arrays.")
    pulled: Any = None

    def with_residuals(params: PyTree, x: jax.Array, *extras: PyTree) -> tuple[jax.Array, PyTree]:
        return part(params, x, *extras) if sees else (part(params, x, *extras), ())

    def run(
        leaves: list[jax.Array], x: jax.Array, extras: PyTree
    ) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        nonlocal pulled
        y, pull, seen = jax.vjp(
            lambda leaves, x: with_residuals(jax.tree.unflatten(tree, leaves), x, *extras), leaves, x, has_aux=True
        )
        residuals, pulled = jax.tree.flatten(pull)  # the vjp function is a pytree: its leaves are the residuals
        return y, jax.tree.leaves(seen), residuals

    # The forward pass, whose results are y, what `part` reports, and the residuals of its backward pass.
    traced = jax.make_jaxpr(run)(types, x, extras)
    out = traced.out_avals[0]
    of_y, of_seen = jax.eval_shape(with_residuals, params, x, *extras)
    seen_leaves, seen_tree = jax.tree.flatten(of_seen)
    ends = 1 + len(seen_leaves)
    if len(jax.tree.leaves(of_y)) != 1 or (out.shape, out.dtype) != (
        x.shape,
        x.dtype,
    ):
        raise ShapeError(
            f"pipeline: a part takes {x.dtype}{list(x.shape)} and gives {out.dtype}{list(out.shape)}; every part must "
            "give one array of the shape and dtype that it takes."
        )
    forward = _inlined(traced)  # calls opened: an equation of a `jit` would hide which of its values need x
    entry = forward.jaxpr.invars[len(types)]
    of_x = _depends(forward.jaxpr, entry)
    residuals = forward.jaxpr.outvars[ends:]
    # Only residuals that depend on x are kept for each microbatch; those of parameters and extras are computed again.
    saved = list(dict.fromkeys(v for v in residuals if not isinstance(v, Literal) and v in of_x))
    run_forward = _function(forward, forward.jaxpr.invars, [*forward.jaxpr.outvars[:ends], *saved])
    of_params = [i for i, v in enumerate(residuals) if isinstance(v, Literal) or v not in of_x]
    others = [v for v in forward.jaxpr.invars if v is not entry]
    # Residuals without x are the same for every microbatch: kept once each, they would fill a buffer with copies.
    run_params = _function(forward, others, [residuals[i] for i in of_params])

    def pull(residuals: list[jax.Array], dy: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return jax.tree.unflatten(pulled, residuals)(dy)

    # traced once; both functions are parts of this program
    back = _inlined(jax.make_jaxpr(pull)([v.aval for v in residuals], out))
    *in_residuals, in_dy = back.jaxpr.invars
    *out_params, out_x = back.jaxpr.outvars
    # dx first, because the stage before waits for it; the gradients of parameters fill steps that would be idle.
    first = _needed(back.jaxpr, [out_x])
    second = [i for i in _needed(back.jaxpr, out_params) if i not in set(first)]  # what both need belongs to the first
    computed = {v for i in first for v in back.jaxpr.eqns[i].outvars} | {in_dy}
    read = [v for i in second for v in back.jaxpr.eqns[i].invars] + list(out_params)
    # What the second part reads of the first is kept until then, and not computed twice.
    between = list(dict.fromkeys(v for v in read if not isinstance(v, Literal) and v in computed))
    run_first = _function(back, [*in_residuals, in_dy], [out_x, *between], first)
    run_second = _function(back, [*in_residuals, *between], out_params, second)

    def parameter_gradients(
        params: PyTree, residual_values: Sequence[object], extras: tuple[PyTree, ...]
    ) -> list[object]:
        values_of = dict(zip(saved, residual_values, strict=True))
        values = [None if isinstance(v, Literal) else values_of.get(v) for v in residuals]
        for i, value in zip(of_params, run_params(*jax.tree.leaves((params, extras))), strict=True):
            values[i] = value
        return values

    def run_part(params: PyTree, x: jax.Array, *extras: PyTree) -> tuple[PyTree, list[jax.Array]]:
        y, *outputs = run_forward(*jax.tree.leaves(params), x, *jax.tree.leaves(extras))
        seen = jax.tree.unflatten(seen_tree, outputs[: ends - 1])
        return (y, seen) if sees else y, outputs[ends - 1 :]

    def input_gradient(
        params: PyTree, residual_values: Sequence[object], dy: jax.Array, *extras: PyTree
    ) -> tuple[jax.Array, list[jax.Array]]:
        dx, *values = run_first(*parameter_gradients(params, residual_values, extras), dy)
        return dx, values

    def weight_gradient(
        params: PyTree, residual_values: Sequence[object], values: Sequence[object], *extras: PyTree
    ) -> PyTree:
        return jax.tree.unflatten(tree, run_second(*parameter_gradients(params, residual_values, extras), *values))

    return SplitPart(run_part, input_gradient, weight_gradient, [v.aval for v in saved], [v.aval for v in between])


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    return jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def _depends(jaxpr: Jaxpr, source: Var) -> set[object]:
    """The values that depend on `source`, and itself."""
    dependent: set[object] = {source}
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in dependent for v in eqn.invars):
            dependent.update(eqn.outvars)
    return dependent


def _needed(jaxpr: Jaxpr, outs: Sequence[object]) -> list[int]:
    """The equations, by number, that `outs` need."""
    variables = {v for v in outs if not isinstance(v, Literal)}
    indices = []
    for i in reversed(range(len(jaxpr.eqns))):  # backwards: a value is asked for before its equation is met
        eqn = jaxpr.eqns[i]
        if any(v in variables for v in eqn.outvars):
            indices.append(i)
            variables.update(v for v in eqn.invars if not isinstance(v, Literal))
    return indices[::-1]


def _function(
    closed: ClosedJaxpr, invars: Sequence[object], outvars: Sequence[object], equations: Sequence[int] | None = None
) -> Callable[..., list[jax.Array]]:
    """The function from some values of a jaxpr to others, by the equations extras, or by those that it needs."""
    jaxpr = closed.jaxpr
    numbers = _needed(jaxpr, outvars) if equations is None else equations
    inner = jaxpr.replace(
        invars=list(invars),
        outvars=list(outvars),
        eqns=[jaxpr.eqns[i] for i in numbers],  # in the order of the program, which is one that runs
    )
    return jaxpr_as_fun(ClosedJaxpr(inner, closed.consts))
