"""Bytes that a decoder's parameters and pages take on each device, by the shapes and shardings with which they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from vishwamai.inference.mesh import logical_rules, pool_sharding
from vishwamai.inference.scheduler import Limits
from vishwamai.models.config import ModelConfig
from vishwamai.models.pages import page_shapes, window_rings
from vishwamai.models.parameters import Parameter, layer_parameters, top_parameters

# Bytes of one weight of a layer's products, its scales included (a float32 for each 32 rows, or for each column).
_QUANTIZED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 32}


def weight_bytes(
    config: ModelConfig,
    itemsize: int,
    *,
    quantize: str | None = None,
    int8_head: bool = False,
    mesh: Mesh | None = None,
) -> int:
    """Bytes of the parameters on each device.

    Args:
      itemsize: bytes of an element of those that are not quantized.
      quantize: as of `from_pretrained`.
      int8_head: the head is int8, with a float32 for each token.
      mesh: over which the model is split (`mesh.serving_rules`).

    Raises:
      ShapeError: as `mesh.serving_rules`.
    """
    head = "embed" if config.tie_embeddings else "head"
    total = 0.0
    for name, parameter, count in _held(config, mesh):
        each: float = 4 if parameter.float32 else itemsize
        if quantize is not None and parameter.matrix:
            each = _QUANTIZED[quantize]
        elif int8_head and name == head:
            each = 1 + 4 / config.hidden_size
        total += count * each
    return int(total)


def _held(config: ModelConfig, mesh: Mesh | None) -> Iterator[tuple[str, Parameter, int]]:
    """Every parameter of every layer: its name, its table's entry, and the elements that each device holds."""
    tables = [top_parameters(config), *(layer_parameters(config, kind) for kind in config.layers)]
    if mesh is None:
        yield from ((name, p, math.prod(p.shape)) for table in tables for name, p in table.items())
        return
    from vishwamai.models.checkpoint import parameter_sharding

    rules = logical_rules(config, mesh)
    for table in tables:
        for name, p in table.items():
            yield name, p, math.prod(parameter_sharding(mesh, rules, p, 1, name).shard_shape(p.shape))


def rings_of(config: ModelConfig, limits: Limits, prefix_cache: bool | None) -> dict[int, int]:
    """Pages of each sequence's ring, by the window of the layers that have one (`window_rings`).

    Pages in rings belong to one sequence, so a prefix cache leaves no ring.
    """
    if prefix_cache:
        return {}
    return window_rings(config, page_size=limits.page_size, length=limits.max_length, tokens=limits.max_tokens)


def ring_pages(rings: Mapping[int, int], limits: Limits) -> dict[int, int]:
    """Pages of one layer with that window: a ring for every sequence that may run."""
    return {window: limits.max_sequences * ring for window, ring in rings.items()}


def page_bytes(
    config: ModelConfig,
    page_size: int,
    dtype: Any,
    mesh: Mesh | None = None,
    num_pages: int = 1,
    window_pages: Mapping[int, int] | None = None,
) -> int:
    """Bytes on each device of one page of every layer, or of so many.

    Args:
      page_size: tokens of a page.
      dtype: of keys and values.
      mesh: over which the pools lie (`mesh.place_pool`).
      num_pages, window_pages: as of `page_shapes`.
    """

    def elements(shape: jax.ShapeDtypeStruct) -> int:
        return math.prod(shape.shape if mesh is None else pool_sharding(config, mesh).shard_shape(shape.shape))

    sizes: dict[str, Any] = {"num_pages": num_pages, "page_size": page_size, "window_pages": window_pages}
    shapes = page_shapes(config, dtype=dtype, stacked=False, **sizes)
    return sum(elements(shape) * shape.dtype.itemsize for shape in shapes)
