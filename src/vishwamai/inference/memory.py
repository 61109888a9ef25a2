"""Bytes of a decoder's parameters, pages and states on each device, by the shapes and shardings with which they lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import QTensor, bits
from vishwamai.core.quantized.packed_qtensor import has_kernel
from vishwamai.inference.limits import Limits
from vishwamai.inference.pools import scales_by_token, with_token_scales
from vishwamai.inference.sharding import adapter_shapes, logical_rules, pool_sharding
from vishwamai.models.config import ModelConfig
from vishwamai.models.pages import has_states, page_shapes, pages_of, window_rings
from vishwamai.models.parameters import Parameter, parameter_path, top_parameters

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from vishwamai.models.adapters import AdapterSizes
    from vishwamai.models.storage import Storage


def weight_bytes(
    config: ModelConfig,
    itemsize: int,
    *,
    quantize: str | Storage | None = None,
    int8_head: bool = False,
    mesh: Mesh | None = None,
    directory: Path | None = None,
    on_cpu: bool | None = None,
) -> int:
    """Bytes of the parameters on each device, on a CPU without a mesh with the weights packed.

    Args:
      itemsize: bytes of an element of those that are not quantized.
      quantize: argument of `from_pretrained`.
      int8_head: bool, True for a head in int8 (`storage.HEAD`).
      mesh: mesh of the model (`mesh.serving_rules`).
      directory: the checkpoint's directory, whose headers say what `quantize="keep"` holds.
      on_cpu: bool, True where the devices are CPUs; None: JAX's default backend says it.

    Raises:
      ShapeError: as `mesh.serving_rules`, or a mesh axis cuts through blocks that share a scale.
      UnsupportedError: as `from_pretrained`.
    """
    from vishwamai.models.shifted_weight import ShiftedWeight
    from vishwamai.models.storage import HEAD, KEEP, KEEP_PACKED, QUANTIZATIONS, Storage, parameter_sharding

    on_cpu = jax.default_backend() == "cpu" if on_cpu is None else on_cpu
    storage: Callable[[str, Parameter, int | None], Storage | None] | None = None
    if quantize in (KEEP, KEEP_PACKED):
        from vishwamai.models.checkpoint import storages

        if directory is None:
            raise ShapeError(
                f"weight_bytes: `quantize` is {quantize!r}; pass the `directory` whose headers say what that is."
            )
        storage = storages(directory, config, str(quantize))
    head = "embed" if config.tie_embeddings else "head"
    place = None if mesh is None else (mesh, logical_rules(config, mesh))
    total = 0
    for name, parameter, layer in _parameters(config):
        where = parameter_path(name, layer)
        if storage is not None:
            stored = storage(name, parameter, layer)
        else:
            form = quantize if quantize is None or isinstance(quantize, Storage) else QUANTIZATIONS[quantize]
            stored = form if parameter.matrix else None
        if stored is None:
            scale_bytes = 4 if parameter.float32 else itemsize
            sharding = None if place is None else parameter_sharding(*place, parameter, 1, where)
            count = math.prod(parameter.shape if sharding is None else sharding.shard_shape(parameter.shape))
            if int8_head and name == head:
                vocab, hidden = parameter.shape
                total += count + 4 * vocab * -(-hidden // (HEAD.block_size or hidden))
            else:
                total += count * scale_bytes
            continue
        weight = stored.shapes(parameter)
        if place is not None:
            split = stored.shardings(*place, parameter, 1, where)
            shapes = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype), weight, split
            )
            weight = stored.tensor(*jax.tree.leaves(shapes))
        if isinstance(weight, ShiftedWeight):
            total, weight = total + 4 * weight.shifts.size, weight.tensor
        packs = not on_cpu or (mesh is None and has_kernel(weight.format, weight.block_size))
        total += _packed_bytes(weight, on_cpu) if packs else _unpacked_bytes(weight)
    return total


def adapter_bytes(config: ModelConfig, sizes: AdapterSizes, dtype: DTypeLike, mesh: Mesh | None) -> int:
    """Bytes on each device of the matrices of all adapters."""
    shapes = jax.tree.leaves(adapter_shapes(config, sizes, dtype, mesh))
    parts = (x.shape if x.sharding is None else x.sharding.shard_shape(x.shape) for x in shapes)
    return jnp.dtype(dtype).itemsize * sum(map(math.prod, parts))


def _packed_bytes(weight: QTensor, on_cpu: bool) -> int:
    """Bytes of a weight as accelerators hold it, two 4-bit numbers to a byte, or packed for the CPU, where scales are
    float32.
    """
    return weight.nbytes + (weight.scales.size * (4 - weight.scales.dtype.itemsize) if on_cpu else 0)


def _unpacked_bytes(weight: QTensor) -> int:
    """Bytes where a 4-bit number takes one, as JAX's arrays do on a CPU."""
    return sum(x.size * max(bits(x.dtype), 8) // 8 for x in (weight.values, weight.scales))


def _parameters(config: ModelConfig) -> Iterator[tuple[str, Parameter, int | None]]:
    """Every parameter of every layer: its name, its table's entry, and the layer."""
    yield from ((name, p, None) for name, p in top_parameters(config).items())
    for layer, kind in enumerate(config.layers):
        yield from ((name, p, layer) for name, p in kind.parameters(config).items())


def rings_of(config: ModelConfig, limits: Limits) -> dict[int, int]:
    """Most pages that a sequence holds in layers with a window, by the windows that have pools of their own
    (`window_rings`).
    """
    return window_rings(config, page_size=limits.page_size, length=limits.max_length, tokens=limits.max_tokens)


def ring_pages(rings: Mapping[int, int], limits: Limits) -> dict[int, int]:
    """Pages of one layer with that window: so many for every sequence that may run."""
    return {window: limits.max_sequences * ring for window, ring in rings.items()}


def page_bytes(
    config: ModelConfig,
    page_size: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    num_pages: int = 1,
    window_pages: Mapping[int, int] | None = None,
    on_cpu: bool | None = None,
) -> int:
    """Bytes on each device of one page of every layer, or of so many, with its scales; without those of states.

    Args:
      page_size: tokens of a page.
      dtype: dtype of keys and values.
      mesh: mesh of the pools (`mesh.place_pool`).
      num_pages, window_pages: arguments of `page_shapes`.
      on_cpu: bool, True where the devices are CPUs; None: JAX's default backend says it.
    """
    on_cpu = jax.default_backend() == "cpu" if on_cpu is None else on_cpu

    def size(shape: jax.ShapeDtypeStruct) -> int:
        parts = pool_sharding(config, mesh).shard_shape(shape.shape) if mesh is not None else shape.shape
        return math.prod(parts) * shape.dtype.itemsize

    sizes: dict[str, Any] = {"num_pages": num_pages, "page_size": page_size, "window_pages": window_pages}
    pools = page_shapes(config, dtype=dtype, stacked=False, num_states=1, **sizes)
    if scales_by_token(dtype, on_cpu):
        pools = tuple(map(with_token_scales, pools))
    return sum(map(size, jax.tree.leaves([pages_of(pool) for pool in pools])))


def state_bytes(config: ModelConfig) -> int:
    """Bytes on each device of the states of one sequence, in all layers: 0 for a model of pages alone."""
    return sum(4 * math.prod(shape) for kind in config.layers for shape in kind.mixer.state(config).values())


def default_states(config: ModelConfig, max_sequences: int, prefix_cache: bool) -> int:
    """Slots of states where memory allows them: one for every sequence that may run, and two for each that are kept."""
    return (1 + 2 * prefix_cache) * max_sequences if has_states(config) else 0
