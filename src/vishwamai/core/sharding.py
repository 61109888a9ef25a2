"""Sharding by factors: each dimension of each operand and result carries the name of a factor, and an op says which
factors may be split.

From the operands' shardings we read which mesh axes split which factor; every operand and result is then made to follow
(an operand split along a factor that must stay whole, a sequence say, is gathered). A result that lacks a split factor
is a sum over it and is reduced over those mesh axes. So a kernel only ever sees whole problems, and a sharding can
change the speed but never the answer. How the rule is enforced depends on the mesh axes:

- explicit (sharding in types): the public function becomes a `shard_map`, on every platform (`follow_explicit_axes`);
- automatic: XLA's partitioner asks us through `custom_partitioning` (`partitioned`), for CPU and GPU kernels. libtpu
  has no such hook, so there a kernel becomes a `shard_map` by the names of the axes (`core.automatic_axes`); XLA's own
  operations are split by XLA on every platform;
- manual: inside the caller's own `shard_map` there is nothing to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import ManualAxisType, Mesh, NamedSharding, PartitionSpec

from vishwamai.core.dims import Factors
from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.core.jax_private import partition_spec_of
from vishwamai.core.types import AnyArray, PyTree

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh
    from jax.typing import DTypeLike


Assignment = dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Axes:
    """The factor of every dimension of an op's operands and results.

    Attributes:
      arguments: pytree like the arguments, a tuple of factor names in place of each array; None for a dimension of its
        own.
      results: the same for the results.
      splittable: the factors that may be split over mesh axes. A factor may stand for dimensions of different sizes
        (query heads and kv heads); it is split only where every one of them divides evenly.
      merged: the factors over whose parts the function itself sums; results are not summed over them again.
    """

    arguments: PyTree
    results: PyTree
    splittable: frozenset[str]
    merged: frozenset[str] = frozenset()

    @property
    def dims(self) -> list[Factors]:
        """The factors of all arguments, then of all results."""
        return [*factor_leaves(self.arguments), *factor_leaves(self.results)]


def mesh_axis_size(function: str, name: str, axes: tuple[str, ...]) -> int:
    """How many devices the mesh axes hold; `function` and its argument `name` are for the error.

    Raises:
      ShapeError: one of them is not an axis that the function is mapped over.
    """
    try:
        return jax.lax.axis_size(axes)
    except NameError as error:
        raise ShapeError(
            f"{function}: `{name}` is {axes}, which this call is not mapped over ({error}); call it inside "
            "jax.shard_map on a mesh with those axes, or pass None."
        ) from error


def varying_axes(*trees: object) -> frozenset[str]:
    """The mesh axes that any of the arrays varies over inside `shard_map` (empty outside, and under
    `check_vma=False`).
    """
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(trees)))


def out_struct(shape: Sequence[int], dtype: DTypeLike, *operands: PyTree) -> jax.ShapeDtypeStruct:
    """The shape of a kernel's output, varying over every mesh axis that an operand varies over."""
    varying = varying_axes(operands)
    # A type that varies names the mesh whose axes it varies over.
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec()) if varying else None
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype, sharding=sharding, manual_axis_type=ManualAxisType(varying=varying)
    )


