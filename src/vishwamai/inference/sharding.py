"""A decoder served by several devices: which mesh axes split what of it.

The axis "tensor" splits heads, the features of feed-forward networks, keys and values, and the vocab where its size
divides it (Shoeybi et al., "Megatron-LM", 2019). Latent pages (MLA) have no heads: each device holds them whole. The
axis "expert" splits experts, to which tokens travel (Lepikhin et al., "GShard", 2020). Both are explicit, so the types
of the arrays say where collectives are; the operations compute on each device's part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import DeviceError, ShapeError, UnsupportedError
from vishwamai.core.qtensor import QTensor
from vishwamai.core.types import PyTree
from vishwamai.models.config import ModelConfig
from vishwamai.models.pages import MixedPool, QuantizedPages
from vishwamai.models.parameters import LOGICAL_NAMES, Parameter, split_units

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from vishwamai.models.adapters import AdapterSizes, Place
    from vishwamai.models.decoder import Decoder
    from vishwamai.parallel import LogicalRules

TENSOR, EXPERT = "tensor", "expert"


def serving_mesh(axes: str | Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the first devices, as many as `axes` name, for `Engine`.

    Args:
      axes: "tensor=2", "expert=4,tensor=2", or the sizes by name; as `vishwamai.parallel.make_mesh`.
      devices: sequence from which the mesh takes the first ones; None: `jax.devices()`.

    Raises:
      ShapeError: `axes` cannot be read.
      DeviceError: there are fewer devices.

    >>> dict(serving_mesh("tensor=1").shape)
    {'tensor': 1}
    """
    from vishwamai.parallel.mesh import axis_sizes, make_mesh

    sizes, devices = axis_sizes(axes), list(jax.devices() if devices is None else devices)
    count = math.prod(sizes.values())
    if count > len(devices):
        fix = f"; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={count} makes them"
        raise DeviceError(
            f"the mesh {sizes_text(sizes)} needs {count} devices, but JAX has {len(devices)} ({devices[0].platform})"
            f"{fix if devices[0].platform == 'cpu' else ''}; pass sizes whose product is at most {len(devices)}."
        )
    return make_mesh(sizes, devices=devices[:count] if count > 0 else devices)


@checked
def serving_rules(config: ModelConfig, sizes: Mapping[str, int]) -> dict[str, str]:
    """The mesh axis of each logical axis of the parameters, as `from_pretrained` takes them.

    Args:
      config: the decoder's config.
      sizes: the mesh's axes and their sizes (`mesh.shape`).

    Raises:
      ShapeError: an axis is none of "tensor" and "expert", or does not divide what it splits; the text says what would.

    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 63, "hidden_size": 32, "intermediate_size": 48,
    ...     "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64})
    >>> serving_rules(config, {"tensor": 2})
    {'heads': 'tensor', 'kv_heads': 'tensor', 'mlp': 'tensor'}
    """
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        raise ShapeError(f"`sizes` is {described(sizes)}; pass the mesh's axes and their sizes (`mesh.shape`).")
    units = split_units(config)
    counts = {TENSOR: {name: units[name] for name in ("heads", "kv_heads", "mlp") if name in units}}
    counts[EXPERT] = {name: units[name] for name in ("experts",) if name in units}
    rules: dict[str, str] = {}
    for axis, size in sizes.items():
        if axis not in counts:
            raise ShapeError(f'the mesh has an axis "{axis}"; pass the axes "tensor" and "expert" only: "tensor=2".')
        if not counts[axis] and size > 1:
            raise ShapeError(
                f'the mesh axis "{axis}" has size {size}, but {config.family} has no experts; leave it out.'
            )
        for unit, count in counts[axis].values():
            if count % size:
                common = math.gcd(*(count for _, count in counts[axis].values()))
                fits = ", ".join(f"{axis}={n}" for n in range(1, common + 1) if common % n == 0)
                raise ShapeError(
                    f'the mesh axis "{axis}" has size {size}, which does not divide the model\'s {count} {unit}; '
                    f"pass one of {fits}."
                )
        rules |= dict.fromkeys(counts[axis], axis)
    if TENSOR in sizes and config.vocab_size % sizes[TENSOR] == 0:
        rules["vocab"] = TENSOR
    return rules


def logical_rules(config: ModelConfig, mesh: Mesh) -> LogicalRules:
    """`serving_rules` with the logical axes that stay whole.

    Raises:
      ShapeError: as `serving_rules`.
    """
    from vishwamai.parallel import LogicalRules

    return LogicalRules({**dict.fromkeys(LOGICAL_NAMES), **serving_rules(config, mesh.shape)})


