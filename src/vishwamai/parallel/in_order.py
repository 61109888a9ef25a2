"""Collectives in one order on all devices, where JAX's processes talk over Gloo on CPUs.

Gloo tells the messages of one collective from those of the next by their order alone. XLA's CPU runtime starts the
collectives of a level in the order of the program, but goes on from a loop or a conditional when it has started: what
comes after may be sent before the collectives inside. Then two processes wait for each other, or take one array for
another (jaxlib 0.10.2: `ThunkExecutor` counts a communicator as a scheduling edge). Here each of them gets an operand
that needs the result of the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import cond_p, scan_p

from vishwamai.core.config import local_platform
from vishwamai.core.types import PyTree
from vishwamai.parallel.equations import evaluate, run_equation

F = TypeVar("F", bound=Callable[..., Any])
_COLLECTIVES = (
    *("all_gather", "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute", "precv", "psend", "psum"),
    *("ragged_all_to_all", "reduce_scatter", "unreduced"),
)
"""How the names of JAX's collectives begin."""


def among_processes(function: F) -> F:
    """`in_order(function)` where several processes talk over Gloo, otherwise the function."""
    return in_order(function) if jax.process_count() > 1 and local_platform() == "cpu" else function


def in_order(function: F) -> F:
    """A function for use inside `shard_map` whose collectives begin one after the other, in the order written.

    Its values are those of `function`, whose gradient has been taken where one is needed.

    >>> f = jax.vmap(in_order(lambda x: jax.lax.psum(x, "i") + jax.lax.pmax(x, "i")), axis_name="i")
    >>> f(jnp.arange(3.0))
    Array([5., 5., 5.], dtype=float32)
    """

    @functools.wraps(function)
    def ordered(*args: object, **kwargs: object) -> PyTree:
        values, tree = jax.tree.flatten((args, kwargs))

        def flat(*values: jax.Array) -> PyTree:
            args, kwargs = jax.tree.unflatten(tree, values)
            return function(*args, **kwargs)

        program, shape = jax.make_jaxpr(flat, return_shape=True)(*values)
        results = evaluate(program.jaxpr, program.consts, values, _Order().run, remat=True)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return ordered  # pyright: ignore[reportReturnType]


class _Order:
    """The collectives of a level: each needs the one before."""

    def __init__(self) -> None:
        self.mark: jax.Array | None = None

    def run(self, eqn: JaxprEqn, values: Sequence[jax.Array], jaxpr: Jaxpr) -> list[jax.Array]:
        """The results of an equation."""
        if not _talks(eqn):
            return run_equation(eqn, values, jaxpr)
        params, needs = eqn.params, range(len(values))
        if eqn.primitive is scan_p and params["num_carry"]:  # what a loop changes
            needs = range(params["num_consts"], params["num_consts"] + params["num_carry"])
        elif eqn.primitive is cond_p:
            needs = (0,)  # the index: no branch can begin before it is known
        needing = {eqn.invars[i] for i in needs if not isinstance(eqn.invars[i], Literal)}
        values = [
            _after(self.mark, x) if not isinstance(v, Literal) and v in needing else x
            for v, x in zip(eqn.invars, values, strict=True)
        ]
        results = run_equation(eqn.replace(params={n: _in_parameter(p) for n, p in params.items()}), values, jaxpr)
        self.mark = _marked(results)
        return results


def _talks(eqn: JaxprEqn) -> bool:
    """Whether an equation is a collective or has one inside."""
    inner = (program for value in eqn.params.values() for program in _programs(value))
    return eqn.primitive.name.startswith(_COLLECTIVES) or any(
        any(map(_talks, inner_program.eqns)) for inner_program in inner
    )


def _programs(value: object) -> Iterator[Jaxpr]:
    for entry in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(entry, (Jaxpr, ClosedJaxpr)):
            yield entry.jaxpr if isinstance(entry, ClosedJaxpr) else entry


def _in_parameter(value: Any) -> object:
    """A parameter of an equation, with its inner programs in order."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_in_parameter, value)) if any(_programs(value)) else value
    if not any(any(map(_talks, inner.eqns)) for inner in _programs(value)):
        return value
    inner, consts = (value.jaxpr, value.consts) if isinstance(value, ClosedJaxpr) else (value, ())

    def body(*args: jax.Array) -> list[jax.Array]:
        return evaluate(inner, consts, args, _Order().run, remat=True)

    traced = jax.make_jaxpr(body)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.invars))
    return traced if isinstance(value, ClosedJaxpr) else traced.jaxpr


def _marked(results: Sequence[jax.Array]) -> jax.Array | None:
    """An int32 zero that needs the values, which XLA does not see to be one."""
    # one element of each result: enough to wait for all of it
    firsts = [jnp.ravel(x)[0].astype(jnp.int32) for x in results if _is_plain(x)]
    # a bit shifted out is 0, which XLA's simplifier would have to prove
    return functools.reduce(jnp.bitwise_or, [first & 1 for first in firsts]) >> 1 if firsts else None


def _after(mark: jax.Array | None, value: jax.Array) -> jax.Array:
    """The value, which needs the mark."""
    if mark is None or not _is_plain(value):
        return value
    return jax.lax.select(jnp.broadcast_to(mark == 0, jnp.shape(value)), value, jnp.zeros_like(value))


def _is_plain(value: jax.Array) -> bool:
    return jnp.size(value) > 0 and not jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
