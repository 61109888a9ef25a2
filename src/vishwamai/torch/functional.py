"""An operator under `torch.func` and forward-mode differentiation, which torch's custom operators lack.

`Functions` are an operator's two functions of autograd with all that `torch.func` asks for: a context that is set up
apart, rules of `vmap`, and tangents. Tangents come from the op's definition (`definition.py`) by two further custom
operators, so that they can be traced and mapped, too. A second derivative by reverse mode, and a tangent's own
derivative, are errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.torch import batching, bridge
from vishwamai.torch.operator_rules import returned
from vishwamai.torch.torch_private import only_computes


class Functions:
    """The functions of one `TorchOperator`."""

    def __init__(self, operator: Any):
        self._of = operator
        self._count = len(operator.kind._fields)
        gradient, setup = bridge.with_the_calls_config(self._gradient, self._setup)
        self.forward = _function(operator.name, self._run, setup, gradient, self._tangents, self._vmap)
        self._of_backward = _function(
            f"{operator.name}_backward",
            self._run_backward,
            self._setup_backward,
            operator._no_second_gradient,
            self._backward_tangents,
            self._vmap_backward,
        )

    def _run(self, *arguments: Any) -> Any:
        of = self._of
        return (of._forward if only_computes(arguments[: self._count]) else of._forward_op)(*arguments)

    def _setup(self, ctx: Any, inputs: tuple[object, ...], output: Any) -> None:
        """Everything is saved: a tangent of the gradient is a function of the operands, whatever the kernels read."""
        of, outputs = self._of, output if isinstance(output, tuple) else (output,)
        tensors = inputs[: self._count]
        ctx.options, ctx.total = inputs[self._count :][: len(of.options)], len(inputs)
        ctx.present = tuple(x is not None for x in tensors)
        ctx.saved, zeros = of._plan_saving(ctx.present, ctx.options, of._keep(inputs))
        ctx.zeros = [needs and (y.shape, y.dtype, y.device) for y, needs in zip(outputs, zeros, strict=False)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[len(of.outputs._fields) :])
        ctx.save_for_backward(*outputs, *tensors)
        ctx.save_for_forward(*outputs, *tensors)

    def _gradient(self, ctx: Any, *cotangents: PyTree) -> tuple[Any, ...]:
        of = self._of
        if not of.gradients:
            return of.backward(ctx, *cotangents)

        def backward(*arguments: Any) -> Any:
            return self._of_backward.apply(*arguments, *ctx.saved_tensors[-self._count :])

        saved = [x if needed else None for x, needed in zip(ctx.saved_tensors, ctx.saved, strict=True)]
        return of._cotangents_of(ctx, cotangents, saved, backward)

    def _tangents(self, ctx: Any, *tangents: PyTree) -> Any:
        of, results = self._of, len(self._of._results)
        if not of.gradients:
            return of.backward(ctx)
        directions = [None if t is None or not t.is_floating_point() else t for t in tangents[: self._count]]
        if all(t is None for t in directions):
            return (None,) * results if results > 1 else None
        results_tangents = self._tangents_op(*ctx.saved_tensors[-self._count :], *directions, *ctx.options)
        results_tangents = results_tangents if isinstance(results_tangents, tuple) else (results_tangents,)
        return returned([*results_tangents, *[None] * (results - len(results_tangents))])

    def _vmap(self, info: object, in_dims: Sequence[object], *arguments: object) -> Any:
        of = self._of
        roles = None if of.one_by_one else of._roles
        return batching.mapped(self.forward.apply, roles, self._count, info, in_dims, arguments)

    def _run_backward(self, *arguments: object) -> Any:
        of, primals = self._of, arguments[: -self._count]
        return (of._backward if only_computes(primals[: len(of._backward_fields)]) else of._backward_op)(*primals)

    def _setup_backward(self, ctx: Any, inputs: tuple[object, ...], output: Any) -> None:
        of, outs = self._of, len(self._of.outputs._fields)
        ctx.set_materialize_grads(False)
        ctx.rest = inputs[len(of._backward_fields) : -self._count]
        ctx.save_for_forward(*inputs[:outs], *inputs[-self._count :])

    def _backward_tangents(self, ctx: Any, *tangents: PyTree) -> Any:
        outs = len(self._of.outputs._fields)
        directions = (*tangents[:outs], *tangents[-self._count :])
        directions = [None if t is None or not t.is_floating_point() else t for t in directions]
        return self._backward_tangents_op(*ctx.saved_tensors, *directions, *ctx.rest)

    def _vmap_backward(self, info: object, in_dims: Sequence[object], *arguments: object) -> Any:
        of, count = self._of, len(arguments) - self._count
        if not only_computes(()):  # another transform is around this one, and differentiates the operands
            return batching.mapped(self._of_backward.apply, None, 0, info, in_dims, arguments)
        roles = None if of.one_by_one else of._backward_roles
        mapped_call = info, in_dims[:count], arguments[:count]
        return batching.mapped(of._backward_op, roles, len(of._backward_fields), *mapped_call)

    @functools.cached_property
    def _tangents_op(self) -> Any:
        of, fields = self._of, self._of.kind._fields
        tensors = [f"Tensor? {n}" for n in fields] + [f"Tensor? t_{n}" for n in fields]

        def run(*arguments: object) -> Any:
            x, t = (of.kind(*arguments[start:][: self._count]) for start in (0, self._count))
            return of._outputs_tangent(x, t, arguments[2 * self._count :])

        def fake(*arguments: object) -> Any:
            keep = (False,) if of.residuals else ()
            shapes = of._fake(*arguments[: self._count], *arguments[2 * self._count :], *keep)
            return returned(shapes[: len(of.outputs._fields)]) if isinstance(shapes, tuple) else shapes

        return self._registered("tangents", tensors, of._option_texts, len(of.outputs._fields), run, fake)

    @functools.cached_property
    def _backward_tangents_op(self) -> Any:
        of, outs = self._of, len(self._of.outputs._fields)
        fields = [*(f"d_{n}" for n in of.outputs._fields), *(f"x_{n}" for n in of.kind._fields)]
        tensors = [f"Tensor? {n}" for n in fields] + [f"Tensor? t_{n}" for n in fields]
        rest = [*of._option_texts, *(f"bool of_{n}" for n in of.lazy)]

        def run(*arguments: object) -> Any:
            size = len(fields)
            sides = arguments[:size], arguments[size : 2 * size]
            of_outputs = [of.outputs(*side[:outs]) for side in sides]
            of_operands = [of.kind(*side[outs:]) for side in sides]
            options = arguments[2 * size :][: len(of.options)]
            return of._gradients_tangent(*of_outputs, *of_operands, options, of._unwanted(arguments))

        def fake(*arguments: object) -> Any:
            absent = (None,) * len(of._results)
            primals = (*arguments[:outs], *absent, *arguments[outs : len(fields)], *arguments[2 * len(fields) :])
            return of._fake_backward(*primals)

        return self._registered("backward_tangents", tensors, rest, len(of.gradients), run, fake)

    def _registered(
        self, name: str, tensors: list[str], rest: list[str], results: int, run: Callable[..., object], fake: object
    ) -> Any:
        of = self._of
        op = of._custom_op(f"{of.name}_{name}", run, of._schema([*tensors, *rest], results), fake)
        batching.register(op, None, 0)

        def forward(*arguments: object) -> Any:
            return (run if only_computes(arguments[: len(tensors)]) else op)(*arguments)

        def no_derivative(ctx: object, *directions: object) -> Any:
            raise UnsupportedError(
                f"{of.op.name}: torch asks for the derivative of a tangent, which it has not; take second derivatives "
                "forward over reverse (torch.func.hessian)."
            )

        def vmap(info: object, in_dims: Sequence[object], *arguments: object) -> Any:
            return batching.mapped(function.apply, None, 0, info, in_dims, arguments)

        function = _function(op._name, forward, lambda ctx, inputs, output: None, no_derivative, no_derivative, vmap)
        return function.apply


def _function(name: str, forward: Any, setup: Any, backward: Any, jvp: Any, vmap: Any) -> Any:
    members = dict(forward=forward, setup_context=setup, backward=backward, jvp=jvp, vmap=vmap)
    return type(name, (torch.autograd.Function,), {n: staticmethod(f) for n, f in members.items()})
