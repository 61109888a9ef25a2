"""An operation and its implementations: one meaning, several kernels, and the choice between them.

`Op.__call__` builds a `CallPlan` (the spec, and for every platform the implementation and its config), which
`core.execute` runs. The choice asks each implementation in order for its `why_not`, so no exception drives control
flow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic

import jax
from jax.core import Tracer

from vishwamai.core import (
    automatic_axes,
    callers,
    dims,
    execute,
    ffi,
    jax_errors,
    jax_private,
    observe,
    sharding,
    tuning,
)
from vishwamai.core.call_plan import CallPlan, Choice, Implementation, S
from vishwamai.core.config import KernelConfig, ambient_target, check_block_size, current_config
from vishwamai.core.errors import DeviceError, FallbackWarning, KernelError, UnsupportedError, VishwamaiError
from vishwamai.core.spec import SYMBOLIC, is_symbolic
from vishwamai.core.target import Target
from vishwamai.core.types import PyTree

PLATFORMS = ("tpu", "cuda", "rocm", "cpu")


class Op(Generic[S]):
    """An operation: its name, its implementations in order of preference, and which of its dims may be split over
    devices.

    Args:
      name: the operation's name, as `explain` and the tuning tables call it.
      implementations: sequence in order of preference. The last one must serve every legal spec on every platform.
      split: the words of the dims (see `core.dims`) that may be split over mesh axes; or `(spec, backward) -> words`
        where an option decides.
      residual: dims of a residual that is one array; a named tuple's are in its annotations.
    """

    def __init__(
        self,
        name: str,
        implementations: Iterable[Implementation[S]],
        split: str | Callable[[Any, bool], str] = "",
        residual: str | None = None,
    ):
        self.name = name
        self.implementations = tuple(implementations)
        self._split = split
        self.residual = residual

    def __repr__(self) -> str:
        return f"Op({self.name!r})"

    def __call__(
        self, spec: S, operands: PyTree, *, config: object = None, implementation: str | None = None
    ) -> PyTree:
        """Runs the op on operands that the spec has already checked; returns its outputs.

        Raises:
          UnsupportedError: what `plan` raises; or forward-mode differentiation of an implementation that has a gradient
            only; or the implementation asked for is for another platform than the arrays'.
          DeviceError: the operands are committed to different devices.
        """
        if jax_private.is_linearized(operands):
            # JAX would raise only where the linear function is called, in its own words.
            if implementation is not None and not self._named(implementation).autodiff:
                raise self._no_forward_mode()
            config, implementation = None, implementation or self.implementations[-1].name
        plan = self.plan(spec, config=config, implementation=implementation)
        observe.report(plan)
        if observe.dry_run() and not self._tells_axes(operands):
            # Whoever asks for the plans alone is spared the tracing of every platform's kernel, forward and backward.
            reference = self.implementations[-1]
            config = self._config(reference, spec, None, ambient_target(), current_config())
            return reference.forward(spec, config, sharding.match_varying(operands), False)[0]
        try:
            return execute.run(plan, sharding.match_varying(operands))
        except (TypeError, ValueError, NotImplementedError) as error:
            translated = self.translated_error(error, plan, operands)
            if translated is None:
                raise
            raise translated from error

    def _tells_axes(self, operands: object) -> bool:
        """Whether tracing the kernels tells how they are split over mesh axes."""
        on_tpu = ambient_target().platform == "tpu"
        return sharding.on_explicit_axes(operands) or (on_tpu and automatic_axes.automatic_mesh(operands) is not None)

    def translated_error(self, error: Exception, plan: CallPlan, operands: object) -> VishwamaiError | None:
        """JAX's own error about a call of `plan`, in our words; None where we have none."""
        if isinstance(error, VishwamaiError):
            return None
        if isinstance(error, TypeError):
            if not jax_errors.lacks_forward_mode(error):
                return None
            return self._no_forward_mode()
        mismatch = self._on_different_devices(operands)  # arrays that no one program can take
        if mismatch is not None:
            return mismatch
        if plan.implementation is not None and jax_errors.lacks_platform(error):
            platform = self._named(plan.implementation).platform
            return UnsupportedError(
                f"{self.name}: {plan.implementation!r} is for {platform}, and this program is compiled for another "
                "platform; pass implementation=None to let the library choose."
            )
        return None

    def _no_forward_mode(self) -> UnsupportedError:
        able = [repr(impl.name) for impl in self.implementations if impl.autodiff]
        return UnsupportedError(
            f"{self.name}: its kernels have a gradient (jax.grad, jax.vjp) but no forward mode (jax.jvp, "
            f"jax.jacfwd, jax.hessian); for that pass implementation={' or '.join(able)}, which JAX differentiates "
            "itself."
        )

    def with_residuals(
        self, spec: S, operands: object, *, config: object = None, implementation: str | None = None
    ) -> tuple[PyTree, PyTree]:
        """The outputs, and the residuals of their gradients, which carry no gradient themselves. For a caller that has
        a gradient of its own.

        Raises:
          UnsupportedError: what `plan` raises.
        """
        if jax_private.is_linearized(operands):
            # JAX would raise only where the linear function is called, in its own words.
            if implementation is not None and not self._named(implementation).autodiff:
                raise self._no_forward_mode()
            config, implementation = None, implementation or self.implementations[-1].name
        plan = self.plan(spec, config=config, implementation=implementation)
        observe.report(plan)
        return execute.forward(plan, sharding.match_varying(operands))

    def gradients(
        self,
        spec: S,
        operands: PyTree,
        outputs: PyTree,
        residuals: PyTree,
        cotangents: PyTree,
        *,
        config: object = None,
        implementation: str | None = None,
    ) -> PyTree:
        """The backward pass alone, from outputs and residuals that the caller has: for instance of a larger problem
        that this call is a part of.

        Raises:
          UnsupportedError: what `plan` raises; or the implementation asked for computes its own residuals.
        """
        plan = self.plan(spec, config=config, implementation=implementation)
        differentiable = next(
            (choice.implementation for choice in plan.choices if choice.implementation.autodiff), None
        )
        if differentiable is not None:
            raise UnsupportedError(
                f"{self.name}: {differentiable.name!r} reads no residuals, so it cannot compute the gradients of a "
                "part of a larger problem; pass another implementation, or None to let the library choose."
            )
        return execute.backward(plan, sharding.match_varying((operands, outputs, residuals, cotangents)))

    def split(self, spec: object, backward: bool) -> str:
        """The words of the dims that may be split over mesh axes."""
        return self._split if isinstance(self._split, str) else self._split(spec, backward)

    def axes(self, spec: S, arguments: tuple[PyTree, ...], results: PyTree) -> sharding.Axes:
        """The factor rule of the forward pass (arguments: operands), or of the backward (operands, outputs, residuals,
        cotangents).
        """

        def named(node: PyTree) -> PyTree:
            if not hasattr(node, "_fields"):
                assert self.residual is not None, f"{self.name}: `residual` states no dims"
                return dims.factors(self.residual, len(node.shape))
            texts = spec.dims(type(node))
            pairs = zip(node, texts, strict=True)
            return type(node)(*(None if x is None else dims.factors(text, len(x.shape)) for x, text in pairs))

        of_arguments, of_results = (
            jax.tree.map(named, tree, is_leaf=lambda node: hasattr(node, "_fields")) for tree in (arguments, results)
        )
        factors = sharding.Axes(of_arguments, of_results, frozenset())
        split = dims.splittable(self.split(spec, len(arguments) > 1), factors.dims)
        return dataclasses.replace(factors, splittable=split)

    def shareable(self, spec: S) -> frozenset[str]:
        """The operands whose leading axis may be 1 while the batch is larger."""
        kind = type(spec.operands)
        return frozenset(name for name, text in zip(kind._fields, spec.dims(kind)) if dims.parse(text)[0].shareable)

    def plan(self, spec: S, *, config: object = None, implementation: str | None = None) -> CallPlan:
        """Chooses an implementation for every platform.

        Raises:
          UnsupportedError: the implementation asked for does not exist or declines the spec; or strict mode is on and
            the kernel of the ambient platform declines.
        """
        ambient, target = current_config(), ambient_target()
        self._check_config(config)
        implementation = implementation or self._ambient_implementation(ambient)
        if implementation is not None:
            by_name = target.on(self._named(implementation).platform)
            choice = self._by_name(spec, by_name, implementation, config, ambient)
            return CallPlan(self, spec, (dataclasses.replace(choice, platform=None),), config, implementation)
        platforms = _platforms(self.implementations)
        choices = [self._first(spec, target.on(platform), config, ambient) for platform in platforms]
        any_platform = self._first(spec, target, config, ambient, anywhere=True)
        plan = CallPlan(self, spec, (*choices, any_platform), config)
        self.report_fallback(plan.choice(target.platform))
        return plan

    def _on_different_devices(self, operands: PyTree) -> DeviceError | None:
        """The error that names the devices, if the operands are committed to different ones."""
        devices: dict[frozenset[Any], str] = {}
        for name, x in zip(operands._fields, operands, strict=True):
            if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed:
                devices.setdefault(frozenset(x.sharding.device_set), name)
        if len(devices) < 2:
            return None
        (a, first), (b, second), *_ = devices.items()
        where = [", ".join(sorted(map(str, ids))[:4]) + (", ..." if len(ids) > 4 else "") for ids in (a, b)]
        return DeviceError(
            f"{self.name}: `{first}` is on {where[0]}, but `{second}` on {where[1]}; bring them together, for "
            f"instance by jax.device_put({second}, {first}.sharding)."
        )

    def choose(self, spec: S, target: Target, *, config: object = None, implementation: str | None = None) -> Choice:
        """What runs on `target`: for arrays that bring their device with them, as torch's do.

        Raises:
          UnsupportedError: nothing serves the spec there; or the implementation asked for does not exist, is for
            another platform, or declines.
        """
        ambient = current_config()
        self._check_config(config)
        implementation = implementation or self._ambient_implementation(ambient)
        if implementation is not None:
            return self._by_name(spec, target, implementation, config, ambient)
        return self._first(spec, target, config, ambient)

    def _first(self, spec: S, target: Target, config: object, ambient: KernelConfig, anywhere: bool = False) -> Choice:
        """The first implementation that serves `spec` on `target`; with `anywhere`, of those that are for every
        platform.
        """
        declined = []
        symbolic = is_symbolic(spec.operands)
        for impl in self.implementations:
            if not impl.is_for(target) or (anywhere and impl.platform is not None):
                continue
            reason = SYMBOLIC if symbolic and impl is not self.implementations[-1] else impl.why_not(spec, target)
            if reason is not None:
                declined.append((impl.name, reason))
            elif impl.why_not_default(spec, target) is None:
                resolved = self._config(impl, spec, config, target, ambient)
                return Choice(None if anywhere else target.platform, impl, resolved, target, tuple(declined))
        reasons = "; ".join(f"{name!r} declines: {reason}" for name, reason in declined) or "there is none"
        assert target.framework == "torch", (
            f"{self.name}: the last implementation must serve everything: {spec}, {reasons}"
        )
        raise UnsupportedError(f"{self.name}: no kernel serves torch tensors on a GPU here: {reasons}")

    def _by_name(self, spec: S, target: Target, name: str, config: object, ambient: KernelConfig) -> Choice:
        """The implementation called `name`."""
        chosen = self._named(name)
        if not chosen.is_for(target):
            kind = f"for {chosen.platform}" if chosen.platform else "JAX code"
            raise UnsupportedError(
                f"{self.name}: {name!r} is {kind}, and the arrays are {target.framework}'s on {target.platform}."
            )
        symbolic = is_symbolic(spec.operands)
        last = self.implementations[-1]
        reason = SYMBOLIC if symbolic and chosen is not last else chosen.why_not(spec, target)
        if reason is None:
            return Choice(target.platform, chosen, self._config(chosen, spec, config, target, ambient), target)
        others = [
            (impl, target if target.framework == "torch" else target.on(impl.platform)) for impl in self.implementations
        ]
        able = [
            repr(impl.name)
            for impl, where in others
            if impl.is_for(where) and (impl is last if symbolic else impl.why_not(spec, where) is None)
        ]
        can = f"These can: {', '.join(able)}; or pass" if able else "Pass"
        raise UnsupportedError(
            f"{self.name}: implementation {name!r} cannot serve this call: {reason} {can} implementation=None to let "
            "the library choose."
        )

    def _ambient_implementation(self, ambient: KernelConfig) -> str | None:
        """The implementation that the ambient config names, if this op has it."""
        return (
            ambient.implementation
            if any(impl.name == ambient.implementation for impl in self.implementations)
            else None
        )

    def _named(self, name: str) -> Implementation[S]:
        for impl in self.implementations:
            if impl.name == name:
                return impl
        names = ", ".join(repr(impl.name) for impl in self.implementations)
        raise UnsupportedError(
            f"{self.name}: there is no implementation {name!r}; choose one of {names}, or None to let the library "
            "choose."
        )

    def _check_config(self, config: object) -> None:
        types = tuple(impl.config_type for impl in self.implementations if impl.config_type is not None)
        if config is not None and not isinstance(config, (int, *types)):
            names = ", ".join(sorted({t.__name__ for t in types}))
            raise KernelError(
                f"{self.name}: `config` is a {type(config).__name__}; pass one of {names}, a block size, or None."
            )
        if isinstance(config, int):
            check_block_size(f"{self.name}: `config`", config)

    def _config(self, impl: Implementation[S], spec: S, config: object, target: Target, ambient: KernelConfig) -> Any:
        if impl.heuristic is None or impl.config_type is None:
            return None
        if isinstance(config, impl.config_type):
            return config
        block_size = config if isinstance(config, int) else ambient.block_size
        if block_size is not None:
            return _heuristic(impl, spec, target).resized(block_size, spec, target)
        tuned = tuning.lookup(self.name, impl.name, target, spec, impl.config_type) if ambient.auto_optimize else None
        return tuned or _heuristic(impl, spec, target)

    def report_fallback(self, choice: Choice) -> None:
        """Warns once, or raises in strict mode, if a kernel written for the choice's platform declined.

        Nothing is reported of a program that is only traced to learn what would run: the answer says it.
        """
        if not choice.declined or observe.dry_run():
            return
        for text in self.fallbacks(choice):
            if current_config().strict:
                raise UnsupportedError(f"{text} (strict mode: `KernelConfig(strict=True)` forbids the fallback)")
            _warn_once(_of_the_module(text))

    def fallbacks(self, choice: Choice) -> list[str]:
        """What is said of the kernels that are written for the choice's platform and declined."""
        platform, chosen = choice.target.platform, choice.implementation.name
        return [
            f"{self.name}: {name!r} declined, so {chosen!r} runs on {platform}: {reason}"
            for name, reason in choice.declined
            if self._named(name).platform == platform
        ]


@functools.cache
def _platforms(implementations: tuple[Implementation, ...]) -> tuple[str, ...]:
    """The platforms that at least one of them is written for."""
    return tuple(p for p in PLATFORMS if any(impl.platform == p for impl in implementations))


@functools.lru_cache(maxsize=4096)
def _heuristic(impl: Implementation, spec: object, target: Target) -> Any:
    """The config of an implementation's heuristic, found once: a search of tiles takes longer than a small call."""
    assert impl.heuristic is not None
    return impl.heuristic(spec, target)


def _of_the_module(text: str) -> str:
    """What is said once of all operations, where their native kernels are missing together; others as they are."""
    missing = ffi.why_not()
    return text if missing is None or missing not in text else f"{missing} Until then XLA runs in their place, slower."


@functools.cache
def _warn_once(text: str) -> None:
    callers.warn(text, FallbackWarning)
