"""An operation and its implementations: one meaning, one gradient, several kernels, chosen while lowering.

`Op.__call__` builds a `Plan` (the spec, and for every platform the implementation and its config) and runs it through four layers, outermost first:

1. `jax.custom_vjp`: any forward pairs with any backward, because the residuals belong to the op. It must be outermost: inside
   `lax.platform_dependent` the residuals of *every* branch, the reference's score matrix among them, would leak into the program.
2. `custom_vmap`: a mapped axis is folded into the leading batch axis that every operand has (size B, or 1 where it is shared).
3. `lax.platform_dependent`: the branch is picked while lowering, so the same traced function lowers for tpu, cuda and cpu.
4. `core.sharding.partitioned`: XLA's partitioner is made to follow the op's factor rule (CPU and GPU kernels; see `core.sharding`).
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from vishwamai.core import sharding, tuning
from vishwamai.core.config import KernelConfig, ambient_chip, ambient_platform, current_config
from vishwamai.core.errors import FallbackWarning, KernelError, UnsupportedError
from vishwamai.core.hardware import Chip

PLATFORMS = ("tpu", "cuda", "rocm", "cpu")


class Spec(Protocol):
    """*What* is computed: shapes, dtypes and options; frozen, hashable, and free of any framework."""

    def localize(self, operands: Any) -> Any:
        """The same computation for operands of other sizes (a shard, or a folded vmap axis)."""
        ...


S = TypeVar("S", bound=Spec)


@dataclasses.dataclass(frozen=True, eq=False)
class Implementation(Generic[S]):
    """One way to compute an op.

    Attributes:
      name: "pallas_tpu", "xla", "native_cpu" ...
      platform: the platform it is written for, or None for all of them.
      forward: `(spec, config, operands, residuals) -> (outputs, residuals or None)`; the flag says whether residuals are wanted.
      backward: `(spec, config, operands, outputs, residuals, cotangents) -> gradients`, a tuple of the operands' type; None where there is none.
      why_not: `(spec, chip) -> None` if it can serve the spec, else the reason in words. `chip` is None where no TPU is known.
      heuristic: `(spec, chip) -> Config`, or None if there is nothing to configure.
      config_type: class of its configs.
      notes: `(spec, chip) -> sentences` that `explain` adds about a served spec (an upcast, a padded dimension).
      autodiff: JAX can differentiate `forward` itself, to any order and in forward mode, when the implementation is asked for by name.
    """

    name: str
    platform: str | None
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Any]
    why_not: Callable[[S, Chip | None], str | None] = lambda spec, chip: None
    heuristic: Callable[[S, Chip | None], Any] | None = None
    config_type: type | None = None
    notes: Callable[[S, Chip | None], Iterable[str]] = lambda spec, chip: ()
    autodiff: bool = False


def autodiff_backward(forward: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """The backward of a pure-JAX `forward`, by JAX's own differentiation."""

    def backward(spec: Any, config: Any, operands: Any, outputs: Any, residuals: Any, cotangents: Any) -> Any:
        del outputs, residuals
        differentiable = _map_fields(lambda x: x if _is_float(x) else None, operands)
        rest = _map_fields(lambda x: None if _is_float(x) else x, operands)

        def run(chosen: Any) -> Any:
            merged = type(operands)(*(r if c is None else c for c, r in zip(chosen, rest, strict=True)))
            return forward(spec, config, merged, False)[0]

        return jax.vjp(run, differentiable)[1](cotangents)[0]

    return backward


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _map_fields(function: Callable[[Any], Any], operands: Any) -> Any:
    return type(operands)(*(None if x is None else function(x) for x in operands))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that runs on one platform, with its config, and those that declined before it with their reasons."""

    platform: str | None
    implementation: Implementation
    config: Any
    refused: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call of an op."""

    op: Op
    spec: Any
    choices: tuple[Choice, ...]  # the last one has platform None and serves every platform that is not named before it
    config: Any = (
        None  # what the caller asked for, kept so that a folded or sharded call chooses again under the same wishes
    )
    implementation: str | None = None


