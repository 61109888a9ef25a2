"""The equations of a traced program, run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.extend.core.primitives import closed_call_p, custom_jvp_call_p, custom_vjp_call_p, jit_p, remat_p

_CALLS = {jit_p: "jaxpr", closed_call_p: "call_jaxpr", custom_jvp_call_p: "call_jaxpr", custom_vjp_call_p: "call_jaxpr"}
_CALLS |= {remat_p: "jaxpr"}


def run_equation(eqn: Any, values: Sequence[Any], jaxpr: Jaxpr) -> list[Any]:
    """The results of an equation of a program."""
    operands = {v: x for v, x in zip(eqn.invars, values, strict=True) if not isinstance(v, Literal)}
    program = jaxpr.replace(constvars=[], invars=list(operands), outvars=eqn.outvars, eqns=[eqn])
    return jaxpr_as_fun(ClosedJaxpr(program, ()))(*operands.values())


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    run: Callable[[Any, Sequence[Any], Jaxpr], list[Any]] = run_equation,
    remat: bool = False,
) -> list[Any]:
    """The results of a program, with the equations of the functions that it calls in place of the calls.

    Args:
      jaxpr: the program. consts, args: its inputs.
      run: gives the results of an equation, as `run_equation`.
      remat: bool, True where the recomputation of the backward pass stays apart from the forward pass.
    """
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive in _CALLS:
            if remat and eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                operands = jax.lax.optimization_barrier(operands)
            inner = eqn.params[_CALLS[eqn.primitive]]
            closed = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
            results = evaluate(*closed, operands, run, remat)
        else:
            results = run(eqn, operands, jaxpr)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]
