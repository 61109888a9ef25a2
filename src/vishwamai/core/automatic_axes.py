"""Kernels for TPUs in programs whose mesh axes are automatic: the mesh is known while tracing, the shardings are not.

XLA decides the shardings after tracing, and libtpu does not ask how to split a kernel as XLA's other compilers do
(`custom_partitioning`). So a kernel becomes a `shard_map` over the automatic axes, whose specs follow from the axes'
names: names in `COLUMNS` split heads or columns, all others batch entries or rows, where the sizes divide. XLA moves an
operand that lies otherwise, so the answer does not depend on the names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from jax.sharding import AxisType

from vishwamai.core import observe
from vishwamai.core.dims import Factors
from vishwamai.core.sharding import Assignment, Axes, factor_leaves, reduce_missing, spec_of
from vishwamai.core.types import PyTree

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh


COLUMNS = ("model", "tensor", "tp", "mp", "heads", "model_parallel", "tensor_parallel")
"""Names of mesh axes that split heads, columns or hidden features; any other splits batch entries or rows."""
_OF_COLUMNS = ("heads", "n", "hidden")
_OF_ROWS = ("batch", "groups", "m", "rows", "tokens", "seq")


def automatic_mesh(arrays: PyTree) -> Mesh | AbstractMesh | None:
    """The mesh of the arrays if it has automatic axes of several devices, else None."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(arrays))
    mesh = next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())
    return mesh if not mesh.empty and any(mesh.shape[name] > 1 for name in _automatic(mesh)) else None


def _automatic(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Auto)


def automatic_assignment(
    dims: Sequence[Factors],
    shapes: Sequence[tuple[int, ...]],
    splittable: frozenset[str],
    sizes: Mapping[str, int],
) -> Assignment:
    """Which automatic axes split which factor: by the names of the axes, where every dimension of the factor divides.

    Args:
      dims: factors of each operand's dimensions.
      shapes: global shapes of the operands.
      splittable: factors that may be split.
      sizes: size of each automatic mesh axis.

    >>> gemm = [("groups", "m", "k"), ("groups", "k", "n")]
    >>> automatic_assignment(gemm, [(1, 8, 4), (1, 4, 6)], frozenset(("m", "n")), {"data": 4, "model": 2})
    {'m': ('data',), 'n': ('model',)}
    """
    assignment: Assignment = {}

    def divides(factor: str, ways: int) -> bool:
        extents = [
            extent
            for names, shape in zip(dims, shapes, strict=True)
            for name, extent in zip(names, shape, strict=True)
            if name == factor and extent != 1
        ]
        return bool(extents) and all(extent % ways == 0 for extent in extents)

    for axis, size in sizes.items():
        for factor in _OF_COLUMNS if axis in COLUMNS else _OF_ROWS:
            ways = math.prod(sizes[name] for name in assignment.get(factor, ())) * size
            if factor in splittable and divides(factor, ways):
                assignment[factor] = (*assignment.get(factor, ()), axis)
                break
    return assignment


def over_automatic_axes(
    function: Callable[..., object], axes: Axes, mesh: Mesh | AbstractMesh, name: str, results: PyTree
) -> Callable[..., PyTree]:
    """`function` as a `shard_map` over the automatic axes of `mesh`.

    Args:
      function: works on arrays of any size, and is called on the local shards.
      axes: factors of its arguments and results.
      name: the operation, for `explain`.
      results: the global shapes of its results.
    """
    automatic = _automatic(mesh)
    argument_dims = factor_leaves(axes.arguments)
    shapes, treedef = jax.tree.flatten(results)
    result_dims = factor_leaves(axes.results)

    def call(*arguments: PyTree) -> PyTree:
        leaves, arguments_def = jax.tree.flatten(arguments)
        sizes = {axis: mesh.shape[axis] for axis in automatic if mesh.shape[axis] > 1}
        assignment = automatic_assignment(argument_dims, [leaf.shape for leaf in leaves], axes.splittable, sizes)
        parts = [f"{factor} over {', '.join(split)}" for factor, split in assignment.items()] or ["nothing is split"]
        observe.note(
            f"{name} over automatic mesh axes {', '.join(sizes)}, on TPU: {', '.join(parts)}, by the names of the axes."
        )
        carried = [
            {factor for factor, extent in zip(names, shape.shape, strict=True) if extent != 1}
            for names, shape in zip(result_dims, shapes, strict=True)
        ]

        def local(*shards: PyTree) -> PyTree:
            outputs = function(*jax.tree.unflatten(arguments_def, shards))
            return tuple(jax.tree.leaves(reduce_missing(outputs, carried, assignment)))

        def specs(dims: Sequence[Factors], arrays: Sequence[PyTree]) -> tuple[jax.P, ...]:
            return tuple(spec_of(names, x.shape, assignment) for names, x in zip(dims, arrays, strict=True))

        # Inside the caller's own shard_map the mesh is that of the context.
        context = None if not jax.sharding.get_abstract_mesh().empty else mesh
        split = jax.shard_map(
            local,
            mesh=context,
            in_specs=specs(argument_dims, leaves),
            out_specs=specs(result_dims, shapes),
            axis_names=set(automatic),
            check_vma=False,
        )
        return jax.tree.unflatten(treedef, split(*leaves))

    return call
