"""The declaration of an op's operators of torch, and what follows from it without running anything: the shapes of
results (the fakes), the roles of tensors under `torch.vmap`, and the rules of DTensor.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vishwamai.core import dims
from vishwamai.core.op import Op
from vishwamai.core.shape_checks import laid
from vishwamai.core.signature import Signature
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.torch import batching, sharding

Call = SimpleNamespace
"""A call of an operator as a spec has it: `operands`, here tensors or None, and the options."""


@dataclasses.dataclass(eq=False)
class Declared:
    """What an operation's file states of its operators.

    Attributes:
      op: operation to compute.
      outputs: the op's `Outputs`.
      signature: the dims of the caller's arrays; or `(call) -> Signature` where an option decides.
      describe: `(ArraySpecs of the caller's arrays, options) -> spec`, which checks them. Its annotated options become
        the operator's; the last may be a named tuple of further ones.
      gradients: the operands that have a gradient. Where none has one, there is no backward operator, `backward` is the
        error that says so, and DTensor has no rule.
      saves: `(call) -> names` of the operands, outputs and residuals that the backward pass reads; nothing else is kept
        for it. All operands unless it says otherwise.
      stand_ins: operands that the backward pass does not read, by what has their shape: an output, or the cotangent
        "d_" of one.
      same: operands that have the gradient of another.
      definition: function from the operands to those of the op's definition, which computes again from all of them.
      dtypes: `(call) -> dtypes` of the outputs; those of the first operand unless it says otherwise.
      sizes: `(call) -> sizes` of words that no operand has.
      residuals: dims of the residuals; they are outputs of the operator where the call needs a gradient.
      keeps: `(call) -> bool`, whether the op has residuals for such options.
      optional: outputs whose cotangent may be absent; for the others it becomes zeros.
      pack: `(spec, tensors) -> operands` in the op's layout, where more is to be done than to reshape and cast them.
      unpack: `(spec, gradients, tensors) -> gradients` in the caller's layout, where that is more than to reshape them.
      own_shapes: `(spec) -> shapes` of outputs and residuals in the op's layout, for the same.
      independent: (operand, word) of gradients that neither have the word's axis nor are a sum over it.
      lazy: operands whose gradient is computed only where it is asked for.
      forward: `(tensors, options) -> results`, in place of the op's own call.
      backward: `(cotangents, outputs, tensors, options, flags of the lazy gradients) -> gradients`, likewise.
      tangents: `(tensors, tangents, options) -> tangents` of the outputs, in place of those of the op's definition.
      gradient_tangents: `(cotangents, their tangents, tensors, their tangents, options) -> tangents` of the gradients,
        likewise.
      one_by_one: `torch.vmap` computes the elements one after the other, for no axis takes the mapped one.
      name: the operator's name, if it is not the op's.
      option_values: value that a rule reads in place of an option that stands for an object, by the option's name.
    """

    op: Op[Any]
    outputs: Any
    signature: Signature | Callable[[Call], Signature]
    describe: Callable[..., Any]
    _: dataclasses.KW_ONLY
    gradients: tuple[str, ...] = ()
    saves: Callable[[Call], Iterable[str]] = lambda call: call.operands._fields
    stand_ins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)
    definition: Callable[[Any], Any] | None = None
    dtypes: Callable[[Call], Sequence[torch.dtype]] | None = None
    sizes: Callable[[Call], Mapping[str, Any]] = lambda call: {}
    residuals: PyTree = ()
    keeps: Callable[[Call], bool] = lambda call: True
    optional: tuple[str, ...] = ()
    pack: Callable[[Any, Any], Any] | None = None
    unpack: Callable[[Any, Any, Any], Any] = lambda spec, gradients, tensors: gradients
    own_shapes: Callable[[Any], list[Any]] | None = None
    independent: tuple[tuple[str, str], ...] = ()
    lazy: tuple[str, ...] = ()
    forward: Callable[[Any, Sequence[Any]], Any] | None = None
    backward: Callable[..., Any] | None = None
    tangents: Callable[..., Any] | None = None
    gradient_tangents: Callable[..., Any] | None = None
    one_by_one: bool = False
    name: str = ""
    option_values: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.name or self.op.name
        hints = typing.get_type_hints(self.describe)
        first, *parameters = inspect.signature(self.describe).parameters
        self.kind: Any = hints[first]
        """The op's `Operands`."""
        self.option_types: dict[str, object] = {}
        for parameter in parameters:  # a named tuple stands for its fields
            hint = hints[parameter]
            self.option_types |= typing.get_type_hints(hint) if hasattr(hint, "_fields") else {parameter: hint}
        self.options = list(self.option_types)
        if set(self.options) - set(parameters):
            self.describe = functools.partial(_grouped, self.describe, len(parameters) - 1, hints[parameters[-1]])
        self._defaults = {f.name: f.default for f in dataclasses.fields(hints["return"]) if f.name != "operands"}
        outputs, residuals = self.outputs._fields, getattr(self.residuals, "_fields", ("residual",))
        self._results = (*outputs, *residuals) if self.residuals else outputs
        """Names of outputs and residuals."""
        input_names = {*self.kind._fields, *self.options}  # the loss has an output and an option of one name
        results = (f"{n}_out" if n in input_names else n for n in self._results)
        self._backward_fields = (*(f"d_{n}" for n in outputs), *results, *self.kind._fields)
        """Names of the backward operator's tensors."""

    def _signature(self, call: Any) -> Signature:
        return self.signature if isinstance(self.signature, Signature) else self.signature(call)

    def _call(self, arguments: Sequence[object]) -> Call:
        """The first arguments of the forward operator: operands and options."""
        count = len(self.kind._fields)
        options = dict(zip(self.options, arguments[count:], strict=False))
        options |= {n: read(options[n]) for n, read in self.option_values.items() if n in options}
        return SimpleNamespace(**self._defaults | options, operands=self.kind(*arguments[:count]))

    def _keep(self, arguments: Sequence[PyTree]) -> bool:
        """Whether a call of the forward operator returns residuals."""
        return bool(self.residuals) and arguments[-1]

    def _result_texts(self, call: Any, keep: bool) -> list[str | None]:
        """The dims of outputs and residuals, None for one that there is not."""
        texts = list(self._signature(call).outputs(call))
        return texts + [text if keep and self.keeps(call) else None for text in self.residuals]

    def _shapes(self, call: Any, operands: Any, keep: bool) -> list[Any]:
        """The shape of each result: of an operand by the same name, or made of its words' sizes (which may be an
        operand's own, as heads are); None for one that there is not.
        """
        texts = self._signature(call).operands
        named = zip(self.kind._fields, texts, operands, strict=True)
        operand_shapes = {(n, text): tuple(x.shape) for n, text, x in named if x is not None}
        sizes = _sizes(texts, operands) | dict(self.sizes(call))
        results = zip(self._results, self._result_texts(call, keep), strict=True)
        return [
            None if t is None else operand_shapes[n, t] if (n, t) in operand_shapes else _shape(t, sizes)
            for n, t in results
        ]

    def _fake(self, *arguments: object) -> Any:
        call = self._call(arguments)
        shapes = self._shapes(call, call.operands, self._keep(arguments))
        first = call.operands[0]
        dtypes = [first.dtype] * len(shapes) if self.dtypes is None else self.dtypes(call)
        pairs = zip(shapes, dtypes, strict=True)
        return returned([first.new_empty(0) if of is None else first.new_empty(of, dtype=d) for of, d in pairs])

    def _parts(
        self, arguments: Sequence[PyTree]
    ) -> tuple[PyTree, list[PyTree], list[PyTree], PyTree, Sequence[PyTree]]:
        """The backward operator's arguments: cotangents, outputs, residuals, operands (with the stand-ins of those that
        are not saved), options.
        """
        outs = len(self.outputs._fields)
        by_name = dict(zip(self._backward_fields, arguments, strict=False))
        operands = {n: by_name[n] for n in self.kind._fields}
        absent = {n: by_name[stand_in] for n, stand_in in self.stand_ins.items() if operands[n] is None}
        results = list(arguments[outs : outs + len(self._results)])
        options = arguments[len(self._backward_fields) :][: len(self.options)]
        cotangents = self.outputs(*arguments[:outs])
        return cotangents, results[:outs], results[outs:], self.kind(**operands | absent), options

    def _unwanted(self, arguments: Sequence[PyTree]) -> set[str]:
        """The lazy gradients that a call of the backward operator does without."""
        flags = arguments[len(arguments) - len(self.lazy) :]
        return {n for n, flag in zip(self.lazy, flags, strict=True) if not flag}

    def _fake_backward(self, *arguments: Any) -> Any:
        _, _, _, tensors, _ = self._parts(arguments)
        unwanted = self._unwanted(arguments)
        like = [None if n in unwanted else getattr(tensors, n) for n in self.gradients]
        first = tensors[0]
        empties = [first.new_empty(0) if x is None or not x.is_floating_point() else x.new_empty(x.shape) for x in like]
        return returned(empties)

    def _roles(self, arguments: Sequence[object]) -> batching.Roles:
        call = self._call(arguments)
        results = self._result_texts(call, self._keep(arguments))
        return batching.Roles(call, self._signature(call).operands, results)

    def _backward_roles(self, arguments: Sequence[Any]) -> batching.Roles:
        _, _, _, operands, options = self._parts(arguments)
        call = self._call((*operands, *options))
        signature = self._signature(call)
        outputs = [text or "" for text in signature.outputs(call)]
        texts = [*outputs, *outputs, *self.residuals, *signature.operands]
        by_name = dict(zip(self._backward_fields, arguments, strict=False))
        like = [n if by_name[n] is not None else self.stand_ins.get(n, n) for n in self.gradients]
        unwanted = self._unwanted(arguments)
        absent = [n in unwanted or by_name[n] is None or not _floating(by_name[n]) for n in like]
        positions = [None if a else self._backward_fields.index(n) for n, a in zip(like, absent, strict=True)]
        return batching.Roles(call, texts, [None if i is None else texts[i] for i in positions], positions)

    def _rule(self, backward: bool, call: object) -> sharding.Rule:
        """What DTensor may split in a call of the forward or the backward operator, whose arguments `call` has."""
        if backward:
            names, roles_of = (
                [*self._backward_fields, *self.options, *(f"of_{n}" for n in self.lazy)],
                self._backward_roles,
            )
        else:
            names, roles_of = [*self.kind._fields, *self.options, *(["keep"] if self.residuals else [])], self._roles
        arguments = [getattr(call, n) for n in names]
        roles = roles_of(arguments)
        named = zip(names, roles.tensors, arguments, strict=False)
        present = {n: (text, len(x.shape)) for n, text, x in named if x is not None}
        inputs, ranks = {n: dims.factors(*of) for n, of in present.items()}, dims.variadic_ranks(present.values())
        results = () if backward else tuple(None if t is None else dims.result_factors(t, ranks) for t in roles.results)
        split = dims.splittable(self.op.split(roles.call, backward), [*inputs.values(), *filter(None, results)])
        independent = frozenset((self.gradients.index(n), w) for n, w in self.independent if backward)
        return sharding.Rule(
            inputs, results or tuple(None if i is None else names[i] for i in roles.like), split, independent
        )


