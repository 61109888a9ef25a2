"""The checks of shapes and dtypes of a public function's arrays, the former derived from their dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vishwamai.core import dims
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import FLOATS

if TYPE_CHECKING:
    import jax.numpy as jnp


class Argument(NamedTuple):
    """An array of the caller.

    Attributes:
      label: its name in errors.
      text: its dims.
      shape: its sizes.
      hint: text of an error after the right shape.
      turned: text of an error where the transposed array would fit.
    """

    label: str
    text: str
    shape: tuple[int, ...]
    hint: str | None = None
    turned: str | None = None


class _Seen:
    """The sizes that the arguments before have."""

    def __init__(self, sizes: Mapping[str, tuple[str, int]]) -> None:
        # dim (and "dim/"): argument, axis (None: not told), size
        self.axes: dict[str, tuple[str, int | None, int]] = {
            n: (label, None, size) for n, (label, size) in sizes.items()
        }
        self.lead: dict[str, tuple[str, tuple[int, ...]]] = {}  # dim of any number of axes: argument, sizes
        self.broadcast: set[str] = set()  # the names that broadcast

    def add(self, argument: Argument) -> None:
        """Remembers the sizes of an argument that fits. A shared axis of size 1 tells nothing of the others."""
        fixed, variadic, lead = laid(argument.text, argument.shape)
        for dim, axis, size in fixed:
            if dim.name is not None and not (dim.shareable and size == 1):
                of_one = (size - dim.more) // dim.times
                self.axes.setdefault(f"{dim.name}/" if dim.divides else dim.name, (argument.label, axis, of_one))
        if variadic is None or variadic.name is None:
            return
        if variadic.broadcasts:
            self._broadcast(variadic.name, argument.label, lead)
        elif not (variadic.shareable and not lead):
            self.lead.setdefault(variadic.name, (argument.label, lead))

    def _broadcast(self, name: str, label: str, lead: tuple[int, ...]) -> None:
        before, sizes = self.lead.get(name, ("", ()))
        joint = dims.broadcast(sizes, lead)
        assert joint is not None, "the argument does not fit"
        if not before or (joint != sizes and joint == lead):
            self.lead[name] = (label, joint)
        elif joint != sizes:
            self.lead[name] = (f"{before}` and `{label}", joint)
        self.broadcast.add(name)

    def misfit(self, text: str, shape: tuple[int, ...]) -> dims.Dim | None:
        """The first dim of an array that contradicts those before; the array has a legal number of axes."""
        fixed, variadic, lead = laid(text, shape)
        for dim, _, size in fixed:
            expected = self.size(dim)
            if expected is not None and size != expected and not (dim.shareable and size == 1):
                return dim
            of_one, rest = divmod(size - dim.more, dim.times)
            if rest or of_one < 0:
                return dim
            if dim.divides and dim.name in self.axes and (not size or self.axes[dim.name][2] % of_one):
                return dim
        if variadic is None or variadic.name not in self.lead or (variadic.shareable and not lead):
            return None
        before = self.lead[variadic.name][1]
        if variadic.name not in self.broadcast:
            return None if before == lead else variadic
        joint = dims.broadcast(before, lead)
        return None if joint is not None and (variadic.broadcasts or joint == before) else variadic

    def size(self, dim: dims.Dim) -> int | None:
        """The size that an axis has, as far as it is known."""
        name = f"{dim.name}/" if dim.divides else dim.name
        return self.axes[name][2] * dim.times + dim.more if name in self.axes else dim.size

    def owner(self, dim: dims.Dim) -> str:
        """The words for the argument that has the size of a dim, and for that size."""
        name = dim.name
        if dim.divides and f"{name}/" in self.axes:
            name = f"{name}/"
        if name in self.lead and dim.variadic:
            label, lead = self.lead[name]
            singular = name.removesuffix("s")
            return f"`{label}` has the {singular} axes {lead}" if lead else f"`{label}` has no {singular} axes"
        if name not in self.axes or dim.variadic:
            return ""
        label, axis, size = self.axes[name]
        name = name.removesuffix("/")
        count = f"{size} {name}" if name.endswith("s") else f"{name} = {size}"
        where = "" if axis is None else " in its last axis" if axis == -1 else f" in axis {axis}"
        return f"`{label}` has {count}{where}"

    def expected_shape(self, text: str, bare: bool) -> str:
        """The shape that an array should have; `bare`: without the axes of a dim that may be shared."""
        sizes: list[str] = []
        for dim in dims.parse(text):
            if not dim.variadic:
                size = self.size(dim)
                sizes.append(_named(dim) if size is None else str(size))
            elif not (dim.shareable and bare):
                sizes += map(str, self.lead[dim.name][1]) if dim.name in self.lead else ["..."]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 and sizes != ['...'] else ''})"


def check_float(function: str, label: str, dtype: jnp.dtype) -> None:
    """Raises ShapeError where an argument's dtype is not a float of 16 bits or more."""
    if dtype not in FLOATS:
        raise ShapeError(f"{function}: `{label}` has dtype {dtype.name}; pass bfloat16, float16, float32 or float64.")