class Op(Generic[S]):
    """An operation: its name, its implementations in order of preference, its factor rule.

    Args:
      name: the operation's name, as `explain` and the tuning tables call it.
      implementations: in order of preference. The last one must serve every legal spec on every platform.
      axes: `(spec, backward) -> Axes`: the factor rule of the forward (arguments: operands) or the backward pass (arguments: operands, outputs,
        residuals, cotangents; results: gradients).
      shareable: operands whose leading axis may be 1 while the batch is larger.
    """

    def __init__(
        self,
        name: str,
        implementations: Iterable[Implementation[S]],
        axes: Callable[[Any, tuple[Any, ...], Any], sharding.Axes],
        shareable: Iterable[str] = (),
    ):
        self.name = name
        self.implementations = tuple(implementations)
        self.axes = axes
        self.shareable = frozenset(shareable)

    def __repr__(self) -> str:
        return f"Op({self.name!r})"

    def __call__(self, spec: S, operands: Any, *, config: Any = None, implementation: str | None = None) -> Any:
        """Runs the op on operands that the spec has already checked; returns its outputs."""
        plan = self.plan(spec, config=config, implementation=implementation)
        _record(plan)
        return _execute(plan, sharding.match_varying(operands))

    def plan(self, spec: S, *, config: Any = None, implementation: str | None = None) -> Plan:
        """Chooses an implementation for every platform.

        Raises:
          UnsupportedError: the implementation asked for does not exist or declines the spec; or strict mode is on and the kernel of the ambient
            platform declines.
        """
        ambient = current_config()
        chip = ambient_chip()
        self._check_config(config)
        if implementation is None and ambient.implementation in {impl.name for impl in self.implementations}:
            implementation = ambient.implementation
        if implementation is not None:
            chosen = self._named(implementation)
            reason = chosen.why_not(spec, chip)
            if reason is not None:
                raise UnsupportedError(
                    f"{self.name}: implementation {implementation!r} cannot serve this call: {reason} {self._alternatives(spec, chip)}"
                )
            return Plan(
                self,
                spec,
                (Choice(None, chosen, self._config(chosen, spec, config, chip, ambient)),),
                config,
                implementation,
            )
        platforms = [p for p in PLATFORMS if any(impl.platform == p for impl in self.implementations)]
        choices = tuple(self._choose(spec, platform, config, chip, ambient) for platform in (*platforms, None))
        self._report_fallback(choices, ambient)
        return Plan(self, spec, choices, config, implementation)

    def _named(self, name: str) -> Implementation[S]:
        for impl in self.implementations:
            if impl.name == name:
                return impl
        names = ", ".join(repr(impl.name) for impl in self.implementations)
        raise UnsupportedError(
            f"{self.name}: there is no implementation {name!r}; choose one of {names}, or None to let the library choose."
        )

    def _alternatives(self, spec: S, chip: Chip | None) -> str:
        able = [repr(impl.name) for impl in self.implementations if impl.why_not(spec, chip) is None]
        return f"These can: {', '.join(able)}; or pass implementation=None to let the library choose."

    def _check_config(self, config: Any) -> None:
        types = tuple(impl.config_type for impl in self.implementations if impl.config_type is not None)
        if config is not None and not isinstance(config, (int, *types)):
            names = ", ".join(sorted({t.__name__ for t in types}))
            raise KernelError(
                f"{self.name}: `config` is a {type(config).__name__}; pass one of {names}, a block size, or None."
            )

    def _config(self, impl: Implementation[S], spec: S, wanted: Any, chip: Chip | None, ambient: KernelConfig) -> Any:
        if impl.heuristic is None or impl.config_type is None:
            return None
        if isinstance(wanted, impl.config_type):
            return wanted
        block_size = wanted if isinstance(wanted, int) else ambient.block_size
        if block_size is not None:
            return impl.heuristic(spec, chip).with_block_size(block_size)
        tuned = tuning.lookup(self.name, impl.name, chip, spec, impl.config_type) if ambient.auto_optimize else None
        return tuned or impl.heuristic(spec, chip)

    def _choose(self, spec: S, platform: str | None, wanted: Any, chip: Chip | None, ambient: KernelConfig) -> Choice:
        refused = []
        for impl in self.implementations:
            if impl.platform not in (platform, None):
                continue
            reason = impl.why_not(spec, chip)
            if reason is None:
                return Choice(platform, impl, self._config(impl, spec, wanted, chip, ambient), tuple(refused))
            refused.append((impl.name, reason))
        raise AssertionError(
            f"{self.name}: no implementation serves {spec} on {platform}; the last one must serve everything. Refused: {refused}"
        )

    def _report_fallback(self, choices: tuple[Choice, ...], ambient: KernelConfig) -> None:
        """Warns once, or raises in strict mode, if a kernel written for the ambient platform declined."""
        platform = ambient_platform()
        choice = next((c for c in choices if c.platform == platform), choices[-1])
        for name, reason in choice.refused:
            if self._named(name).platform != platform:
                continue
            text = f"{self.name}: {name!r} declined, so {choice.implementation.name!r} runs on {platform}: {reason}"
            if ambient.strict:
                raise UnsupportedError(f"{text} (strict mode: `KernelConfig(strict=True)` forbids the fallback)")
            _warn_once(text)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=5)


