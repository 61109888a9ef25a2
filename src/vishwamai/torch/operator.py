"""An `Op` as two custom operators of torch, `vishwamai::<name>` and `vishwamai::<name>_backward`, derived from what the
op states of itself.

The operators take the caller's own tensors, of any rank, so that `torch.vmap` and DTensor can fold or split any leading
axis. Their schemas come from the op's `Operands` and from the options of `describe`; shapes, axes and gradients from
the `Signature`.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vishwamai.core import dims
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.signature import op_shape
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.torch import batching, bridge, definition, sharding
from vishwamai.torch.functional import Functions
from vishwamai.torch.launch import torch_dtype
from vishwamai.torch.operator_rules import Declared, returned
from vishwamai.torch.torch_private import is_transformed, only_computes

if TYPE_CHECKING:
    import numpy as np


_TYPES: dict[object, str] = {
    str: "str",
    bool: "bool",
    int: "SymInt",
    float: "float",
    list: "SymInt[]",
    tuple: "SymInt[]",
}


def _schema_type(hint: object) -> str:
    absent = type(None) in typing.get_args(hint)
    of = next(member for member in typing.get_args(hint) if member is not type(None)) if absent else hint
    kind = typing.get_origin(of) or of
    return ("str" if kind is typing.Literal else _TYPES[kind]) + "?" * absent


class _Prepared(NamedTuple):
    """What is known of a call from its tensors' shapes and dtypes and from its options."""

    spec: Any
    operands: list[Any]  # (shape in the op's layout, dtype to cast to or None), or None
    results: list[Any]  # shapes of outputs and residuals for the caller
    op_shapes: list[Any]  # their shapes in the op's layout


