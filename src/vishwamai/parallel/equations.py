"""The equations of a traced program, run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import closed_call_p, custom_jvp_call_p, custom_vjp_call_p, jit_p, remat_p

_CALLS = {jit_p: "jaxpr", closed_call_p: "call_jaxpr", custom_jvp_call_p: "call_jaxpr", custom_vjp_call_p: "call_jaxpr"}
_CALLS |= {remat_p: "jaxpr"}


def run_equation(eqn: JaxprEqn, values: Sequence[jax.Array], jaxpr: Jaxpr) -> list[jax.Array]:
    """The results of an equation of a program."""
    # a dict: a variable that is read twice is one input
    operands = {v: x for v, x in zip(eqn.invars, values, strict=True) if not isinstance(v, Literal)}
    program = jaxpr.replace(constvars=[], invars=list(operands), outvars=eqn.outvars, eqns=[eqn])
    return jaxpr_as_fun(ClosedJaxpr(program, ()))(*operands.values())


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[jax.Array],
    args: Sequence[jax.Array],
    run: Callable[[JaxprEqn, Sequence[jax.Array], Jaxpr], list[jax.Array]] = run_equation,
    remat: bool = False,
) -> list[jax.Array]:
    """The results of a program, with the equations of the functions that it calls in place of the calls.

    Args:
      jaxpr: the program. consts, args: its inputs.
      run: gives the results of an equation, as `run_equation`.
      remat: bool, True where the recomputation of the backward pass stays apart from the forward pass.
    """
    values: dict[Var, jax.Array] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(v: Var | Literal) -> jax.Array:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive in _CALLS:
            if remat and eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                # or XLA would merge the recomputation with the forward pass, and keep its values
                operands = jax.lax.optimization_barrier(operands)
            inner = eqn.params[_CALLS[eqn.primitive]]
            closed = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
            results = evaluate(*closed, operands, run, remat)
        else:
            results = run(eqn, operands, jaxpr)
        values.update(zip(eqn.outvars, results, strict=True))  # unused results go to variables that nothing reads
    return [read(v) for v in jaxpr.outvars]