def _replan(plan: Plan, operands: Any) -> Plan:
    """The plan for operands of other sizes, under the same wishes of the caller."""
    return plan.op.plan(plan.spec.localize(operands), config=plan.config, implementation=plan.implementation)


# --- Layer 1: the gradient -------------------------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _execute(plan: Plan, operands: Any) -> Any:
    only = plan.choices[-1].implementation
    if plan.implementation is not None and only.autodiff:
        return only.forward(plan.spec, plan.choices[-1].config, operands, False)[0]
    return _differentiable(plan, False, operands)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(plan: Plan, residuals: bool, operands: Any) -> tuple[Any, Any]:
    """(outputs, residuals or None). Residuals only ever reach `_backward`, whose own gradient recomputes them, so they carry no cotangent."""
    return _batched(plan, "forward_with_residuals" if residuals else "forward", (operands,))


def _differentiable_fwd(plan: Plan, residuals: bool, operands: Any) -> tuple[Any, Any]:
    outputs, saved = _differentiable(plan, True, operands)
    return (outputs, saved if residuals else None), (operands, outputs, saved)


def _differentiable_bwd(plan: Plan, residuals: bool, saved: Any, cotangents: Any) -> tuple[Any]:
    return (_backward(plan, (*saved, cotangents[0])),)