class TorchOperator(Declared):
    """The operators of an op, made of what `Declared` lists. Called with tensors, one for each operand, and the options
    of `describe`, it returns all outputs, None where there is none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cached = functools.lru_cache(maxsize=4096)(self._prepare)
        self._planned = functools.lru_cache(maxsize=4096)(self._plan_saving)
        self._option_texts = [f"{_schema_type(hint)} {option}" for option, hint in self.option_types.items()]
        self._register(self._option_texts)
        self._functions = Functions(self)

    @staticmethod
    def _schema(arguments: Iterable[str], results: int) -> str:
        returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        return f"({', '.join(arguments)}) -> {returns}"

    @staticmethod
    def _custom_op(name: str, function: Callable[..., object], schema: str, fake: Callable[..., object]) -> Any:
        # The schema is given, so the function need not have its signature.
        op: Any = torch.library.custom_op(f"vishwamai::{name}", function, mutates_args=(), schema=schema)
        op.register_fake(fake)
        return op

    def _register(self, options: list[str]) -> None:
        absent = dims.optional(self.kind)
        tensors = [f"Tensor{'?' * a} {n}" for n, a in zip(self.kind._fields, absent, strict=True)]
        keep = ["bool keep"] if self.residuals else []
        schema, custom_op = self._schema, self._custom_op
        self._forward_op = custom_op(
            self.name, self._forward, schema([*tensors, *options, *keep], len(self._results)), self._fake
        )
        batching.register(self._forward_op, None if self.one_by_one else self._roles, len(self.kind._fields))
        if not self.gradients:
            self._forward_op.register_autograd(self.backward)
            return
        optional = [f"Tensor? {n}" for n in self._backward_fields]
        self._backward_op = custom_op(
            f"{self.name}_backward",
            self._backward,
            schema([*optional, *options, *(f"bool of_{n}" for n in self.lazy)], len(self.gradients)),
            self._fake_backward,
        )
        gradient, setup = bridge.with_the_calls_config(self._gradient, self._setup)
        self._forward_op.register_autograd(gradient, setup_context=setup)

        def forward(ctx: object, *arguments: PyTree) -> PyTree:
            results = self._forward(*arguments)
            setup(ctx, arguments, results)
            return results

        # With `setup_context` torch would inspect the signature of `forward` at every call.
        members = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
        self._function: Any = type(self.name, (torch.autograd.Function,), members)
        self._backward_op.register_autograd(self._no_second_gradient)
        batching.register(
            self._backward_op, None if self.one_by_one else self._backward_roles, len(self._backward_fields)
        )
        sharding.RULES[self.name] = functools.partial(self._rule, False)
        sharding.RULES[f"{self.name}_backward"] = functools.partial(self._rule, True)

    def __call__(self, *arguments: PyTree) -> PyTree:
        tensors = arguments[: len(self.kind._fields)]
        transformed = is_transformed(tensors)
        differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if self.residuals:
            arguments = (*arguments, differentiable or transformed)
        if transformed:
            results = self._functions.forward.apply(*arguments)
        elif not only_computes(tensors) or (differentiable and not self.gradients):
            results = self._forward_op(*arguments)
        elif differentiable:  # the same without the dispatcher, whose way takes longer than many a kernel
            results = self._function.apply(*arguments)
        else:
            results = self._forward(*arguments)
        return results if len(self._results) > 1 else (results,)

    def _prepare(self, shapes_and_dtypes: tuple[tuple[Any, Any] | None, ...], options: tuple[Any, ...]) -> _Prepared:
        operands = self.kind(
            *(None if x is None else ArraySpec(tuple(x[0]), _jax_dtype(x[1])) for x in shapes_and_dtypes)
        )
        spec = self.describe(operands, *options)
        laid = [
            None if x is None else (stored.shape, None if x.dtype == stored.dtype else torch_dtype(stored.dtype))
            for x, stored in zip(operands, spec.operands, strict=True)
        ]
        shapes = self._shapes(spec, operands, True)
        if self.own_shapes is not None:
            return _Prepared(spec, laid, shapes, self.own_shapes(spec))
        named = hasattr(self.residuals, "_fields")
        own_texts = [*spec.dims(self.outputs), *(spec.dims(type(self.residuals)) if named else [self.op.residual])]
        results = zip(self._result_texts(spec, True), own_texts, shapes, strict=False)
        op_shapes = [None if text is None else op_shape(text, of_op, tuple(shape)) for text, of_op, shape in results]
        return _Prepared(spec, laid, shapes, op_shapes)

    def _prepared(self, tensors: Any, options: Sequence[object]) -> _Prepared:
        shapes_and_dtypes = tuple([None if x is None else (x.shape, x.dtype) for x in tensors])
        return self._cached(shapes_and_dtypes, _hashable(options))

    def _packed(self, prepared: _Prepared, tensors: Any) -> Any:
        """The caller's tensors in the op's layout."""
        if self.pack is not None:
            return self.pack(prepared.spec, tensors)
        operands = []
        for x, laid in zip(tensors, prepared.operands, strict=True):
            if x is not None:
                shape, cast = laid
                x = (x if cast is None else x.to(cast)).contiguous().view(shape)
            operands.append(x)
        return self.kind(*operands)

    def _forward(self, *arguments: PyTree) -> PyTree:
        count = len(self.kind._fields)
        tensors, options = self.kind(*arguments[:count]), arguments[count : count + len(self.options)]
        if self.forward is not None:
            return self.forward(tensors, options)
        prepared = self._prepared(tensors, options)
        plan = bridge.choose(self.op, prepared.spec, tensors[0])
        outputs, residuals = bridge.forward(plan, self._packed(prepared, tensors), self._keep(arguments))
        results = list(outputs)
        if self.residuals:
            of = residuals if isinstance(residuals, tuple) else (residuals,)
            results += [None] * len(self.residuals) if residuals is None else of
        pairs = zip(results, prepared.results, strict=True)
        return returned([tensors[0].new_empty(0) if y is None else y.reshape(shape) for y, shape in pairs])

    def _plan_saving(
        self, present: tuple[bool, ...], options: tuple[Any, ...], keep: bool
    ) -> tuple[list[bool], list[bool | None]]:
        """(which outputs, residuals and operands the backward pass keeps, whether each output's cotangent must be
        there; None without an output).
        """
        call = self._call((*(True if is_present else None for is_present in present), *options))
        texts = self._result_texts(call, keep)
        needed = set(self.saves(call))
        saved = [text is not None and n in needed for n, text in zip(self._results, texts, strict=True)]
        saved += [is_present and n in needed for n, is_present in zip(self.kind._fields, present, strict=True)]
        # Zeros for an absent cotangent cost an array: only where the op needs them.
        outputs = zip(self.outputs._fields, texts, strict=False)
        return saved, [None if text is None else n not in self.optional for n, text in outputs]

    def _setup(self, ctx: Any, inputs: tuple[AnyArray, ...], output: PyTree) -> None:
        count = len(self.kind._fields)
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.options, ctx.total = inputs[count : count + len(self.options)], len(inputs)
        ctx.present = tuple([x is not None for x in inputs[:count]])
        keep = self._keep(inputs)
        try:
            saved, zeros = self._planned(ctx.present, _hashable(ctx.options), keep)
        except TypeError:  # an option that is a symbol
            saved, zeros = self._plan_saving(ctx.present, ctx.options, keep)
        ctx.zeros = [needs and (y.shape, y.dtype, y.device) for y, needs in zip(outputs, zeros, strict=False)]
        ctx.set_materialize_grads(False)
        tensors = (*outputs, *inputs[:count])
        ctx.save_for_backward(*[x if needed else None for x, needed in zip(tensors, saved, strict=True)])

    def _gradient(self, ctx: Any, *cotangents: AnyArray) -> tuple[AnyArray, ...]:
        def backward(*arguments: AnyArray) -> PyTree:
            tensors = arguments[: len(self._backward_fields)]
            direct = not torch.is_grad_enabled() and only_computes(tensors)
            return (self._backward if direct else self._backward_op)(*arguments)

        return self._cotangents_of(ctx, cotangents, ctx.saved_tensors, backward)

    def _cotangents_of(
        self, ctx: Any, cotangents: Sequence[PyTree], saved: Sequence[PyTree], backward: Callable[..., Any]
    ) -> tuple[AnyArray, ...]:
        """The cotangents of the forward operator's arguments; `backward` is called as the backward operator."""
        cotangents = cotangents[: len(self.outputs._fields)]  # only the gradient reads the residuals
        if all(c is None for c in cotangents):
            return (None,) * ctx.total
        nonzero = []
        for cotangent, zero in zip(cotangents, ctx.zeros, strict=True):
            if cotangent is None and zero:
                cotangent = torch.zeros(zero[0], dtype=zero[1], device=zero[2])
            nonzero.append(None if zero is None else cotangent)
        flags = [ctx.present[i] and ctx.needs_input_grad[i] for i in map(self.kind._fields.index, self.lazy)]
        results = backward(*nonzero, *saved, *ctx.options, *flags)
        gradients = dict(zip(self.gradients, results if len(self.gradients) > 1 else (results,), strict=True))
        of = [
            gradients.get(str(self.same.get(n, n))) if is_present else None
            for n, is_present in zip(self.kind._fields, ctx.present)
        ]
        of = [g if need else None for g, need in zip(of, ctx.needs_input_grad, strict=False)]
        return (*of, *(None,) * (ctx.total - len(of)))

    def _no_second_gradient(self, ctx: object, *cotangents: object) -> Any:
        raise UnsupportedError(
            f"{self.op.name}: torch asks for a second derivative, and its kernels have the first only; differentiate "
            "once (create_graph=False), or use JAX's function of the same name, whose gradient JAX differentiates."
        )

    def _backward(self, *arguments: AnyArray) -> PyTree:
        cotangents, outputs, residuals, tensors, options = self._parts(arguments)
        unwanted = self._unwanted(arguments)
        if self.backward is not None:
            gradients = self.backward(cotangents, self.outputs(*outputs), tensors, options, unwanted)
            return self._backward_results(gradients, tensors, unwanted)
        prepared = self._prepared(tensors, options)
        spec, operands = prepared.spec, self._packed(prepared, tensors)
        plan = bridge.choose(self.op, spec, tensors[0])
        if plan.choices[0].implementation.platform is None and self.definition is not None:
            operands = self.definition(operands)
        d, outs = [], []
        for y, c, shape in zip(outputs, cotangents, prepared.op_shapes, strict=False):
            d.append(None if c is None or shape is None else c.contiguous().view(shape))
            # An output that is not read has its cotangent's shape.
            outs.append(d[-1] if y is None or shape is None else y.contiguous().view(shape))
        residual_values: Any = None
        if residuals and residuals[0] is not None:
            views = [
                r.contiguous().view(shape) for r, shape in zip(residuals, prepared.op_shapes[len(d) :], strict=True)
            ]
            residual_values = type(self.residuals)(*views) if hasattr(self.residuals, "_fields") else views[0]
        gradients = bridge.backward(plan, operands, self.outputs(*outs), residual_values, self.outputs(*d))
        return self._backward_results(self.unpack(spec, gradients, tensors), tensors, unwanted)

    def _outputs_tangent(self, tensors: Any, tangents: PyTree, options: Sequence[object]) -> Any:
        """The tangents of the outputs, empty for those that there are not."""
        if self.tangents is not None:
            return returned(list(self.tangents(tensors, tangents, options)))
        prepared = self._prepared(tensors, options)
        operands, directions = self._packed(prepared, tensors), self._packed_tangents(prepared, tensors, tangents)
        directional = definition.outputs_tangent(self.op, prepared.spec, operands, directions)
        pairs = zip(directional, prepared.results, strict=False)
        return returned([tensors[0].new_empty(0) if y is None else y.reshape(shape) for y, shape in pairs])

    def _packed_tangents(self, prepared: _Prepared, tensors: Any, tangents: PyTree) -> Any:
        """Tangents of the caller's tensors in the op's layout, None for tensors without."""
        merged = self.kind(*(x if t is None else t for x, t in zip(tensors, tangents, strict=True)))
        packed = self._packed(prepared, merged)
        return type(packed)(*(None if t is None else p for p, t in zip(packed, tangents, strict=True)))

    def _gradients_tangent(
        self,
        d: object,
        d_tangents: object,
        tensors: object,
        tangents: PyTree,
        options: Sequence[object],
        unwanted: set[str],
    ) -> Any:
        """The tangents of what the backward operator returns, for tangents of the outputs' cotangents and of the
        operands.
        """
        if self.gradient_tangents is not None:
            directional = self.gradient_tangents(d, d_tangents, tensors, tangents, options)
            return self._backward_results(directional, tensors, unwanted)
        prepared = self._prepared(tensors, options)

        def laid(cotangents: PyTree) -> Any:
            pairs = zip(cotangents, prepared.op_shapes, strict=False)
            return self.outputs(*(None if c is None or s is None else c.contiguous().view(s) for c, s in pairs))

        operands, directions = self._packed(prepared, tensors), self._packed_tangents(prepared, tensors, tangents)
        directional = definition.gradients_tangent(
            self.op, prepared.spec, operands, directions, laid(d), laid(d_tangents)
        )
        return self._backward_results(self.unpack(prepared.spec, directional, tensors), tensors, unwanted)

    def _backward_results(self, gradients: object, tensors: Any, unwanted: set[str]) -> PyTree:
        """The results of the backward operator, empty for those that there are not."""

        def like(name: str) -> Tensor:
            gradient, x = getattr(gradients, name), getattr(tensors, name)
            if name in unwanted or gradient is None or x is None or not x.is_floating_point():
                return tensors[0].new_empty(0)
            return gradient.reshape(x.shape)

        return returned([like(name) for name in self.gradients])


def _hashable(options: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([tuple(option) if type(option) is list else option for option in options])


@functools.cache
def _jax_dtype(dtype: torch.dtype) -> np.dtype:
    return array_spec(torch.empty(0, dtype=dtype)).dtype
