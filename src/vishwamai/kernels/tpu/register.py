"""`register_tpu_op`: an operation of one's own with all that the library's have: a kernel per platform, a gradient,
vmap, shardings, `explain`.

What is made is a `vishwamai.core.op.Op`. Its operands carry a leading axis that counts folded vmap axes (1 where
nothing is mapped), which the caller's functions do not see: they are mapped over it by `jax.vmap`, or by the `batching`
that was given.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.errors import KernelError, ShapeError, VishwamaiError
from vishwamai.core.gradients import autodiff_backward, is_float
from vishwamai.core.op import Implementation, Op
from vishwamai.core.sharding import Axes, follow_explicit_axes
from vishwamai.core.spec import OpSpec, array_spec
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.kernels.decorators import translated

OPERATIONS: dict[str, RegisteredOp] = {}
"""Every registered operation by name."""

_PLATFORMS = {"tpu": ("tpu",), "gpu": ("cuda", "rocm"), "cuda": ("cuda",), "rocm": ("rocm",), "cpu": ("cpu",)}


_GROUPS = "vmap"
"""The word of the leading axis."""


@dataclasses.dataclass(frozen=True)
class RegisteredSpec(OpSpec):
    """The operands' shapes and dtypes, and the call's keyword arguments."""

    options: tuple[tuple[str, Any], ...] = ()
    texts: tuple[tuple[str, ...], tuple[str, ...]] = dataclasses.field(default=((), ()), repr=False)

    def dims(self, kind: object) -> Any:
        """The sharding rule's, behind the leading axis."""
        return self.texts[0] if kind is type(self.operands) else self.texts[1]