def place_model(model: Decoder, mesh: Mesh) -> Decoder:
    """Splits the parameters of a decoder over a mesh, in place; those that lie on it already stay.

    Raises:
      ShapeError: as `serving_rules`, or the mesh's axes are not explicit.
      UnsupportedError: weights are packed, and not on the mesh.
    """
    from vishwamai.models.shifted_weight import ShiftedWeight
    from vishwamai.models.storage import Storage, parameter_sharding
    from vishwamai.models.variables import parameter_variables

    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    if any(kind != AxisType.Explicit for kind in kinds.values()):
        raise ShapeError(
            f"Engine: the mesh's axes are of the types {', '.join(f'{n}: {k.name}' for n, k in kinds.items())}; pass "
            "explicit ones, as vishwamai.parallel.make_mesh gives them."
        )
    rules = logical_rules(model.config, mesh)
    for name, parameter, layers, variable in parameter_variables(model):
        value = variable.get_value()
        if all(getattr(leaf.sharding, "mesh", None) == mesh for leaf in jax.tree.leaves(value)):
            continue
        place = mesh, rules, parameter, len(layers or (0,)), name, "Engine"
        if isinstance(value, QTensor) or (isinstance(value, ShiftedWeight) and isinstance(value.weight, QTensor)):
            split = Storage.of(value).shardings(*place)
            variable.set_value(jax.tree.map(jax.device_put, value, split))
            continue
        if not isinstance(value, jax.Array):
            raise UnsupportedError(
                f"Engine: parameter `{name}` is a {type(value).__name__}, which is not split over a mesh; load the "
                "model with from_pretrained(directory, mesh=..., rules=...), without packing it."
            )
        variable.set_value(jax.device_put(value, parameter_sharding(*place)))
    return model


def adapter_shapes(
    config: ModelConfig, sizes: AdapterSizes, dtype: DTypeLike, mesh: Mesh | None
) -> dict[Place, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """The matrices of all adapters by place, split over the mesh as the weights are that they adapt."""
    from vishwamai.models.storage import parameter_sharding

    rules = None if mesh is None else logical_rules(config, mesh)

    def described(parameter: Parameter, name: str) -> jax.ShapeDtypeStruct:
        split = None if mesh is None or rules is None else parameter_sharding(mesh, rules, parameter, 1, name, "Engine")
        return jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=split)

    return {
        (layer, name): (described(down, name), described(up, name))
        for (layer, name), (down, up) in sizes.parameters(config).items()
    }


def place_pool(config: ModelConfig, pool: PyTree, mesh: Mesh | None) -> PyTree:
    """A pool of pages `[pages, page_size, 2 * kv_heads, head_dim]`, or a latent one, over the mesh; states lie on each
    device, which has all heads of their layers.
    """
    if mesh is None:
        return pool
    if isinstance(pool, dict):
        return replicated(pool, mesh)
    if isinstance(pool, MixedPool):
        return MixedPool(place_pool(config, pool.pages, mesh), replicated(pool.states, mesh))
    sharding = pool_sharding(config, mesh)
    if isinstance(pool, QuantizedPages):
        scales = NamedSharding(mesh, PartitionSpec(None, *([None] if pool.by_token else []), sharding.spec[2]))
        k_scale, v_scale = (put(scale, scales) for scale in (pool.k_scale, pool.v_scale))
        return QuantizedPages(place_pool(config, pool.pool, mesh), k_scale, v_scale)
    return put(pool, sharding)


def put(tree: PyTree, sharding: object) -> PyTree:
    """Arrays with a sharding; a shape stays one."""
    return jax.tree.map(
        lambda x: x.update(sharding=sharding) if isinstance(x, jax.ShapeDtypeStruct) else jax.device_put(x, sharding),
        tree,
    )


def place_of(model: Decoder) -> Mesh | AbstractMesh | Sharding | None:
    """Where the shapes of a decoder lie that has no arrays (`models.shapes`): a sharding of one device, or the mesh of
    several; None of a decoder with arrays.
    """
    first = jax.tree.leaves(model)[0]
    if not isinstance(first, jax.ShapeDtypeStruct):
        return None
    return first.sharding.mesh if isinstance(first.sharding, NamedSharding) else first.sharding


def pool_sharding(config: ModelConfig, mesh: Mesh) -> NamedSharding:
    """How a pool of pages lies over the mesh: split by kv heads, or on each device where a row serves all heads."""
    paged = [kind.mixer for kind in dict.fromkeys(config.layers) if kind.mixer.has_pages(config)]
    by_head = all(len(mixer.page_row(config)) > 1 for mixer in paged)
    heads = TENSOR if by_head and TENSOR in mesh.shape else None
    return NamedSharding(mesh, PartitionSpec(None, None, heads))


def replicated(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Arrays whole on each device of the mesh."""
    return tree if mesh is None else put(tree, NamedSharding(mesh, PartitionSpec()))


def gathered(x: PyTree, mesh: Mesh | None) -> PyTree:
    """In a program: `x` whole on each device of the mesh."""
    return x if mesh is None else jax.sharding.reshard(x, NamedSharding(mesh.abstract_mesh, PartitionSpec()))


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[object]:
    """Where programs for the mesh are traced."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def mesh_of(model: Decoder) -> Mesh | None:
    """The mesh on which a decoder's parameters lie, None for one device."""
    sharding = jax.tree.leaves(model.embed.get_value())[0].sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def sizes_text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
