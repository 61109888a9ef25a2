"""A public function's arrays as its caller lays them out, and the call of an op on them.

A `Signature` states the dims of the caller's arrays once. From it and from the op's own dims come the shape checks, the
reshaping to the op's layout and back, the axes on an explicit mesh and, for torch, the rules of `vmap` and of DTensor
and the shapes of results.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from vishwamai.core import dims
from vishwamai.core.shape_checks import Argument, check_shapes
from vishwamai.core.sharding import Axes, explicit_mesh, follow_explicit_axes
from vishwamai.core.spec import ArraySpec, array_spec, as_array
from vishwamai.core.types import AnyArray, PyTree


def as_arrays(function: str, arrays: PyTree, labels: Mapping[str, str] | None = None) -> PyTree:
    """A named tuple of the caller's arguments as arrays of JAX, None where one is absent; `labels` are the names of
    some fields in errors.
    """
    renamed: Any = labels or {}
    kind = type(arrays)
    converted = []
    for name, absent, x in zip(kind._fields, dims.optional(kind), arrays, strict=True):
        converted.append(None if x is None and absent else as_array(function, renamed.get(name, name), x))
    return kind(*converted)


def array_specs(arrays: PyTree) -> PyTree:
    """The `ArraySpec` of every array of a named tuple."""
    return type(arrays)(*(None if x is None else array_spec(x) for x in arrays))


F = TypeVar("F", bound=Callable[..., Any])


def described(function: F) -> F:
    """Remembers the specs that a function makes: a small call would spend more on the checks than on the rest of what
    we do before the kernel.
    """
    cached = functools.lru_cache(maxsize=4096, typed=True)(function)

    @functools.wraps(function)
    def described(*arguments: object, **options: object) -> PyTree:
        try:
            return cached(*arguments, **options)
        except TypeError:  # an option that cannot be hashed, which the function has its own words for
            return function(*arguments, **options)

    return described  # type: ignore[return-value]


@functools.lru_cache(maxsize=4096)
def op_shape(text: str, op_text: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the op's layout.

    Axes that lie in another order change places; axes that the array lacks are 1; `*name` is one axis where the op has
    `name`; and the op's first axis is 1 where the caller has none like it.

    >>> op_shape("batch seq heads", "batch heads seq", (2, 7, 3)), op_shape("batch? heads?", "batch? heads?", (3,))
    ((2, 3, 7), (1, 3))
    >>> op_shape("*rows features", "groups rows features", (2, 7, 3))
    (1, 14, 3)
    """
    caller_dims, op_dims = dims.parse(text), dims.parse(op_text)
    variadic = any(dim.variadic for dim in caller_dims)
    rest = list(shape) if variadic else [1] * (len(caller_dims) - len(shape)) + list(shape)
    swapped = _swapped(text, op_text)
    if swapped is not None:
        i, j = swapped
        rest[i], rest[j] = rest[j], rest[i]
        return tuple(rest)
    sizes: list[int] = []
    variadic_names = {dim.name for dim in op_dims if dim.variadic}
    for dim in caller_dims:
        if dim.variadic:
            count = len(shape) - len(caller_dims) + 1
            lead, rest = rest[:count], rest[count:]
            sizes += lead if dim.name in variadic_names else [math.prod(lead)]
        else:
            sizes.append(rest.pop(0))
    return tuple(sizes) if op_dims[0].name in {dim.name for dim in caller_dims} else (1, *sizes)


@functools.cache
def _swapped(text: str, op_text: str) -> tuple[int, int] | None:
    """The two axes that change places between the caller's layout and the op's; None where the order is the same."""
    caller_names, op_names = ([dim.name for dim in dims.parse(dims_text)] for dims_text in (text, op_text))
    differing = [i for i, (a, b) in enumerate(zip(caller_names, op_names)) if a != b]
    if len(caller_names) != len(op_names) or not differing or set(caller_names) != set(op_names):
        return None
    assert len(differing) == 2, f"{text!r} and {op_text!r} differ in the order of more than two axes"
    return differing[0], differing[1]


@functools.cache
def _flattens(text: str, op_text: str) -> bool:
    variadic = {dim.name for dim in dims.parse(text) if dim.variadic}
    return bool(variadic - {dim.name for dim in dims.parse(op_text) if dim.variadic})


@functools.lru_cache(maxsize=4096)
def _move(text: str, op_text: str, shape: tuple[int, ...]) -> Callable[[PyTree], PyTree] | None:
    """Takes an array of the caller (of JAX or torch) to the op's layout; None where it is there already."""
    target = op_shape(text, op_text, shape)
    swapped = _swapped(text, op_text)
    if swapped is not None:
        return operator.methodcaller("swapaxes", *swapped)
    if target == shape:
        return None
    flat = text == op_text or _flattens(text, op_text)
    return operator.methodcaller("reshape", target) if flat else operator.itemgetter(None)


@functools.cache
def _behind(text: str, op_text: str) -> tuple[bool, ...]:
    """Which words behind the `*name` in front are axes of the op's array, too."""
    op_names = {dim.name for dim in dims.parse(op_text)}
    return tuple(dim.name in op_names for dim in dims.parse(text)[1:])


