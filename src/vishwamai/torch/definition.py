"""Tangents of an op's outputs and of its gradients, by JAX's forward mode of the op's definition (its last
implementation, plain `jax.numpy`), on the CPU. Tensors of a GPU are copied there and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from torch import Tensor

from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Op
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.torch import bridge


def outputs_tangent(op: Op[Any], spec: object, operands: PyTree, directions: object) -> Any:
    """The tangents of the outputs.

    Args:
      op: operation to compute.
      spec: the operands' spec.
      operands: tensors in the op's layout.
      directions: their tangents, None for an operand that has none.
    """
    return _computed(_outputs_tangent(op, spec), operands, directions)


def gradients_tangent(
    op: Op[Any], spec: object, operands: PyTree, directions: object, cotangents: PyTree, cotangent_directions: object
) -> Any:
    """The tangents of the operands' gradients; the arguments are those of `outputs_tangent`, and the cotangents of the
    outputs with their tangents, None for those that are zero.
    """
    return _computed(_gradients_tangent(op, spec), operands, directions, cotangents, cotangent_directions)


def _computed(function: Callable[..., object], operands: PyTree, *more: object) -> Any:
    """The function's results on the device of the operands."""
    device = operands[0].device
    results = bridge.on_cpu(function, *jax.tree.map(Tensor.cpu, (operands, *more)))
    return results if device.type == "cpu" else jax.tree.map(lambda y: y.to(device), results)


def _definition(op: Op[Any], spec: object) -> Callable[[Any], Any]:
    last = op.implementations[-1]
    config = op.choose(spec, bridge.cpu_target(), implementation=last.name).config
    return lambda operands: last.forward(spec, config, operands, False)[0]


def _moving(operands: PyTree, directions: Any) -> Any:
    """The operands that have a tangent, None in place of the others."""
    return type(operands)(*(None if t is None else x for x, t in zip(operands, directions, strict=True)))


def _merged(operands: PyTree, moving: Any) -> Any:
    return type(operands)(*(x if m is None else m for x, m in zip(operands, moving, strict=True)))


@functools.lru_cache(maxsize=1024)
def _outputs_tangent(op: Op[Any], spec: object) -> Callable[..., Any]:
    run = _definition(op, spec)

    def tangent(operands: object, directions: object) -> Any:
        function = lambda moving: run(_merged(operands, moving))  # noqa: E731
        return jax.jvp(function, (_moving(operands, directions),), (directions,))[1]

    return jax.jit(tangent)


@functools.lru_cache(maxsize=1024)
def _gradients_tangent(op: Op[Any], spec: object) -> Callable[..., Any]:
    run = _definition(op, spec)
    backward = autodiff_backward(lambda operands: (run(operands), None))

    def filled(values: Any, shapes: Any) -> Any:
        pairs = zip(values, shapes, strict=True)
        return type(shapes)(*(jnp.zeros(y.shape, y.dtype) if x is None and y is not None else x for x, y in pairs))

    def tangent(operands: object, directions: object, cotangents: AnyArray, cotangent_directions: object) -> Any:
        outputs = jax.eval_shape(run, operands)
        cotangents, cotangent_directions = filled(cotangents, outputs), filled(cotangent_directions, outputs)

        def gradients(moving: object, cotangents: PyTree) -> Any:
            return backward(spec, None, _merged(operands, moving), cotangents)

        primals = _moving(operands, directions), cotangents
        return jax.jvp(gradients, primals, (directions, cotangent_directions))[1]

    return jax.jit(tangent)
