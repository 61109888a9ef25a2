"""Rules from the logical names of an array's axes to the mesh axes that split them, and trees laid out by them.

The names belong to the model and the rules to the run, so one model serves every mesh. The form is that of T5X and
Flax (Roberts et al., "Scaling Up Models and Data with t5x and seqio", 2022), with every name and size checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import ShapeError
from vishwamai.core.numbers import divisors
from vishwamai.core.types import PyTree

Names = Sequence[str | None]
"""A logical name for each of an array's last axes; None for an axis that is never split."""


class LogicalRules(Mapping[str, tuple[str, ...]]):
    """Which mesh axes split each logical axis: `LogicalRules({"embed": "fsdp", "heads": "tensor", "vocab": None})`.

    A mapping from logical names to tuples of mesh axes, () for an axis that stays whole. It has to have every name
    that the arrays use, so that a misspelled name is an error and not an array that every device holds.

    Args:
      rules: a mesh axis, several, or None for whole, by logical name.

    Raises:
      ShapeError: a name or a mesh axis is not a text, or a rule names a mesh axis twice.

    >>> rules = LogicalRules({"embed": "fsdp", "heads": ("tensor", "expert"), "vocab": None})
    >>> rules.partition(("vocab", "embed"))
    P(None, 'fsdp')
    >>> rules["heads"], rules["vocab"]
    (('tensor', 'expert'), ())
    >>> rules.partition(("embed", "head"))
    Traceback (most recent call last):
    vishwamai.core.errors.ShapeError: LogicalRules: an array has an axis named 'head', but the rules have embed, heads,
    vocab; add "head": None to keep it whole, or a mesh axis.
    """

    def __init__(self, rules: Mapping[str, str | Sequence[str] | None]):
        if not isinstance(rules, Mapping):
            raise ShapeError(
                f'LogicalRules: `rules` is {described(rules)}; pass a dict, {{"embed": "fsdp", "vocab": None}}.'
            )
        self._rules = {name: _axes_of(name, value) for name, value in rules.items()}

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash(frozenset(self._rules.items()))  # equal mappings in any order are equal, and hash so

    def __repr__(self) -> str:
        return f"LogicalRules({self._rules})"

    def partition(self, names: Names, *, where: str = "an array", shape: Sequence[int] | None = None) -> PartitionSpec:
        """The split of an array whose last axes have these names.

        Args:
          names: logical names of its last axes.
          where: the array's name in errors, such as its path.
          shape: the array's shape; axes before the named ones stay whole. None is as many axes as names.

        Raises:
          ShapeError: a name is not in the rules, two axes would be split by the same mesh axis, or there are more names
            than axes.
        """
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(_is_name(name) for name in names):
            raise ShapeError(
                f"LogicalRules: the names of {where} are {described(names)}; pass a tuple with a logical name or None "
                "for each of its last axes."
            )
        rank = len(names) if shape is None else len(shape)
        if len(names) > rank:
            raise ShapeError(
                f"LogicalRules: {where} has {rank} axes (shape {tuple(shape or ())}), but {len(names)} names: "
                f"{_listed(names)}; pass a name for each of its last axes."
            )
        # axes before the named ones: layers of a stack, experts
        entries: list[tuple[str, ...]] = [()] * (rank - len(names))
        user: dict[str, str] = {}  # which axis took a mesh axis, for the error
        for name in names:
            if name is not None and name not in self._rules:
                raise ShapeError(
                    f"LogicalRules: {where} has an axis named {name!r}, but the rules have "
                    f'{", ".join(self._rules) or "no names"}; add "{name}": None to keep it whole, or a mesh axis.'
                )
            axes = () if name is None else self._rules[name]
            for axis in axes:
                if axis in user:
                    raise ShapeError(
                        f"LogicalRules: {where} has axes named {user[axis]!r} and {name!r}, which the rules both split "
                        f"by the mesh axis {axis!r}; map one of the two to another mesh axis, or to None."
                    )
                user[axis] = str(name)
            entries.append(axes)
        # The form that JAX compares: a single name alone, None for whole.
        return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries))

    def sharding(
        self, mesh: Mesh, names: Names, shape: Sequence[int], *, where: str = "an array", function: str = "LogicalRules"
    ) -> NamedSharding:
        """The sharding of an array on a mesh that has the axes of its rules, and whose sizes divide the array's.

        Args:
          mesh: the mesh.
          names: logical names of the array's last axes. shape: the array's shape.
          where: the array's name in errors. function: the caller's name in them.

        Raises:
          ShapeError: as `partition`; the mesh lacks an axis; or a size does not divide.
        """
        spec = self.partition(names, where=where, shape=shape)
        for place, (size, name, entry) in enumerate(
            zip(shape, (*[None] * (len(shape) - len(names)), *names), spec, strict=True)
        ):
            axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            missing = [axis for axis in axes if axis not in mesh.shape]
            if missing:
                raise ShapeError(
                    f"{function}: `rules` map {name!r} (axis {place} of {where}) to {missing[0]!r}, but the mesh's "
                    f"axes are {', '.join(mesh.shape)}; make a mesh with it, or map {name!r} to one of these or None."
                )
            # several mesh axes split one dimension by their product
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if size % parts:
                sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
                raise ShapeError(
                    f"{function}: {where} has {size} along axis {place} ({name!r}), which {sizes} does not divide; "
                    f"choose a mesh with {_divisors(size, parts)} there, or map {name!r} to None."
                )
        return NamedSharding(mesh, spec)