class RegisteredOp:
    """A registered operation; call it with its arrays, and its options by keyword.

    Attributes:
      name: its name.
      op: the `vishwamai.core.op.Op`.
      operands: names of the arrays that it takes.
    """

    def __init__(
        self,
        name: str,
        implementations: Mapping[str, Callable[..., Any]],
        abstract: Callable[..., object] | None,
        gradient: Callable[..., object] | None,
        batching: Callable[..., object] | None,
        sharding: str | None,
        split: str,
    ):
        self.name = name
        self._functions = dict(implementations)
        self._reference = self._functions["default"]
        self._abstract = abstract
        self._gradient = gradient
        self._batching = batching
        self.operands = _array_parameters(name, self._reference)
        functools.update_wrapper(self, self._reference)
        self._operands_type = collections.namedtuple(f"{name}_operands", self.operands, rename=True)  # type: ignore[misc]
        self._dims = None if sharding is None else _parse(name, sharding, len(self.operands), split)
        if sharding is None and split:
            raise KernelError(
                f"register_tpu_op: {name}: `split` is {split!r}, but there is no `sharding` whose factors it could "
                'name; pass the rule, such as "b t d, d -> b t d", or leave `split` out.'
            )
        self._split = frozenset(split)
        self._seen: dict[object, object] = {}
        implementations_of_op = []
        for platform, function in self._functions.items():
            for device_platform in _PLATFORMS.get(platform, ()):
                implementations_of_op.append(
                    Implementation(f"{name}_{platform}", device_platform, self._forward(function), self._backward())
                )
        autodiff = gradient is None
        implementations_of_op.append(
            Implementation("xla", None, self._forward(self._reference), self._backward(), autodiff=autodiff)
        )
        self.op: Op[RegisteredSpec] = Op(name, implementations_of_op, split=" ".join((_GROUPS, *self._split)))

    def __repr__(self) -> str:
        return f"RegisteredOp({self.name!r})"

    def __call__(self, *arrays: Any, implementation: str | None = None, **options: Any) -> Any:
        """The results, as the functions return them: an array, or a tuple of them."""
        if len(arrays) != len(self.operands):
            raise ShapeError(
                f"{self.name}: {len(arrays)} arrays are given, but it takes {len(self.operands)}: "
                f"{', '.join(self.operands)}; pass arrays by position and options by keyword."
            )
        arrays = tuple(map(jnp.asarray, arrays))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        shapes_of_results = self._results(shapes, options)
        tree = jax.tree.structure(shapes_of_results)
        ranks = [len(y.shape) for y in jax.tree.leaves(shapes_of_results)]

        def run(*arrays: Any) -> Any:
            operands = self._operands_type(*(x[None] for x in arrays))
            shapes = self._operands_type(*map(array_spec, operands))
            spec = RegisteredSpec(shapes, tuple(sorted(options.items())), self._texts([x.ndim for x in arrays], ranks))
            outputs = self.op(spec, operands, implementation=implementation)
            return jax.tree.unflatten(tree, [y[0] for y in outputs])

        dims = tuple(self._own_dims(i, x.ndim) for i, x in enumerate(arrays))
        results = jax.tree.unflatten(tree, [self._result_dims(i) for i in range(tree.num_leaves)])
        if self._dims is None:
            return run(*arrays)
        return follow_explicit_axes(run, Axes(dims, results, self._split), *arrays)

    def _results(self, shapes: Sequence[Any], options: dict[str, Any]) -> Any:
        """Shapes and dtypes of the results: the declared ones, held against what the reference gives."""
        key = (*((x.shape, x.dtype) for x in shapes), *sorted(options.items()))
        if key not in self._seen:
            self._seen[key] = self._check_results(shapes, options)
        return self._seen[key]

    def _check_results(self, shapes: Sequence[object], options: dict[str, Any]) -> Any:
        try:
            results = jax.eval_shape(functools.partial(self._reference, **options), *shapes)
            if self._abstract is None:
                return results
            declared = self._abstract(*shapes, **options)
        except VishwamaiError:
            raise
        except Exception as error:
            raise translated(self.name, error) from error
        reference_types, declared_types = (
            [(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(t)] for t in (results, declared)
        )
        if reference_types != declared_types:
            raise ShapeError(
                f"{self.name}: the default implementation returns {_words(results)}, but its abstract evaluation says "
                f"{_words(declared)}; make them agree."
            )
        return results

    def _mapped(self, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """`function` over the leading axis, of size 1 in operands that are shared."""
        size = max(x.shape[0] for x in operands)
        if size == 1:
            return jax.tree.map(lambda y: y[None], function(*(x[0] for x in operands)))
        if self._batching is not None:
            return self._batching(function, *operands)
        shared = [x.shape[0] == 1 for x in operands]
        return jax.vmap(function, [None if s else 0 for s in shared])(
            *(x[0] if s else x for x, s in zip(operands, shared))
        )

    def _forward(self, function: Callable[..., object]) -> Callable[..., Any]:
        def forward(spec: RegisteredSpec, operands: PyTree) -> tuple[Any, None]:
            leaves = jax.tree.leaves(self._mapped(functools.partial(function, **dict(spec.options)), operands))
            return _results_type(len(leaves))(*leaves), None

        return forward

    def _backward(self) -> Callable[..., Any]:
        if self._gradient is None:
            return autodiff_backward(self._forward(self._reference))
        gradient = self._gradient

        def backward(spec: Any, operands: Any, outputs: Any, cotangents: PyTree) -> Any:
            count, results = len(operands), len(outputs)

            def batch_gradient(*arrays: Any) -> Any:
                outs, cots = arrays[count : count + results], arrays[count + results :]
                gradients = gradient(arrays[:count], _single(outs), _single(cots), **dict(spec.options))
                return tuple(gradients if isinstance(gradients, (tuple, list)) else (gradients,))

            computed = self._mapped(batch_gradient, (*operands, *outputs, *cotangents))
            if len(computed) != count:
                raise ShapeError(
                    f"{self.name}: its gradient returns {len(computed)} arrays for {count} operands; return one each, "
                    "None for integers."
                )
            return self._operands_type(*(self._shaped(g, x, n) for g, x, n in zip(computed, operands, self.operands)))

        return backward

    def _shaped(self, gradient: AnyArray, operand: Any, name: str) -> Any:
        if not is_float(operand):
            return None
        if gradient is None or gradient.shape[1:] != operand.shape[1:]:
            shape = None if gradient is None else gradient.shape[1:]
            raise ShapeError(
                f"{self.name}: its gradient gives {shape} for the operand {name!r} of shape {operand.shape[1:]}; "
                "return an array of the operand's shape."
            )
        if operand.shape[0] == 1 and gradient.shape[0] > 1:
            gradient = gradient.sum(axis=0, keepdims=True)
        return gradient.astype(operand.dtype)

    def _own_dims(self, index: int, ndim: int) -> tuple[str | None, ...]:
        if self._dims is None:
            return (None,) * ndim
        dims = self._dims[0][index]
        if len(dims) != ndim:
            raise ShapeError(
                f"{self.name}: operand {self.operands[index]!r} has {ndim} axes, but the sharding rule names "
                f"{len(dims)}: {' '.join(dims) or '()'}."
            )
        return dims

    def _result_dims(self, index: int) -> tuple[str | None, ...]:
        return () if self._dims is None else self._dims[1][index]

    def _texts(self, operands: Sequence[int], results: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The dims of operands and results in the op's own layout: each has the leading axis of folded vmap axes, 1
        where an operand is shared.
        """

        def text(lead: str, factors: tuple[str | None, ...]) -> str:
            return " ".join((lead, *(factor or "_" for factor in factors)))

        of_operands = tuple(text(f"{_GROUPS}?", self._own_dims(i, ndim)) for i, ndim in enumerate(operands))
        of_results = [self._result_dims(i) if self._dims else (None,) * ndim for i, ndim in enumerate(results)]
        return of_operands, tuple(text(_GROUPS, factors) for factors in of_results)


@functools.cache
def _results_type(count: int) -> Any:
    return collections.namedtuple("Results", [f"result{i}" for i in range(count)])


@checked
def register_tpu_op(
    name: str | Callable[..., Any] | None = None,
    implementations: Mapping[str, Callable[..., object]] | None = None,
    *,
    abstract: Callable[..., object] | None = None,
    gradient: Callable[..., object] | None = None,
    batching: Callable[..., object] | None = None,
    sharding: str | None = None,
    split: str = "",
) -> Any:
    """Makes an operation of functions for several platforms; bare or with keywords it decorates the default one.

    Args:
      name: the operation's name; as a decorator it may be left out (then it is the function's).
      implementations: functions by platform ("tpu", "gpu", "cuda", "rocm", "cpu"), and "default", a function of
        jax.numpy that defines the operation and serves everywhere else. All take the same arrays by position and the
        same options by keyword, options hashable. A "tpu" function may call `pl.pallas_call`; to work inside a
        `shard_map` (which a split operation is) its `out_shape` is `vishwamai.core.sharding.out_struct(shape, dtype,
        *arrays)`.
      abstract: `abstract(*shapes, **options)` gives the results' `jax.ShapeDtypeStruct`s; held against the default at
        every new shape. None reads them from the default.
      gradient: `gradient(operands, results, cotangents, **options)` gives one gradient for each operand (None for
        integers); results and cotangents are single arrays where there is one result. None differentiates the default.
      batching: `batching(function, *operands)`, for `jax.vmap` of the operation: every operand has a leading axis (1
        where it is not mapped), and so must the results. None maps by `jax.vmap`, which suits jax.numpy and Pallas.
      sharding: the factors of every dimension, as in "b t d, d -> b t d": equal names go together.
      split: the one-letter factors that mesh axes may split ("bt"); the others are gathered. None may be split without
        a rule.

    Returns:
      a `RegisteredOp`; `explain`, strict mode and `implementation=` work as with the library's own operations.

    Raises:
      KernelError: there is no default, an unknown platform, or a rule that does not fit the functions.

    A name that is registered again stands for the new operation from then on.

    >>> @register_tpu_op
    ... def cube(x):
    ...     return x ** 3
    >>> float(jax.grad(lambda x: cube(x).sum())(jnp.array([2.0]))[0])
    12.0
    >>> scaled = register_tpu_op(
    ...     "scaled",
    ...     {"default": lambda x, s: x * s},
    ...     gradient=lambda operands, y, dy: (dy * operands[1], (dy * operands[0]).sum(0)),
    ...     sharding="b d, d -> b d",
    ...     split="b",
    ... )
    >>> jax.vmap(scaled, (0, None))(jnp.ones((5, 3, 2)), jnp.ones(2)).shape
    (5, 3, 2)
    """
    keywords = dict(abstract=abstract, gradient=gradient, batching=batching, sharding=sharding, split=split)
    if callable(name):
        return _register(getattr(name, "__name__", "operation"), {"default": name}, **keywords)
    if implementations is None:
        return lambda function: _register(name or function.__name__, {"default": function}, **keywords)
    if name is None:
        raise KernelError("register_tpu_op: `implementations` is given without a `name`; pass one.")
    return _register(name, implementations, **keywords)


def _register(name: str, implementations: Mapping[str, Callable[..., Any]], **keywords: Any) -> RegisteredOp:
    if "default" not in implementations:
        raise KernelError(
            f"register_tpu_op: {name}: `implementations` has no 'default'; pass a function of jax.numpy that defines "
            "the operation."
        )
    unknown = sorted(set(implementations) - {*_PLATFORMS, "default"})
    if unknown:
        raise KernelError(
            f"register_tpu_op: {name}: there is no platform {unknown[0]!r}; choose from {', '.join(_PLATFORMS)} and "
            "default."
        )
    if not name.isidentifier():
        raise KernelError(
            f"register_tpu_op: the name {name!r} is not an identifier; use letters, digits and underscores."
        )
    operation = OPERATIONS[name] = RegisteredOp(name, implementations, **keywords)
    return operation


def _array_parameters(name: str, function: Callable[..., object]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise KernelError(f"register_tpu_op: {name}: the default takes *arguments; name its arrays.")
    names = tuple(p.name for p in parameters if p.kind in kinds and p.default is p.empty)
    if not names:
        raise KernelError(f"register_tpu_op: {name}: the default takes no arrays.")
    return names


def _parse(
    name: str, rule: str, operands: int, split: str
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    left, arrow, right = rule.partition("->")
    before, after = (tuple(tuple(part.split()) for part in side.split(",")) for side in (left, right))
    if not arrow or len(before) != operands:
        raise KernelError(
            f"register_tpu_op: {name}: the sharding rule {rule!r} has {len(before)} operands, but the operation takes "
            f"{operands}; "
            'write "b t d, d -> b t d".'
        )
    for dims in (*before, *after):
        for factor in dims:
            if not factor.isidentifier() or dims.count(factor) > 1:
                raise KernelError(
                    f"register_tpu_op: {name}: the sharding rule {rule!r} has {' '.join(dims)!r}; write a name for "
                    "each axis of an array, each once."
                )
    factors = {factor for dims in before for factor in dims}
    if unknown := sorted({factor for dims in after for factor in dims} - factors):
        raise KernelError(
            f"register_tpu_op: {name}: the sharding rule {rule!r} has {unknown[0]!r} in a result alone; name an axis "
            "of the operands, or leave the rule out."
        )
    if unknown := sorted(set(split) - factors):
        raise KernelError(
            f"register_tpu_op: {name}: `split` is {split!r}, but the sharding rule {rule!r} has no factor "
            f"{unknown[0]!r}; pass letters of {', '.join(sorted(factors))}."
        )
    return before, after


def _single(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _words(tree: PyTree) -> str:
    return ", ".join(f"{jnp.dtype(x.dtype).name}{list(x.shape)}".replace(" ", "") for x in jax.tree.leaves(tree))