def match_varying(operands: object) -> PyTree:
    """Inside a `shard_map`, marks every operand as varying over the axes that any of them varies over.

    The transpose of that mark is the sum over shards, which is the gradient of an operand that is shared between them.
    """
    varying = varying_axes(operands)

    def mark(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(varying - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, operands) if varying else operands


def _is_dims(node: object) -> bool:
    return (
        isinstance(node, tuple)
        and not hasattr(node, "_fields")
        and all(item is None or isinstance(item, str) for item in node)
    )


def factor_leaves(tree: object) -> list[Factors]:
    return jax.tree.leaves(tree, is_leaf=_is_dims)


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a partition spec names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def assign(
    dims: Sequence[Factors],
    splittable: frozenset[str],
    shapes: Sequence[tuple[int, ...]],
    specs: Sequence[Sequence[PyTree]],
    sizes: Mapping[str, int],
) -> Assignment:
    """Which mesh axes split which factor: the first operand that says so decides, if every dimension of the factor
    divides evenly.

    Args:
      dims: factors of each operand's dimensions.
      splittable: factors that may be split.
      shapes: global shapes of the operands.
      specs: partition specs of the operands.
      sizes: size of each mesh axis.
    """
    assignment: Assignment = {}
    used: set[str] = set()
    for names, spec in zip(dims, specs, strict=True):
        for name, entry in zip(names, tuple(spec), strict=False):
            axes = tuple(axis for axis in mesh_axes(entry) if axis not in used)
            if name not in splittable or name in assignment or not axes:
                continue
            ways = 1
            for axis in axes:
                ways *= sizes[axis]
            extents = [
                shape[i]
                for factors, shape in zip(dims, shapes, strict=True)
                for i, n in enumerate(factors)
                if n == name and shape[i] != 1
            ]
            if extents and all(extent % ways == 0 for extent in extents):
                assignment[name] = axes
                used.update(axes)
    return assignment


def spec_of(names: Factors, shape: tuple[int, ...], assignment: Assignment) -> PartitionSpec:
    """Partition spec of one array; a broadcast dimension of size 1 stays whole."""
    return PartitionSpec(
        *(
            assignment.get(name) if name is not None and extent != 1 else None
            for name, extent in zip(names, shape, strict=True)
        )
    )


def reduce_missing(results: object, carried: Sequence[set[str | None]], assignment: Assignment) -> Any:
    """Sums each result over the mesh axes whose factor it does not carry."""
    leaves, treedef = jax.tree.flatten(results)
    reduced = []
    for value, names in zip(leaves, carried, strict=True):
        missing = tuple(axis for name, split in assignment.items() if name not in names for axis in split)
        reduced.append(jax.lax.psum(value, missing) if missing else value)
    return jax.tree.unflatten(treedef, reduced)


def _decoded(sharding: object, mesh: Mesh) -> PartitionSpec:
    """The partition spec of XLA's own form of a sharding; whole where it splits by a part of a mesh axis, which no spec
    can say.

    Such a part comes from a factor with fewer elements than devices: two kv heads beside four query heads on an axis of
    four.
    """
    return partition_spec_of(sharding, mesh) or PartitionSpec()


def partitioned(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """Wraps `function` so that XLA's automatic partitioner follows `axes`; on one device it is `function` itself."""

    wrapped = custom_partitioning(function)
    argument_dims = factor_leaves(axes.arguments)

    def partition(mesh: Mesh, argument_shapes: PyTree, result_shapes: PyTree) -> Any:
        shapes, treedef = jax.tree.flatten(argument_shapes)
        if mesh.empty:
            # The program has no mesh to name axes by (arrays with XLA's own shardings only): every device computes the
            # whole.
            mesh = Mesh(sorted(shapes[0].sharding.device_set, key=lambda device: device.id), ("devices",))
            specs: list[Any] = [PartitionSpec()] * len(shapes)
        else:
            specs = [_decoded(shape.sharding, mesh) for shape in shapes]
        assignment = assign(argument_dims, axes.splittable, [shape.shape for shape in shapes], specs, dict(mesh.shape))
        arguments = [
            NamedSharding(mesh, spec_of(names, shape.shape, assignment))
            for names, shape in zip(argument_dims, shapes, strict=True)
        ]
        outs, out_treedef = jax.tree.flatten(result_shapes)
        result_dims = factor_leaves(axes.results)
        results = [
            NamedSharding(mesh, spec_of(names, shape.shape, assignment))
            for names, shape in zip(result_dims, outs, strict=True)
        ]
        # By the global extents: a local extent of 1 may be a share of many.
        carried = [
            {name for name, extent in zip(names, shape.shape, strict=True) if extent != 1}
            for names, shape in zip(result_dims, outs, strict=True)
        ]

        def local(*operands: PyTree) -> Any:
            return reduce_missing(function(*operands), carried, assignment)

        return mesh, local, jax.tree.unflatten(out_treedef, results), jax.tree.unflatten(treedef, arguments)

    def rule(mesh: Mesh, argument_types: Sequence[PyTree], result_types: Sequence[PyTree]) -> SdyShardingRule:
        return _shardy_rule(axes, [tuple(t.shape) for t in argument_types], [tuple(t.shape) for t in result_types])

    wrapped.def_partition(partition=partition, sharding_rule=rule, decode_shardings=False)
    return wrapped


def _shardy_rule(
    axes: Axes, argument_shapes: Sequence[tuple[int, ...]], result_shapes: Sequence[tuple[int, ...]]
) -> SdyShardingRule:
    """The same rule in Shardy's form, so that shardings propagate through the op before it is partitioned.

    A factor that stands for several sizes becomes a major factor of the smallest size and, in the larger dimensions, a
    compound with the rest.
    """
    dims = axes.dims
    shapes = [*argument_shapes, *result_shapes]
    smallest: dict[str, int] = {}
    for names, shape in zip(dims, shapes, strict=True):
        for name, extent in zip(names, shape, strict=True):
            if name is not None and extent != 1:
                smallest[name] = min(extent, smallest.get(name, extent))
    sizes: dict[str, int] = {}
    unsplit: list[str] = []
    fresh = 0

    def private(extent: int) -> str:
        nonlocal fresh
        fresh += 1
        name = f"p{fresh}"
        unsplit.append(name)
        return name

    mappings = []
    for names, shape in zip(dims, shapes, strict=True):
        mapping: list[Any] = []
        for name, extent in zip(names, shape, strict=True):
            if name is None or extent == 1:
                mapping.append(private(extent))
            elif extent == smallest[name]:
                mapping.append(f"f{name}")
                if name not in axes.splittable and f"f{name}" not in unsplit:
                    unsplit.append(f"f{name}")
            else:
                rest = private(extent)
                sizes[rest] = extent // smallest[name]
                sizes[f"f{name}"] = smallest[name]
                mapping.append(CompoundFactor(f"f{name}", rest))
        mappings.append(ArrayMapping(*mapping))
    count = len(argument_shapes)
    # In the order of their first use, which Shardy numbers them by: it takes no other.
    present = list(dict.fromkeys(factor for mapping in mappings for factor in _flat(mapping)))
    inferred = {dim for mapping in mappings for dim in mapping if isinstance(dim, str)}
    splittable = {f"f{name}" for name in axes.splittable}
    reduced = tuple(
        name for name in present if name in splittable and not any(name in _flat(m) for m in mappings[count:])
    )
    factor_sizes: dict[str, Any] = {name: size for name, size in sizes.items() if name not in inferred}
    return SdyShardingRule(
        tuple(mappings[:count]),
        tuple(mappings[count:]),
        reduction_factors=reduced,
        need_replication_factors=tuple(name for name in present if name in unsplit),
        **factor_sizes,
    )


def _flat(mapping: Any) -> list[str]:
    return [factor for dim in mapping for factor in ((dim,) if isinstance(dim, str) else dim)]


def explicit_mesh(arrays: PyTree) -> Any | None:
    """The mesh of the arrays if some of its axes are explicit (sharding in types), else None."""
    for leaf in jax.tree.leaves(arrays):
        mesh = jax.typeof(leaf).sharding.mesh
        if not mesh.empty and mesh.explicit_axes:
            return mesh
    return None


def on_explicit_axes(arrays: PyTree) -> bool:
    """Whether some dimension of the arrays is split over an explicit mesh axis."""
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return False
    specs = [jax.typeof(leaf).sharding.spec for leaf in jax.tree.leaves(arrays)]
    return any(name is not None for spec in specs for name in spec)


def assigned(mesh: Mesh | AbstractMesh, axes: Axes, arrays: PyTree) -> Assignment:
    """Which axes of an explicit mesh split which factor of the arrays."""
    leaves = jax.tree.leaves(arrays)
    specs = [jax.typeof(leaf).sharding.spec for leaf in leaves]
    shapes = [leaf.shape for leaf in leaves]
    return assign(factor_leaves(axes.arguments), axes.splittable, shapes, specs, dict(mesh.shape))


def follow_explicit_axes(function: Callable[..., object], axes: Axes | Callable[[], Axes], *arrays: AnyArray) -> PyTree:
    """Runs `function(*arrays)`, as a `shard_map` where the arrays live on explicit mesh axes (sharding in types).

    Args:
      function: works on arrays of any size, and is called on the local shards.
      axes: factors of the caller's own arrays and results; or a function that makes them, called only where an array is
        on explicit mesh axes.

    Raises:
      DeviceError: the arrays are on different meshes.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function(*arrays)
    axes = axes() if callable(axes) else axes
    leaves, treedef = jax.tree.flatten(arrays)
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in leaves]
    second = next((m for m in meshes if not m.empty and dict(m.shape) != dict(mesh.shape)), None)
    if second is not None:
        raise DeviceError(
            f"the arrays are on two meshes, with axes {dict(mesh.shape)} and {dict(second.shape)}; put them on one, "
            "for instance by jax.device_put(x, jax.NamedSharding(mesh, jax.P()))."
        )
    dims = factor_leaves(axes.arguments)
    assignment = assigned(mesh, axes, leaves)
    in_specs = [spec_of(names, leaf.shape, assignment) for names, leaf in zip(dims, leaves, strict=True)]

    def laid(*leaves: jax.Array) -> list[jax.Array]:
        return [
            jax.sharding.reshard(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, in_specs, strict=True)
        ]

    # An array that is on no mesh yet can only go there in one program with another that is.
    leaves = (jax.jit(laid) if any(leaf_mesh.empty for leaf_mesh in meshes) else laid)(*leaves)

    def out_spec(names: Factors) -> PartitionSpec:
        return PartitionSpec(*(None if name is None else assignment.get(name) for name in names))

    def local(*shards: PyTree) -> Any:
        results = function(*jax.tree.unflatten(treedef, shards))
        return reduce_missing(results, [{*names, *axes.merged} for names in factor_leaves(axes.results)], assignment)

    out_specs = jax.tree.map(out_spec, axes.results, is_leaf=_is_dims)
    # Empty stands for all axes but those that an enclosing vmap already maps over, which only JAX knows.
    axis_names = frozenset() if len(mesh.explicit_axes) == len(mesh.axis_names) else frozenset(mesh.explicit_axes)
    return jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, axis_names=axis_names)(
        *leaves
    )