def check_shapes(
    function: str, arguments: Iterable[Argument], sizes: Mapping[str, tuple[str, int]] | None = None
) -> None:
    """Raises ShapeError where the shapes contradict one another or the dims; `sizes` has the sizes of dims that other
    arguments bring: `{dim: (argument, size)}`.
    """
    seen = _Seen(sizes or {})
    for argument in arguments:
        if not _has_rank(argument.text, len(argument.shape)) or seen.misfit(argument.text, argument.shape):
            raise ShapeError(f"{function}: {_complaint(argument, seen)}")
        seen.add(argument)


def _complaint(argument: Argument, seen: _Seen) -> str:
    label, text, shape, hint, turned_hint = argument
    words = dims.parse(text)
    legal = _has_rank(text, len(shape))
    dim = seen.misfit(text, shape) if legal else None
    owners = sorted(words, key=lambda dim: dim.variadic) if dim is None else [dim]
    because = next(filter(None, map(seen.owner, owners)), "")
    actual = f"has shape {shape}" if shape else "is a scalar"
    turned = (*shape[:-2], *shape[:-3:-1])
    if legal and len(words) > 1 and not (words[-1].variadic or words[-2].variadic) and not seen.misfit(text, turned):
        fix = f"`{label}.T`" if len(shape) == 2 else f"`{label}.swapaxes(-1, -2)`"
        fix += f", or {turned_hint}" if turned_hint else ""
    else:
        fix = f"`{label}` of shape {seen.expected_shape(text, len(shape) <= len(words) - 1)}"
        if dim is not None and dim.variadic and dim.name in seen.broadcast:
            fix += f", or with {dim.name} axes that broadcast{'' if dim.broadcasts else ' to these'} (equal or 1)"
        elif dim is not None and dim.variadic and dim.shareable and seen.lead[dim.name or ""][1]:
            fix += f", or without the {dim.name} axes where all share it"
        elif dim is not None and dim.divides and seen.size(dim) is None:
            fix += f" where {dim.name} divides {seen.axes[dim.name or ''][2]}"
        elif _lacks(words):
            fix += ", with 1, or without leading axes, where it is shared"
        if not legal and len(shape) == 1 and len([dim for dim in words if not dim.variadic]) == 2:
            fix += f" (a vector as one row, `{label}[None, :]`, or one column, `{label}[:, None]`)"
        fix += f", {hint}" if hint else ""
    return f"`{label}` {actual}{f', but {because}' if because else ''}; pass {fix}."


def _lacks(words: tuple[dims.Dim, ...]) -> int:
    """How many leading axes an array may lack: axes of size 1 where it is shared, from the first on."""
    fixed = not any(dim.variadic for dim in words)
    return next((i for i, dim in enumerate(words) if not dim.shareable), len(words)) if fixed else 0


def _named(dim: dims.Dim) -> str:
    """A word of an unknown size."""
    return f"{f'{dim.times} * ' if dim.times > 1 else ''}{dim.name or '_'}{f' + {dim.more}' if dim.more else ''}"


def _has_rank(text: str, rank: int) -> bool:
    words = dims.parse(text)
    if any(dim.variadic for dim in words):
        return rank >= (0 if all(dim.shareable for dim in words) else len(words) - 1)
    return len(words) - _lacks(words) <= rank <= len(words)


def laid(text: str, shape: tuple[int, ...]) -> tuple[list[tuple[dims.Dim, int, int]], dims.Dim | None, tuple[int, ...]]:
    """((dim, axis from the end, size) of the words for one axis, the word for any number of axes, their sizes); an
    array with fewer axes than words has the last ones.
    """
    words = dims.parse(text)
    variadic = next((i for i, dim in enumerate(words) if dim.variadic), None)
    if variadic is None or len(shape) < len(words) - 1:
        variadic, words = None, words[len(words) - len(shape) :]
    more = len(shape) - len(words)
    fixed = []
    for i, dim in enumerate(words):
        if i != variadic:
            axis = i - len(shape) + (more if variadic is not None and i > variadic else 0)
            fixed.append((dim, axis, shape[axis]))
    return (
        fixed,
        None if variadic is None else words[variadic],
        () if variadic is None else shape[variadic : variadic + more + 1],
    )