class Signature:
    """The dims of a public function's arrays.

    Args:
      operands: the op's `Operands` with a text of `core.dims` for each of the caller's arrays. Or another named tuple,
        where the operands are computed from such arrays on each device.
      outputs: the op's `Outputs` with a text for each result, None where there is none; or `(spec) -> Outputs` where
        that depends on the call.
      labels: names of operands in errors, where the caller knows them by another.
      hints: text of an operand's error after the shape to pass, by operand.
      turned: text of an operand's error where its transpose would fit, by operand.
      split: the dims that may be split over devices, where they are others than the op's.
      own: the op's dims of the operands, where an option of the call changes them.
    """

    def __init__(
        self,
        operands: PyTree,
        outputs: PyTree,
        labels: Mapping[str, str] | None = None,
        hints: Mapping[str, str] | None = None,
        split: str | None = None,
        turned: Mapping[str, str] | None = None,
        op_texts: Any = None,
    ):
        self.operands = operands
        self._outputs: Callable[[Any], object] = outputs if callable(outputs) else lambda spec: outputs
        self.labels = dict(labels or {})
        self.hints = dict(hints or {})
        self.turned = dict(turned or {})
        self._op_texts = op_texts or dims.declared(type(operands))
        self.split = split

    def outputs(self, spec: object) -> PyTree:
        """The dims of the results of a call; `spec` is the op's spec, or has its `operands` and options."""
        return self._outputs(spec)

    def check(self, function: str, arrays: PyTree) -> None:
        """Raises ShapeError where the shapes contradict one another; `arrays` holds the caller's, or their specs."""
        check_shapes(
            function,
            (
                Argument(
                    self.labels.get(name) or name, text, tuple(x.shape), self.hints.get(name), self.turned.get(name)
                )
                for name, text, x in zip(arrays._fields, self.operands, arrays, strict=True)
                if x is not None
            ),
        )

    def specs(self, arrays: PyTree) -> PyTree:
        """The `ArraySpec` of each operand in the op's layout."""

        def laid(x: ArraySpec | None, text: str, op_text: str) -> ArraySpec | None:
            return None if x is None else ArraySpec(op_shape(text, op_text, x.shape), x.dtype)

        return type(arrays)(*map(laid, arrays, self.operands, self._op_texts))

    def pack(self, arrays: PyTree, spec: Any = None) -> PyTree:
        """The caller's arrays (of JAX or torch) in the op's layout, which an option of `spec` may change."""

        def laid(x: AnyArray, text: str, op_text: str) -> AnyArray:
            if x is None:
                return None
            move = _move(text, op_text, tuple(x.shape))
            return x if move is None else move(x)

        kind = type(arrays)
        return kind(*map(laid, arrays, self.operands, self._op_texts if spec is None else spec.dims(kind)))

    def unpack(self, spec: Any, outputs: PyTree, arrays: PyTree) -> PyTree:
        """The op's outputs in the caller's layout; `arrays` are the caller's."""
        op_texts = spec.dims(type(outputs))
        return type(outputs)(
            *(
                None if y is None else self.restored(y, text, of, arrays)
                for y, text, of in zip(outputs, self.outputs(spec), op_texts, strict=True)
            )
        )

    def restored(self, y: AnyArray, text: str, op_text: str, arrays: PyTree) -> AnyArray:
        """A result in the layout that `text` states; an axis that the op's result lacks is 1."""
        if text == op_text:
            return y
        swapped = _swapped(text, op_text)
        if swapped is not None:
            return y.swapaxes(*swapped)
        if _flattens(text, op_text):
            present = _behind(text, op_text)
            sizes = iter(y.shape[len(y.shape) - sum(present) :])
            return y.reshape(*self.lead(arrays), *(next(sizes) if occupied else 1 for occupied in present))
        return y if dims.parse(op_text)[0].name in {dim.name for dim in dims.parse(text)} else y[0]

    def lead(self, arrays: PyTree) -> tuple[int, ...]:
        """The sizes of the axes that the first operand with `*name` has there."""
        for text, x in zip(self.operands, arrays, strict=True):
            words = dims.parse(text)
            if x is not None and words[0].variadic:
                return tuple(x.shape[: len(x.shape) - len(words) + 1])
        raise AssertionError("no operand has any number of axes")

    def axes(self, spec: object, arrays: PyTree, split: str) -> Axes:
        """The factors of the caller's arrays and results."""
        operand_factors = type(arrays)(
            *(None if x is None else dims.factors(text, len(x.shape)) for x, text in zip(arrays, self.operands))
        )
        shapes = zip(self.operands, arrays, strict=True)
        ranks = dims.variadic_ranks((text, len(x.shape)) for text, x in shapes if x is not None)
        outputs = self.outputs(spec)
        results = type(outputs)(*(None if text is None else dims.result_factors(text, ranks) for text in outputs))
        factors = Axes((operand_factors,), results, frozenset())
        return Axes((operand_factors,), results, dims.splittable(split, factors.dims))


def public_call(
    op: Any,
    signature: Signature,
    spec: Any,
    arrays: PyTree,
    *,
    config: object = None,
    implementation: str | None = None,
    pack: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """The op's outputs in the caller's layout.

    Args:
      spec: specification of the computation, made of the global arrays, which it has checked.
      arrays: the op's `Operands` with the caller's arrays. On explicit mesh axes the op runs on the shards of each
        device.
      pack: makes the op's operands of `arrays`, or of their shards, where that is more than another layout. `arrays`
        may then be another named tuple, and `spec` has the options alone.
    """

    def run(arrays: PyTree, unsplit: bool) -> PyTree:
        operands = signature.pack(arrays, spec) if pack is None else pack(arrays)
        of = spec if unsplit and pack is None else spec.localize(operands)
        outputs = op(of, operands, config=config, implementation=implementation)
        return signature.unpack(of, outputs, arrays)

    if explicit_mesh(arrays) is None:
        return run(arrays, True)
    axes = signature.axes(spec, arrays, signature.split or op.split(spec, False))
    return follow_explicit_axes(lambda shards: run(shards, False), axes, arrays)