def _grouped(describe: Callable[..., Any], count: int, group: Any, operands: PyTree, *options: Any) -> Any:
    """`describe` with the fields of its last option, a named tuple, as options of their own."""
    return describe(operands, *options[:count], group._make(options[count:]))


def returned(results: Sequence[Tensor | None]) -> PyTree:
    """Results as an operator returns them: a tensor where there is one, else a tuple. None is a view: autograd lets no
    view that an operator returns be changed in place.
    """
    owned = [torch.ops.aten._unsafe_view(y, y.shape) if y is not None and y._is_view() else y for y in results]
    return tuple(owned) if len(owned) > 1 else owned[0]


def _sizes(texts: Iterable[str], tensors: Iterable[Any]) -> dict[str, Any]:
    """The size of every word's own axis, without what "+1" adds; of a `*name` all of them."""
    sizes: dict[str, Any] = {}
    shared: dict[str, object] = {}
    for text, x in zip(texts, tensors, strict=True):
        fixed, variadic, lead = ([], None, ()) if x is None else laid(text, x.shape)
        for dim, _, size in fixed:
            (shared if dim.shareable else sizes).setdefault(str(dim.name), size - dim.more)
        if variadic is not None:
            shape = sizes.setdefault(str(variadic.name), lead)
            if variadic.shareable:
                sizes[str(variadic.name)] = torch.broadcast_shapes(lead, shape)
    return shared | sizes


def _shape(text: str, sizes: Mapping[str, Any]) -> list[Any]:
    """What `_sizes` says of the words of a text."""
    extents = ((dim, sizes[str(dim.name)]) for dim in dims.parse(text))
    return [size for dim, extent in extents for size in (extent if dim.variadic else (extent + dim.more,))]


def _floating(x: AnyArray) -> bool:
    return (x.dtype if isinstance(x, Tensor) else x.tensor_meta.dtype).is_floating_point
