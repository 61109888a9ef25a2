"""`explain`: which kernel runs for every op in a function, with which tiles, and why the others do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vishwamai.core.arguments import checked
from vishwamai.core.config import ambient_target, current_config, kernel_config, without_effect
from vishwamai.core.observe import record
from vishwamai.core.op import CallPlan
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What becomes of one implementation in one call of an op.

    Attributes:
      implementation: its name.
      platform: the platform it is written for, or "any".
      runs: it is the one that runs.
      reason: why it does not run; or, of the one that runs, its config and notes.
    """

    implementation: str
    platform: str
    runs: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class CallExplanation:
    """One call of an op: its spec and a verdict on every implementation."""

    op: str
    spec: Any
    verdicts: tuple[Verdict, ...]

    @property
    def runs(self) -> str:
        """Name of the implementation that runs."""
        return next(v.implementation for v in self.verdicts if v.runs)

    def __str__(self) -> str:
        width = max(len(v.implementation) for v in self.verdicts)
        lines = [f"{self.op}: {self.spec}"]
        lines += [f"  {'->' if v.runs else '  '} {v.implementation:{width}}  {v.reason}" for v in self.verdicts]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every op call in a function, in order, for one platform (and chip). Printing it gives the table.

    `notes` are sentences about the calls (how one is spread over devices), and about what in the ambient config can
    have no effect here.
    """

    platform: str
    chip: str | None
    calls: tuple[CallExplanation, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, target: Target, calls: tuple[CallExplanation, ...]) -> Explanation:
        """The explanation of calls on a target, with what in the ambient config can have no effect there."""
        chip = target.chip.name if target.chip else None
        return cls(target.platform, chip, calls, without_effect(current_config(), target.platform))

    def __str__(self) -> str:
        where = f"{self.platform} ({self.chip})" if self.chip else self.platform
        if not self.calls:
            return f"On {where}: the function calls no vishwamai operation."
        return "\n".join([f"On {where}:", *map(str, self.calls), *(f"note: {note}" for note in self.notes)])


@checked
def explain(function: Callable[..., object], *args: object, target: str | None = None, **kwargs: object) -> Explanation:
    """Lists every implementation of every op in `function`, which one runs and why the others do not. Nothing is
    computed.

    Args:
      function: any traceable function, jitted or not, gradients included.
      *args: arrays or `jax.ShapeDtypeStruct`s.
      target: device to explain for: a TPU ("v5e"), a GPU ("h100", "sm_90") or a CPU ("cpu:avx2"); None means the
        ambient target, else the default backend.

    >>> import jax, jax.numpy as jnp, vishwamai
    >>> x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    >>> explain(vishwamai.rms_norm, x, target="v5e").calls[0].runs
    'pallas_tpu'
    >>> explain(vishwamai.rms_norm, x, target="h100").calls[0].runs
    'triton'
    """
    overrides = {} if target is None else {"target": target}
    with kernel_config(current_config(), **overrides):
        # A fallback is what the caller asks about here, so strict mode must not stop the answer.
        with kernel_config(strict=False):
            trace = record(function, *args, **kwargs)
        where = ambient_target()
        explanation = Explanation.of(where, tuple(explain_call(plan, where) for plan in trace.plans))
        return dataclasses.replace(explanation, notes=(*dict.fromkeys(trace.notes), *explanation.notes))


def _kept_wide(plan: CallPlan) -> tuple[str, ...]:
    """Says so where `use_bfloat16` or `use_fp16` was set and the op keeps float32 nevertheless."""
    setting = next((name for name in ("use_bfloat16", "use_fp16", "use_fp8") if getattr(current_config(), name)), None)
    operands = zip(plan.spec.operands._fields, plan.spec.operands, strict=True)
    wide = [name for name, x in operands if x is not None and x.dtype.name == "float32"]
    return (f"{setting} leaves {', '.join(wide)} in float32",) if setting and wide else ()


def explain_call(plan: CallPlan, target: Target) -> CallExplanation:
    """The verdicts on one call of an op whose plan is made."""
    choice = plan.choice(target.platform)
    verdicts = []
    for impl in plan.op.implementations:
        runs = impl is choice.implementation
        if runs:
            notes = [] if choice.config is None else [str(choice.config)]
            if isinstance(choice.config, Tiles) and (short := choice.config.shortage(plan.spec, target)) is not None:
                notes.append(short)
            reason = "; ".join(["runs", *notes, *impl.notes(plan.spec, target), *_kept_wide(plan)])
        else:
            declined = impl.why_not(plan.spec, target.on(impl.platform))
            if impl.platform not in (target.platform, None):
                reason = f"is for {impl.platform}" + (f"; there: {declined}" if declined else "")
            elif not impl.is_for(target):
                reason = "is JAX code, which torch's tensors on a GPU do not pass through"
            elif declined is not None:
                reason = f"declines: {declined}"
            elif plan.implementation is None and (passes := impl.why_not_default(plan.spec, target)) is not None:
                reason = f"could serve, but only if it is asked for by name: {passes}"
            elif plan.implementation is not None:
                reason = f"could serve, but {plan.implementation!r} was asked for"
            else:
                reason = f"could serve, but {choice.implementation.name!r} is preferred"
        verdicts.append(Verdict(impl.name, impl.platform or "any", runs, reason))
    return CallExplanation(plan.op.name, plan.spec, tuple(verdicts))
