"""Runs a plan through four layers, outermost first.

1. `jax.custom_vjp`: any forward pairs with any backward, because the residuals belong to the op. It must be outermost:
   inside `lax.platform_dependent` the residuals of *every* branch, the reference's score matrix among them, would leak
   into the program.
2. `custom_vmap`: a mapped axis is folded into the leading batch axis that every operand has (size B, or 1 where it is
   shared).
3. `lax.platform_dependent`: the branch is picked while lowering, so the same traced function lowers for tpu, cuda and
   cpu. It traces every branch. Where the platform is known before, `only_for` leaves the others out.
4. `core.sharding.partitioned`: XLA's partitioner is made to follow the op's factor rule (CPU and GPU kernels; see
   `core.sharding`); libtpu has no such hook, so TPU kernels become a `shard_map` (`core.automatic_axes`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from vishwamai.core import automatic_axes, observe, sharding
from vishwamai.core.call_plan import CallPlan, Choice
from vishwamai.core.config import local_platform
from vishwamai.core.gradients import autodiff_backward, is_float, map_fields
from vishwamai.core.promotion import by_default
from vishwamai.core.types import AnyArray, PyTree

_ONLY = jax.make_user_context(default_value=None)


def only_for(platform: str | None) -> contextlib.AbstractContextManager[object]:
    """In the `with` block, kernels are traced for `platform` ("tpu", "cuda", "rocm" or "cpu") alone; None: for all.

    For a caller that compiles what it traces, for devices that it knows. Lowered for another platform, such a program
    would hold kernels that are not of it. The value is part of the key of JAX's trace caches, and plans stay as they
    are: observers see the choice for every platform.
    """
    return _ONLY(platform)


def platform_of(arrays: PyTree) -> str | None:
    """The platform for `only_for` of a program whose arguments are `arrays`; None if they do not say it: none of them
    is on a device, or one is on another platform than JAX's default. Shapes may lie on TPUs that libtpu describes.
    """
    leaves = jax.tree.leaves(arrays)
    platforms = {
        device.platform
        for x in leaves
        if isinstance(x, jax.Array) and not isinstance(x, Tracer)
        for device in x.devices()
    }
    if platforms:
        return local_platform() if platforms == {jax.default_backend()} else None
    shardings = {x.sharding for x in leaves if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None}
    described = {device.platform for sharding in shardings for device in sharding.device_set}
    return "tpu" if described == {"tpu"} else None


def _replan(plan: CallPlan, operands: object) -> CallPlan:
    """The plan for operands of other sizes, with the same requests of the caller."""
    return plan.op.plan(plan.spec.localize(operands), config=plan.config, implementation=plan.implementation)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def run(plan: CallPlan, operands: PyTree) -> PyTree:
    """The outputs of `plan` for `operands`, differentiable."""
    only = plan.choices[-1].implementation
    if plan.implementation is not None and only.autodiff:
        return only.forward(plan.spec, plan.choices[-1].config, operands, False)[0]
    outputs: PyTree = _differentiable(plan, False, operands)
    return outputs[0]


def forward(plan: CallPlan, operands: PyTree) -> tuple[PyTree, PyTree]:
    """(outputs, residuals); the residuals carry no gradient."""
    return _differentiable(plan, True, operands)


def backward(plan: CallPlan, arguments: tuple[PyTree, ...]) -> PyTree:
    """The gradients of the operands, from (operands, outputs, residuals, cotangents)."""
    return _backward(plan, arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(plan: CallPlan, residuals: bool, operands: PyTree) -> tuple[PyTree, PyTree]:
    """(outputs, residuals or None). Residuals only ever reach `_backward`, whose own gradient recomputes them, so they
    carry no cotangent.
    """
    return _batched(plan, "forward_with_residuals" if residuals else "forward", (operands,))


def _differentiable_fwd(plan: CallPlan, residuals: bool, operands: PyTree) -> tuple[PyTree, PyTree]:
    results: PyTree = _differentiable(plan, True, operands)
    outputs, saved = results
    return (outputs, saved if residuals else None), (operands, outputs, saved)


def _differentiable_bwd(plan: CallPlan, residuals: bool, saved: PyTree, cotangents: PyTree) -> tuple[PyTree]:
    return (_backward(plan, (*saved, cotangents[0])),)


_differentiable.defvjp(by_default(_differentiable_fwd), by_default(_differentiable_bwd))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(plan: CallPlan, arguments: tuple[PyTree, ...]) -> PyTree:
    """The backward pass; differentiable itself (reverse over reverse) through the reference implementation."""
    return _batched(plan, "backward", arguments)


def _backward_fwd(plan: CallPlan, arguments: tuple[object, ...]) -> tuple[PyTree, PyTree]:
    return _backward(plan, arguments), arguments


def _backward_bwd(plan: CallPlan, arguments: tuple[PyTree, ...], cotangents: PyTree) -> tuple[PyTree]:
    reference = plan.op.implementations[-1]
    config = plan.op.plan(plan.spec, implementation=reference.name).choices[-1].config
    operands, outputs, residuals, dout = arguments
    floats = map_fields(lambda x: x if is_float(x) else None, operands)

    def gradients(floats: PyTree, dout: AnyArray) -> PyTree:
        merged = type(operands)(*(o if f is None else f for f, o in zip(floats, operands, strict=True)))
        return autodiff_backward(reference.forward)(plan.spec, config, merged, dout)

    d_operands, d_dout = jax.vjp(gradients, floats, dout)[1](cotangents)
    # Outputs and residuals are functions of the operands, and the reference recomputes them from there: their own share
    # is zero.
    return ((d_operands, *jax.tree.map(jnp.zeros_like, (outputs, residuals)), d_dout),)


_backward.defvjp(_backward_fwd, by_default(_backward_bwd))


@functools.lru_cache(maxsize=4096)
def _batchable(plan: CallPlan, direction: str) -> Callable[..., PyTree]:
    @by_default
    def dispatch(*arguments: object) -> PyTree:
        # Within a program of its own, arrays of NumPy stay constants. `custom_vmap` would make operands of them, and
        # fails with those in a branch of a mapped `lax.cond`. Traced anew each time: an observer may be in force.
        return jax.jit(functools.partial(_dispatch, plan, direction))(*arguments)

    mapped = jax.custom_batching.custom_vmap(dispatch)

    @mapped.def_vmap
    @by_default
    def rule(size: int, in_batched: list[object], *arguments: object) -> tuple[PyTree, PyTree]:
        return _fold(plan, direction, size, tuple(in_batched), arguments)

    return mapped


def _batched(plan: CallPlan, direction: str, arguments: tuple[object, ...]) -> PyTree:
    return _batchable(plan, direction)(*arguments)


def _fold(
    plan: CallPlan, direction: str, size: int, in_batched: tuple[Any, ...], arguments: tuple[PyTree, ...]
) -> tuple[PyTree, PyTree]:
    """Folds a mapped axis of `size` into the leading batch axis of every argument, runs, and unfolds the results."""
    backward = direction == "backward"
    operands, flags = arguments[0], in_batched[0]
    shareable = plan.op.shareable(plan.spec)
    groups = max(
        x.shape[1 if flag else 0] for x, flag in zip(jax.tree.leaves(operands), jax.tree.leaves(flags), strict=True)
    )

    def fold(x: jax.Array, batched: bool, may_share: bool) -> jax.Array:
        if not batched and may_share and x.shape[0] == 1:
            return x
        x = x if batched else jnp.broadcast_to(x[None], (size, *x.shape))
        x = jnp.broadcast_to(x, (size, groups, *x.shape[2:]))
        return x.reshape(size * groups, *x.shape[2:])

    def fold_operand(name: str, x: AnyArray, batched: PyTree) -> PyTree:
        if x is None:
            return None
        # In the backward pass a shared float operand needs one gradient for every mapped element, so it stops being
        # shared.
        return fold(x, batched, name in shareable and not (backward and is_float(x)))

    folded = type(operands)(
        *(fold_operand(name, x, flag) for name, x, flag in zip(operands._fields, operands, flags, strict=True))
    )
    rest = jax.tree.map(lambda x, batched: fold(x, batched, False), arguments[1:], in_batched[1:])
    results = _batched(_replan(plan, folded), direction, (folded, *rest))

    def unfold(y: jax.Array) -> jax.Array:
        return y.reshape(size, groups, *y.shape[1:])

    if backward:

        def unfold_gradient(gradient: AnyArray, operand: PyTree, batched: PyTree) -> PyTree:
            if gradient is None:
                return None
            gradient = unfold(gradient)
            shared = operand.shape[1 if batched else 0] == 1 and groups > 1
            return gradient.sum(axis=1, keepdims=True).astype(gradient.dtype) if shared else gradient

        results = type(operands)(*map(unfold_gradient, results, operands, flags))
    else:
        results = jax.tree.map(unfold, results)
    return results, jax.tree.map(lambda _: True, results)


def _dispatch(plan: CallPlan, direction: str, *arguments: object) -> PyTree:
    observer = observe.interceptor()
    if observer is not None:
        return observer.run_pass(plan, direction, functools.partial(_dispatch_now, plan, direction), arguments)
    return _dispatch_now(plan, direction, *arguments)


def _dispatch_now(plan: CallPlan, direction: str, *arguments: object) -> PyTree:
    if sharding.on_explicit_axes(arguments):
        # A vmap over an explicit mesh axis: the public function, inside it, could not see that axis, and the folded
        # batch lives on it.
        default = next(choice for choice in plan.choices if choice.platform is None)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        results = jax.eval_shape(_run(plan, default, direction), *shapes)
        axes = plan.op.axes(plan.spec, arguments, results)

        def local(*shards: PyTree) -> PyTree:
            return _dispatch_now(_replan(plan, shards[0]), direction, *shards)

        return sharding.follow_explicit_axes(local, axes, *arguments)
    choices = plan.choices if _ONLY.value is None else (plan.choice(_ONLY.value),)
    branches = {choice.platform: _branch(plan, choice, direction, arguments) for choice in choices}
    default = branches.pop(None, None)
    return by_platform(default, {p: branch for p, branch in branches.items() if p is not None}, *arguments)


def by_platform(default: Any, branches: Mapping[str, Callable[..., PyTree]], *arguments: PyTree) -> PyTree:
    """What the branch of the platform computes that a program is lowered for, or that `only_for` names; the function
    `default` on others.
    """
    only = _ONLY.value
    if only is not None:
        return branches.get(only, default)(*arguments)
    if not branches:
        return default(*arguments)
    return jax.lax.platform_dependent(*arguments, default=default, **branches)


def _run(plan: CallPlan, choice: Choice, direction: str) -> Callable[..., PyTree]:
    impl = choice.implementation

    @functools.partial(jax.jit, inline=True)  # traced once, for the shapes of the results and for the call
    @by_default
    def run(*shard: PyTree) -> PyTree:
        spec = plan.spec.localize(shard[0])
        if direction == "backward":
            return impl.backward(spec, choice.config, *shard)
        return impl.forward(spec, choice.config, shard[0], direction == "forward_with_residuals")

    return run


def _branch(plan: CallPlan, choice: Choice, direction: str, arguments: tuple[object, ...]) -> Callable[..., PyTree]:
    run = _run(plan, choice, direction)
    platform = choice.implementation.platform
    mesh = automatic_axes.automatic_mesh(arguments) if platform == "tpu" else None
    if platform is None or (platform == "tpu" and mesh is None):
        return run  # XLA splits its own operations itself
    results = jax.eval_shape(run, *arguments)
    axes = plan.op.axes(plan.spec, arguments, results)
    if mesh is None:
        return sharding.partitioned(run, axes)

    def local(*shards: PyTree) -> PyTree:
        part = _replan(plan, shards[0])
        return _run(part, part.choice("tpu"), direction)(*shards)

    return automatic_axes.over_automatic_axes(local, axes, mesh, plan.op.name, results)