@checked
def shardings(tree: PyTree, mesh: Mesh, rules: LogicalRules, axes: Mapping[str, Names] | None = None) -> PyTree:
    """The sharding of every array of a tree, as `shard` lays it out: for `out_shardings` of `jax.jit`, or a restore.

    The arguments and errors are those of `shard`.

    >>> from vishwamai.parallel import make_mesh
    >>> mesh = make_mesh("tensor=1", devices=jax.devices()[:1])
    >>> shardings(np.ones((8, 16)), mesh, LogicalRules({"mlp": "tensor"}), {"": (None, "mlp")}).spec
    P(None, 'tensor')
    """
    declared = getattr(tree, "logical_axes", None) if axes is None else axes

    def of(path: jax.tree_util.KeyPath, leaf: jax.Array) -> NamedSharding:
        where = path_text(path)
        _check_leaf(where, leaf)
        shape = np.shape(leaf)
        names = _names(where, declared or {})
        if names is None:
            if shape:
                expected = f"({', '.join(['name'] * len(shape))}{',' * (len(shape) == 1)})"
                raise ShapeError(
                    f"shard: {where or 'the array'} of shape {shape} has no names; pass "
                    f'`axes={{"{where.rpartition("/")[2]}": {expected}}}` with a logical name or None for each of its '
                    "last axes."
                )
            names = ()
        return rules.sharding(mesh, names, shape, where=where, function="shard")

    return jax.tree_util.tree_map_with_path(of, tree)


def _check_leaf(where: str, leaf: PyTree) -> None:
    """Raises ShapeError for what is neither an array, nor its shape, nor a number that an array can hold."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        representable = isinstance(leaf, (bool, float, complex)) or (isinstance(leaf, int) and -(2**31) <= leaf < 2**31)
    else:  # a key of jax.random has a dtype of JAX's own
        representable = hasattr(leaf, "shape") and (not isinstance(dtype, np.dtype) or dtype.kind in "biufcV")
    if not representable:
        raise ShapeError(f"shard: {where or 'the tree'} is {described(leaf)}; pass arrays or jax.ShapeDtypeStructs.")


def path_text(path: jax.tree_util.KeyPath) -> str:
    """A leaf's path as errors, tables and `axes` write it.

    >>> path_text((jax.tree_util.DictKey("layers"), jax.tree_util.SequenceKey(0)))
    'layers/0'
    """
    # A variable of Flax NNX is a node of its own, whose leaf is its `value`.
    inner = path[:-1] if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value") else path
    return jax.tree_util.keystr(inner, simple=True, separator="/")


def names_of(tree: object) -> list[tuple[str, jax.Array]]:
    """(path, leaf) of every array of a tree, checked."""
    paths = [(path_text(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    for where, leaf in paths:
        _check_leaf(where, leaf)
    return paths


def _names(path: str, axes: Mapping[str, Names]) -> Names | None:
    """The entry whose path is the longest end of `path`.

    >>> _names("layers/0/query", {"query": ("embed", "heads"), "1/query": (None, None)})
    ('embed', 'heads')
    """
    parts = path.split("/")
    ends = ("/".join(parts[start:]) for start in range(len(parts)))  # from the longest end to the shortest
    return next((axes[end] for end in ends if end in axes), None)


def _axes_of(name: object, value: Any) -> tuple[str, ...]:
    axes = () if value is None else (value,) if isinstance(value, str) else value
    fits = isinstance(axes, (tuple, list)) and all(isinstance(axis, str) and axis for axis in axes)
    if not isinstance(name, str) or not name or not fits:
        raise ShapeError(
            f"LogicalRules: `rules` map {name!r} to {described(value)}; map a name to a mesh axis, a tuple of them, or "
            "None."
        )
    if len(set(axes)) < len(axes):
        raise ShapeError(f"LogicalRules: `rules` map {name!r} to {value!r}; name every mesh axis once.")
    return tuple(axes)


def _is_name(name: object) -> bool:
    return name is None or isinstance(name, str)


def _listed(names: Names) -> str:
    return ", ".join(str(name) for name in names)


def _divisors(size: int, parts: int) -> str:
    """The sizes next to `parts` that divide `size`."""
    fitting = [n for n in divisors(size) if n <= 2 * parts]
    return " or ".join(str(n) for n in sorted(fitting, key=lambda n: (abs(n - parts), n))[:2]) or "1 device"
