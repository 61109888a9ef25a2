"""Gradient checkpointing of any Flax module: the blocks in its tree keep their inputs, and compute the rest again.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). Blocks are siblings that are alike: modules of one
class in NNX, subtrees of parameters with the same shapes in linen. Where no siblings are alike, each child is a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
from flax import linen, nnx

from vishwamai.core.errors import ConfigError
from vishwamai.core.types import PyTree

if TYPE_CHECKING:
    from flax.linen.module import InterceptorContext
    from flax.typing import PathParts as Path

_KEPT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "block_wise": jax.checkpoint_policies.nothing_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What JAX keeps within a block, by policy."""


def checkpoint_blocks(model: nnx.Module | linen.Module, policy: str) -> nnx.Module | linen.Module:
    """The module with its blocks under a policy: its numbers and its tree of parameters stay.

    Args:
      model: module of NNX, which shares its parameters with the result, or of linen.
      policy: "block_wise" or "full" keep the input of each block, "dots" the results of products too, "none" all.

    Raises:
      ConfigError: there is no such policy.
    """
    if policy not in _KEPT:
        raise ConfigError(
            f"remat: {policy!r} is not a policy of a {type(model).__name__}; pass one of {', '.join(_KEPT)}. "
            "The others need a vishwamai.models.Decoder."
        )
    if policy == "none":
        return model
    return _linen(model, policy) if isinstance(model, linen.Module) else _nnx(model, policy)


def _alike(siblings: Mapping[Path, object]) -> tuple[Path, ...]:
    """The topmost paths with a sibling that is alike; the children of the root where there are none.

    Args:
      siblings: properties that alike paths share, by path.
    """
    groups: dict[object, list[Path]] = {}
    for path, kind in siblings.items():
        groups.setdefault((path[:-1], kind), []).append(path)
    paths = sorted((path for group in groups.values() if len(group) > 1 for path in group), key=len)
    top: list[Path] = []
    for path in paths:
        if not any(path[: len(above)] == above for above in top):
            top.append(path)
    return tuple(top) or tuple(path for path in siblings if len(path) == 1)


def _nnx(model: nnx.Module, policy: str) -> nnx.Module:
    graph, state = nnx.split(model)
    model = nnx.merge(graph, state, copy=False)
    modules = {path: module for path, module in nnx.iter_modules(model) if path}
    # A list or dict of modules is a node on the way, not a block.
    callable_ones = {path: type(module) for path, module in modules.items() if callable(module)}
    for path in _alike(callable_ones):
        modules[path].__class__ = _checkpointed_class(type(modules[path]), policy)
    return model


@functools.cache
def _checkpointed_class(kind: type, policy: str) -> type:
    """The class with its call checkpointed; one per class, so that programs are compiled once."""

    def __call__(self: object, *args: object, **options: object) -> object:
        leaves, treedef = jax.tree.flatten((args, options))
        traced = [isinstance(leaf, jax.typing.ArrayLike) and hasattr(leaf, "dtype") for leaf in leaves]

        graph, state = nnx.split(self)
        variables, structure = jax.tree.flatten(state)
        changed: list[int] = []

        def run(variables: list[PyTree], arrays: list[PyTree]) -> PyTree:
            rest = iter(arrays)
            values = [next(rest) if is_array else leaf for leaf, is_array in zip(leaves, traced)]
            inner, named = jax.tree.unflatten(treedef, values)
            module = nnx.merge(graph, jax.tree.unflatten(structure, variables))
            result = kind.__call__(module, *inner, **named)
            after = jax.tree.leaves(nnx.state(module))
            changed[:] = [i for i, (new, old) in enumerate(zip(after, variables, strict=True)) if new is not old]
            return result, [after[i] for i in changed]

        arrays = [leaf for leaf, is_array in zip(leaves, traced) if is_array]
        result, updates = jax.checkpoint(run, policy=_KEPT[policy])(variables, arrays)
        if changed:  # statistics of norms, counts of random numbers
            for i, value in zip(changed, updates):
                variables[i] = value
            nnx.update(self, jax.tree.unflatten(structure, variables))
        return result

    return type(kind)(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})


def _linen(model: linen.Module, policy: str) -> linen.Module:
    kind = _checkpointed_linen(type(model), policy)
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__ if name not in ("parent", "name")}
    return kind(**fields, name=model.name)


@functools.cache
def _checkpointed_linen(kind: type, policy: str) -> type:
    def __call__(self: linen.Module, *args: object, **options: object) -> object:
        blocks = _linen_blocks(self.variables.get("params", {}))
        root = len(self.path)

        def checkpointed(
            call: Callable[..., object],
            args: tuple[PyTree, ...],
            options: dict[str, PyTree],
            context: InterceptorContext,
        ) -> object:
            if context.method_name != "__call__" or context.module.path[root:] not in blocks:
                return call(*args, **options)

            def run(module: linen.Module, args: tuple[PyTree, ...]) -> object:
                del module  # bound to the lifted scope, which `call` reads
                return call(*args, **options)

            return linen.remat(run, policy=_KEPT[policy])(context.module, args)

        with linen.intercept_methods(checkpointed):
            return kind.__call__(self, *args, **options)

    return type(kind)(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})


def _linen_blocks(params: Mapping[str, PyTree]) -> tuple[Path, ...]:
    """Paths of the blocks, by the parameters; none before there are any."""
    siblings: dict[Path, object] = {}

    def walk(path: Path, node: Mapping[str, PyTree]) -> None:
        for name, child in node.items():
            if isinstance(child, Mapping):
                leaves, treedef = jax.tree.flatten(child)
                siblings[(*path, name)] = treedef, tuple(leaf.shape for leaf in leaves)
                walk((*path, name), child)

    walk((), params)
    return _alike(siblings)
