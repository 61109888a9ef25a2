"""An operation and its implementations: one meaning, several kernels, and the choice between them.

`Op.__call__` builds a `Plan` (the spec, and for every platform the implementation and its config), which `core.execute`
runs. The choice asks each implementation in order for its `why_not`, so no exception drives control flow.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import jax
from jax.core import Tracer

from vishwamai.core import execute, sharding, triton_call, tuning
from vishwamai.core.config import KernelConfig, ambient_chip, ambient_platform, current_config
from vishwamai.core.errors import DeviceError, FallbackWarning, KernelError, UnsupportedError, VishwamaiError
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
      torch_only: it is chosen for torch tensors; for JAX arrays only when it is asked for by name, since XLA's own code is as good there.
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
    torch_only: bool = False


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
    # What the caller asked for, kept so that a folded or sharded call chooses again under the same wishes.
    config: Any = None
    implementation: str | None = None

    def choice(self, platform: str) -> Choice:
        """What runs on `platform`."""
        return next((choice for choice in self.choices if choice.platform == platform), self.choices[-1])


class Op(Generic[S]):
    """An operation: its name, its implementations in order of preference, its factor rule.

    Args:
      name: the operation's name, as `explain` and the tuning tables call it.
      implementations: in order of preference. The last one must serve every legal spec on every platform.
      axes: `(spec, arguments, results) -> Axes`: the factor rule of the forward (arguments: operands) or the backward pass (arguments: operands,
        outputs, residuals, cotangents; results: gradients).
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
        """Runs the op on operands that the spec has already checked; returns its outputs.

        Raises:
          UnsupportedError: what `plan` raises; or forward-mode differentiation of an implementation that has a gradient only; or the
            implementation asked for is for another platform than the arrays'.
          DeviceError: the operands are committed to different devices.
        """
        plan = self.plan(spec, config=config, implementation=implementation)
        _record(plan)
        try:
            return execute.run(plan, sharding.match_varying(operands))
        except TypeError as error:
            if "forward-mode autodiff" not in str(error):
                raise
            able = [repr(impl.name) for impl in self.implementations if impl.autodiff]
            raise UnsupportedError(
                f"{self.name}: its kernels have a gradient (jax.grad, jax.vjp) but no forward mode (jax.jvp, jax.jacfwd, jax.hessian); "
                f"for that pass implementation={' or '.join(able)}, which JAX differentiates itself."
            ) from error
        except (ValueError, NotImplementedError) as error:  # jax's own, of arrays that no one program can take
            if isinstance(error, VishwamaiError):
                raise
            self._check_devices(operands, error)
            if implementation is not None and ("interpret mode" in str(error) or "translation rule" in str(error)):
                raise UnsupportedError(
                    f"{self.name}: {implementation!r} is for {self._named(implementation).platform}, and this program is compiled for another "
                    "platform; pass implementation=None to let the library choose."
                ) from error
            raise

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
        plan = Plan(self, spec, choices, config, implementation)
        if _RECORDING.value is None:  # whoever asks what would run is told so by the answer; the warning is for the run
            self._report_fallback(plan, ambient)
        return plan

    def _check_devices(self, operands: Any, error: Exception) -> None:
        """Raises the error that names them if the operands are committed to different devices."""
        devices: dict[frozenset[Any], str] = {}
        for name, x in zip(operands._fields, operands, strict=True):
            if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed:
                devices.setdefault(frozenset(x.sharding.device_set), name)
        if len(devices) > 1:
            (a, first), (b, second), *_ = devices.items()
            where = [", ".join(sorted(map(str, ids))[:4]) + (", ..." if len(ids) > 4 else "") for ids in (a, b)]
            raise DeviceError(
                f"{self.name}: `{first}` is on {where[0]}, but `{second}` on {where[1]}; bring them together, for instance by "
                f"jax.device_put({second}, {first}.sharding)."
            ) from error

    def choose(
        self,
        spec: S,
        platform: str,
        *,
        config: Any = None,
        implementation: str | None = None,
        architecture: str | None = None,
    ) -> Choice:
        """What runs on `platform`, whatever this machine's own is: for arrays that bring their device with them, as torch's do.

        Args:
          architecture: of the GPU that they are on ("sm_90"), by which tuned tiles are looked up.

        Raises:
          UnsupportedError: the implementation asked for does not exist, is for another platform, or declines the spec.
        """
        ambient, chip = current_config(), ambient_chip() if platform == "tpu" else None
        self._check_config(config)
        implementation = implementation or ambient.implementation
        if implementation is None or (implementation == ambient.implementation and not self._has(implementation)):
            return self._choose(spec, platform, config, chip, ambient, torch=True, architecture=architecture)
        chosen = self._named(implementation)
        if chosen.platform not in (platform, None):
            raise UnsupportedError(
                f"{self.name}: {implementation!r} is for {chosen.platform}, and the arrays are on {platform}."
            )
        reason = chosen.why_not(spec, chip)
        if reason is not None:
            raise UnsupportedError(f"{self.name}: implementation {implementation!r} cannot serve this call: {reason}")
        return Choice(platform, chosen, self._config(chosen, spec, config, chip, ambient, architecture))

    def _has(self, name: str) -> bool:
        return any(impl.name == name for impl in self.implementations)

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

    def _config(
        self,
        impl: Implementation[S],
        spec: S,
        wanted: Any,
        chip: Chip | None,
        ambient: KernelConfig,
        architecture: str | None = None,
    ) -> Any:
        if impl.heuristic is None or impl.config_type is None:
            return None
        if isinstance(wanted, impl.config_type):
            return wanted
        block_size = wanted if isinstance(wanted, int) else ambient.block_size
        if block_size is not None:
            return impl.heuristic(spec, chip).with_block_size(block_size)
        where: Chip | str | None = chip
        if impl.platform == "cuda":
            where = (architecture or f"sm_{triton_call.architecture()}") if tuning.has_gpus() else None
        tuned = tuning.lookup(self.name, impl.name, where, spec, impl.config_type) if ambient.auto_optimize else None
        return tuned or impl.heuristic(spec, chip)

    def _choose(
        self,
        spec: S,
        platform: str | None,
        wanted: Any,
        chip: Chip | None,
        ambient: KernelConfig,
        torch: bool = False,
        architecture: str | None = None,
    ) -> Choice:
        refused = []
        for impl in self.implementations:
            if impl.platform not in (platform, None) or (impl.torch_only and not torch):
                continue
            reason = impl.why_not(spec, chip)
            if reason is None:
                found = self._config(impl, spec, wanted, chip, ambient, architecture)
                return Choice(platform, impl, found, tuple(refused))
            refused.append((impl.name, reason))
        raise AssertionError(
            f"{self.name}: no implementation serves {spec} on {platform}; the last one must serve everything. Refused: {refused}"
        )

    def _report_fallback(self, plan: Plan, ambient: KernelConfig) -> None:
        """Warns once, or raises in strict mode, if a kernel written for the ambient platform declined."""
        platform = ambient_platform()
        choice = plan.choice(platform)
        for name, reason in choice.refused:
            if self._named(name).platform != platform:
                continue
            text = f"{self.name}: {name!r} declined, so {choice.implementation.name!r} runs on {platform}: {reason}"
            if ambient.strict:
                raise UnsupportedError(f"{text} (strict mode: `KernelConfig(strict=True)` forbids the fallback)")
            _warn_once(text)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """`stacklevel` of the nearest line that is neither ours nor jax's: the one the caller wrote."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("vishwamai", "jax"):
        frame, level = frame.f_back, level + 1
    return level


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
