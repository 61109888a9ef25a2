"""The cross entropy of a linear layer on the CPU: the native kernels of `cpu_loss.isa.cc`; the logits are never held,
forward or backward.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from vishwamai.core import ffi
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray
from vishwamai.ops.loss.chunked import forward_by, gradients_by
from vishwamai.ops.loss.spec import WITHOUT_TARGETS, LossSpec, Operands, Outputs

TOTAL = "vishwamai_loss_total"


def why_not(spec: LossSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.operands.targets is not None:
        return WITHOUT_TARGETS
    if spec.groups * spec.tokens == 0:
        return "there are no tokens."
    return ffi.why_not(target)


def notes(spec: LossSpec, target: Target) -> tuple[str, ...]:
    return ("float16 is computed through float32 copies",) if spec.operands.x.dtype == jnp.float16 else ()


def _native(spec: LossSpec, x: AnyArray, weight: AnyArray, bias: AnyArray) -> tuple[AnyArray, ...]:
    """x and weight in the kernel's dtype, bias in that of the sums."""
    dtype = spec.operands.x.dtype
    storage = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype
    return x.astype(storage), weight.astype(storage), None if bias is None else bias.astype(spec.accumulator)


def _attributes(spec: LossSpec) -> dict[str, Any]:
    return {"softcap": np.float64(spec.softcap or 0.0), "parts": np.int64(2 if spec.precision == "high" else 3)}


def forward(spec: LossSpec, operands: Operands) -> tuple[Outputs, None]:
    """The forward pass; its outputs are all that the backward pass needs."""

    def group_outputs(x: AnyArray, weight: AnyArray, bias: AnyArray, labels: AnyArray) -> Outputs:
        rows = ffi.result(labels.shape, spec.accumulator)
        total = rows if spec.logit_sum else ffi.result(None, spec.accumulator)
        results = ffi.call(
            "vishwamai_loss_forward", (rows, rows, total), *_native(spec, x, weight, bias), labels, **_attributes(spec)
        )
        return Outputs(*results)

    return forward_by(spec, group_outputs, operands), None


def backward(spec: LossSpec, operands: Operands, outputs: Outputs, cotangents: Outputs) -> Operands:
    """Every logit is computed once more, and once only."""

    def group_gradients(
        x: AnyArray, weight: AnyArray, bias: AnyArray, labels: AnyArray, *rows: AnyArray
    ) -> tuple[AnyArray, AnyArray, AnyArray]:
        native = _native(spec, x, weight, bias)
        results = tuple(
            ffi.result(None if a is None else a.shape, spec.accumulator if a is None else a.dtype) for a in native
        )
        dx, dweight, dbias = ffi.call(
            "vishwamai_loss_backward",
            results,
            *native,
            labels,
            *rows,
            *(() if spec.logit_sum else (None,)),
            **_attributes(spec),
        )
        return dx.astype(x.dtype), dweight.astype(weight.dtype), None if bias is None else dbias.astype(bias.dtype)

    return gradients_by(spec, group_gradients, operands, outputs, cotangents)


def total_with_gradients(
    spec: LossSpec,
    x: AnyArray,
    weight: AnyArray,
    bias: Any,
    labels: AnyArray,
    shares: AnyArray,
    label_smoothing: float,
    z_loss: float,
    *,
    of_weight: bool,
) -> list[AnyArray]:
    """(loss, dx, dweight, dbias) of the sum of `shares` times the losses, all in the accumulation dtype.

    Args:
      spec: its options; any number of tokens.
      x, weight, bias, labels: operands of one group.
      shares: `[tokens]`, in the accumulation dtype; a token whose share is 0 is not computed.
      label_smoothing, z_loss: options of `linear_cross_entropy`.
      of_weight: bool, False leaves dweight out (None).
    """
    native, acc = _native(spec, x, weight, bias), spec.accumulator
    shapes = [(), x.shape, weight.shape if of_weight else None, None if bias is None else bias.shape]
    attributes = {**_attributes(spec), "smoothing": np.float64(label_smoothing), "z_loss": np.float64(z_loss)}
    return ffi.call(TOTAL, [ffi.result(shape, acc) for shape in shapes], *native, labels, shares, **attributes)


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