_differentiable.defvjp(_differentiable_fwd, _differentiable_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(plan: Plan, arguments: tuple[Any, ...]) -> Any:
    """The backward pass; differentiable itself (reverse over reverse) through the reference implementation."""
    return _batched(plan, "backward", arguments)


def _backward_fwd(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    return _backward(plan, arguments), arguments


def _backward_bwd(plan: Plan, arguments: tuple[Any, ...], cotangents: Any) -> tuple[Any]:
    reference = plan.op.implementations[-1]
    config = plan.op.plan(plan.spec, implementation=reference.name).choices[-1].config
    operands, outputs, residuals, dout = arguments
    floats = _map_fields(lambda x: x if _is_float(x) else None, operands)

    def gradients(floats: Any, dout: Any) -> Any:
        merged = type(operands)(*(o if f is None else f for f, o in zip(floats, operands, strict=True)))
        return autodiff_backward(reference.forward)(plan.spec, config, merged, None, None, dout)

    d_operands, d_dout = jax.vjp(gradients, floats, dout)[1](cotangents)
    # Outputs and residuals are functions of the operands, and the reference recomputes them from there: their own share is zero.
    return ((d_operands, *jax.tree.map(jnp.zeros_like, (outputs, residuals)), d_dout),)


_backward.defvjp(_backward_fwd, _backward_bwd)


# --- Layer 2: vmap ---------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def _batchable(plan: Plan, direction: str) -> Callable[..., Any]:
    mapped = jax.custom_batching.custom_vmap(functools.partial(_dispatch, plan, direction))

    @mapped.def_vmap
    def rule(size: int, in_batched: list[Any], *arguments: Any) -> tuple[Any, Any]:
        return _fold(plan, direction, size, tuple(in_batched), arguments)

    return mapped


def _batched(plan: Plan, direction: str, arguments: tuple[Any, ...]) -> Any:
    return _batchable(plan, direction)(*arguments)


def _fold(
    plan: Plan, direction: str, size: int, in_batched: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Folds a mapped axis of `size` into the leading batch axis of every argument, runs, and unfolds the results."""
    backward = direction == "backward"
    operands, flags = arguments[0], in_batched[0]
    groups = max(
        x.shape[1 if flag else 0] for x, flag in zip(jax.tree.leaves(operands), jax.tree.leaves(flags), strict=True)
    )

    def fold(x: jax.Array, batched: bool, may_share: bool) -> jax.Array:
        if not batched and may_share and x.shape[0] == 1:
            return x
        x = x if batched else jnp.broadcast_to(x[None], (size, *x.shape))
        x = jnp.broadcast_to(x, (size, groups, *x.shape[2:]))
        return x.reshape(size * groups, *x.shape[2:])

    def fold_operand(name: str, x: Any, batched: Any) -> Any:
        if x is None:
            return None
        # In the backward pass a shared float operand needs one gradient for every mapped element, so it stops being shared.
        return fold(x, batched, name in plan.op.shareable and not (backward and _is_float(x)))

    folded = type(operands)(
        *(fold_operand(name, x, flag) for name, x, flag in zip(operands._fields, operands, flags, strict=True))
    )
    rest = jax.tree.map(lambda x, batched: fold(x, batched, False), arguments[1:], in_batched[1:])
    results = _batched(_replan(plan, folded), direction, (folded, *rest))

    def unfold(y: jax.Array) -> jax.Array:
        return y.reshape(size, groups, *y.shape[1:])

    if backward:

        def unfold_gradient(gradient: Any, operand: Any, batched: Any) -> Any:
            if gradient is None:
                return None
            gradient = unfold(gradient)
            shared = operand.shape[1 if batched else 0] == 1 and groups > 1
            return gradient.sum(axis=1, keepdims=True).astype(gradient.dtype) if shared else gradient

        results = type(operands)(*map(unfold_gradient, results, operands, flags))
    else:
        results = jax.tree.map(unfold, results)
    return results, jax.tree.map(lambda _: True, results)


# --- Layers 3 and 4: the platform, the partitioner -------------------------------------------------------------------------------------------------


def _dispatch(plan: Plan, direction: str, *arguments: Any) -> Any:
    branches = {choice.platform: _branch(plan, choice, direction, arguments) for choice in plan.choices}
    default = branches.pop(None)
    branches = {platform: branch for platform, branch in branches.items() if platform is not None}
    if not branches:
        return default(*arguments)
    return jax.lax.platform_dependent(*arguments, default=default, **branches)


def _branch(plan: Plan, choice: Choice, direction: str, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    impl = choice.implementation

    @functools.partial(jax.jit, inline=True)  # traced once, for the shapes below and for the call
    def run(*shard: Any) -> Any:
        spec = plan.spec.localize(shard[0])
        if direction == "backward":
            return impl.backward(spec, choice.config, *shard)
        return impl.forward(spec, choice.config, shard[0], direction == "forward_with_residuals")

    if impl.platform in (None, "tpu"):
        return run  # XLA splits its own operations itself, and libtpu has no hook for ours
    results = jax.eval_shape(run, *arguments)
    return sharding.partitioned(run, plan.op.axes(plan.spec, arguments, results))


# --- What ran, and why -----------------------------------------------------------------------------------------------------------------------------

_RECORDING = jax.make_user_context(default_value=None)
_RECORDS: dict[int, list[Plan]] = {}


def _record(plan: Plan) -> None:
    token = _RECORDING.value
    if token is not None:
        _RECORDS[token].append(plan)


def record_plans(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Plan]:
    """Traces `function` (nothing runs) and returns the plan of every op call in it, in order."""
    token = max(_RECORDS, default=0) + 1
    _RECORDS[token] = plans = []
    try:
        with _RECORDING(token):
            # A fresh wrapper: `eval_shape` caches by function identity.
            jax.eval_shape(lambda *a, **k: function(*a, **k), *args, **kwargs)
    finally:
        del _RECORDS[token]
    return plans
