"""Bytes of saved residuals: what the backward pass of a function keeps of its forward pass, by tracing alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from vishwamai.core.types import PyTree
from vishwamai.models import ModelConfig
from vishwamai.training.sharding import check_units

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

_MOVES = ("reshape", "transpose", "name", "squeeze", "expand_dims", "copy", "broadcast_in_dim")
"""Primitives whose result holds the numbers of their operand: the compiler keeps one of the two."""

_FUSED = frozenset(
    "abs add add_any and clamp convert_element_type copy cos div eq erf exp exp2 expm1 ge gt integer_pow is_finite le "
    "log log1p logistic lt max min mul ne neg not or pow rsqrt select_n sign sin sqrt square stop_gradient sub "
    "tanh".split()
)
"""Primitives that the compiler fuses with what takes their results."""


def residual_bytes(
    fn: Callable[..., object],
    argument: PyTree,
    *rest: PyTree,
    over: tuple[AbstractMesh, tuple[PyTree, ...]] | None = None,
    fused: bool = False,
) -> int:
    """Bytes that the gradient of `fn(argument, *rest)` by `argument` keeps between its passes on the device, arguments
    and equal arrays apart. Shapes are enough.

    The residuals are those that JAX traces. Of arrays that differ in shape alone, one is counted. Arrays that a loop
    over layers keeps for every layer are counted for each.

    Args:
      over: the mesh and the specs of the arguments with which `fn` runs in a `shard_map`; the bytes are those of one
        device.
      fused: leave out what the compiler need not store where the two passes of a layer follow one another: the results
        of elementwise operations that only such operations take.

    >>> import jax.numpy as jnp
    >>> residual_bytes(lambda x: jnp.sum(jnp.sin(x)), jax.ShapeDtypeStruct((8,), jnp.float32))  # the cosine
    32
    """

    def forward(argument: PyTree, *rest: PyTree) -> list[jax.Array]:
        return jax.tree.leaves(jax.vjp(lambda argument: fn(argument, *rest), argument)[1])

    if over is None:
        jaxpr = jax.make_jaxpr(forward)(argument, *rest).jaxpr
    else:
        mesh, specs = over
        run = jax.shard_map(forward, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        (equation,) = jax.make_jaxpr(run)(argument, *rest).jaxpr.eqns
        jaxpr = equation.params["jaxpr"]
    return _unique(jaxpr, jaxpr.outvars, set(), fused)


def _unique(jaxpr: Jaxpr, variables: Sequence[Var | Literal], ignored: set[int], fused: bool) -> int:
    """Bytes of the arrays behind `variables`, each once, the jaxpr's inputs and `ignored` ones apart."""
    stored = _stored(jaxpr) if fused else None
    producers = {id(v): equation for equation in jaxpr.eqns for v in equation.outvars}
    inputs = {id(v) for v in (*jaxpr.invars, *jaxpr.constvars)}
    seen, total, loops = set(ignored), 0, {}
    for variable in variables:
        if hasattr(variable, "val"):  # a literal
            continue
        root = _root(variable, producers)
        if id(root) in seen or id(root) in inputs:
            continue
        seen.add(id(root))
        equation = producers[id(root)]
        if equation.primitive.name == "scan":
            loops.setdefault(id(equation), (equation, []))[1].append(root)
        elif stored is None or id(root) in stored or not _is_fused(equation):
            total += _nbytes(root.aval)
    return total + sum(_loop(equation, roots, fused) for equation, roots in loops.values())


def _stored(jaxpr: Jaxpr) -> set[int]:
    """The variables that an operation takes which the compiler does not fuse with what made them."""
    stores: set[int] = set()
    for equation in reversed(jaxpr.eqns):
        moves = equation.primitive.name in _MOVES
        if not moves and _is_fused(equation):
            continue
        if not moves or any(id(v) in stores for v in equation.outvars):
            stores |= {id(v) for v in equation.invars}
    return stores


def _is_fused(equation: JaxprEqn) -> bool:
    """Whether an equation is elementwise, or a call of such ones alone."""
    inner = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit") else None
    if inner is None:
        return equation.primitive.name in _FUSED
    return all(
        inner_equation.primitive.name in _MOVES or _is_fused(inner_equation) for inner_equation in inner.jaxpr.eqns
    )


def _loop(equation: JaxprEqn, roots: Sequence[Var | Literal], fused: bool) -> int:
    """Bytes of the results of a scan: its last carry, and what it stacks."""
    body, carried = equation.params["jaxpr"].jaxpr, equation.params["num_carry"]
    root_ids = {id(root) for root in roots}
    final = sum(_nbytes(v.aval) for v in equation.outvars[:carried] if id(v) in root_ids)
    stacked = [inner for v, inner in zip(equation.outvars, body.outvars) if id(v) in root_ids]
    stacked = [inner for inner in stacked if inner not in body.outvars[:carried]]
    producers = {id(v): e for e in body.eqns for v in e.outvars}
    # What one turn hands on and the next keeps as its input is one array.
    constants = equation.params["num_consts"]
    carries_in = body.invars[constants : constants + carried]
    handed = {id(_root(v, producers)) for v in body.outvars[:carried] if not hasattr(v, "val")}
    stacked_ids = {id(v) for v in stacked}
    inputs = sum(_nbytes(v.aval) for v in carries_in if id(v) in stacked_ids)
    return final + equation.params["length"] * (inputs + _unique(body, stacked, handed if inputs else set(), fused))


def _root(variable: Var | Literal, producers: dict[int, JaxprEqn]) -> Var | Literal:
    while True:
        equation = producers.get(id(variable))
        if equation is None or equation.primitive.name not in _MOVES:
            return variable
        source = equation.invars[0]
        if hasattr(source, "val") or _size(source.aval) != _size(variable.aval):
            return variable
        variable = source


def _nbytes(aval: object) -> int:
    """Bytes of the device's memory."""
    return 0 if getattr(aval, "memory_space", None) is jax.memory.Space.Host else _size(aval)


def _size(aval: Any) -> int:
    dtype = aval.dtype
    return math.prod(aval.shape) * (np.dtype(dtype).itemsize if isinstance(dtype, np.dtype) else 4)


def share_of(model: ModelConfig, devices: int) -> ModelConfig:
    """A model with a device's share of what `mesh.tensor` splits.

    >>> model = ModelConfig.from_dict({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    ...     "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64})
    >>> part = share_of(model, 2)
    >>> part.num_heads, part.intermediate_size, part.hidden_size
    (2, 64, 64)
    """
    if devices == 1:
        return model
    check_units("tensor", devices, model)
    experts = model.experts
    if experts is not None and experts.inner_size is not None:
        experts = dataclasses.replace(experts, inner_size=experts.inner_size // devices)
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // devices,
        num_kv_heads=max(model.num_kv_heads // devices, 1),
        intermediate_size=model.intermediate_size // devices,
        vocab_size=model.vocab_size // devices,
        experts=experts,
        layers=tuple(dataclasses.replace(kind, mixer=kind.mixer.part(devices)) for kind in model.layers),
    )
