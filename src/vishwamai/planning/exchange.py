"""Seconds that a training step spends in collectives, by formulas: what each mesh axis exchanges, over its links.

Nothing overlaps in these sums, except experts' rows that travel in pieces: they rank meshes. Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters" (2021) count tensor parallelism alike;
`ops.attention.split.ring_hops` is the ring, `ops.moe.layer` the exchange of tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax.numpy as jnp

from vishwamai.core.links import estimate_collective, line_links
from vishwamai.core.target import Target
from vishwamai.models import ModelConfig
from vishwamai.ops.moe.exchange.times import pays
from vishwamai.parallel import ExchangeEstimate, estimate_exchange
from vishwamai.planning.mesh_links import links_of
from vishwamai.training.config import TrainConfig
from vishwamai.training.pipeline.stages import cut
from vishwamai.training.sharding import PIPELINE, TOKENS, row_parts

Split = Mapping[tuple[str, ...], float]
"""Bytes of a device's trained parameters, by the mesh axes that split them."""


def exchange_seconds(
    config: TrainConfig,
    target: str,
    model: ModelConfig,
    parameters: Split,
    recomputed: float,
    frozen: Split | None = None,
    embedding: float = 0.0,
) -> dict[str, float]:
    """Seconds by mesh axis; "data" is the sum of gradients over all axes that split no parameter of them.

    Args:
      config: the step, whose mesh has all devices of `target`. model: which it trains.
      parameters: bytes of a device's part of them.
      recomputed: share of the forward pass that is computed again.
      frozen: bytes as `parameters`, of those without gradients.
      embedding: bytes of a device's `parameters` that are an embedding which "fsdp" splits and no device gathers:
        devices exchange the rows of its result, and those of their gradients.

    Raises:
      VishwamaiError: as `estimate_collective`, and as `training.pipeline.stages.cut`.
    """
    mesh = config.mesh
    wide = jnp.dtype(config.model.param_dtype).itemsize
    narrow = jnp.dtype(config.model.compute_dtype).itemsize
    copies = mesh.data * mesh.fsdp * mesh.expert * mesh.sequence  # of a token's computation there is one in each
    tokens = config.batch_size * config.data.sequence_length / copies  # a device's, in all microbatches
    stream = tokens * model.hidden_size * narrow
    times: dict[str, float] = {}

    fsdp = links_of(mesh, target, "fsdp")
    split = mesh.fsdp * (sum(nbytes for axes, nbytes in parameters.items() if "fsdp" in axes) - embedding)
    below = mesh.fsdp * sum(nbytes for axes, nbytes in (frozen or {}).items() if "fsdp" in axes)
    below *= 1 if config.lora.quantize else narrow / wide  # quantized ones travel as they are held
    gathered = estimate_collective("all_gather", split * narrow / wide + below, fsdp)
    summed = jnp.dtype(config.model.reduce_dtype).itemsize
    added = estimate_collective("reduce_scatter", split * summed / wide, fsdp)
    times["fsdp"] = config.microbatches * (2 * gathered + added)
    if embedding:
        times["fsdp"] += 2 * estimate_collective("all_to_all", mesh.fsdp * stream, fsdp)
    times["data"] = 0.0
    for axes, nbytes in parameters.items():
        alike = links_of(mesh, target, *(axis for axis in (*TOKENS, "tensor") if axis not in axes))
        times["data"] += estimate_collective("all_reduce", nbytes * 4 / wide, alike)

    # The results of attention and of the network of each layer, forward and backward, and those of the embedding.
    sums = model.num_layers / mesh.pipeline * (4 + 2 * recomputed) + 2
    times["tensor"] = sums * estimate_collective("all_reduce", stream, links_of(mesh, target, "tensor"))
    times["sequence"] = _ring(config, target, model, tokens, recomputed) / mesh.pipeline
    if mesh.expert > 1:
        times["expert"] = _experts(config, target, model, recomputed) / mesh.pipeline
    if mesh.pipeline > 1:
        times[PIPELINE] = _between_stages(config, target, model, stream)
    return {axis: seconds for axis, seconds in times.items() if seconds}


def rows_in_pieces(config: TrainConfig, target: str, model: ModelConfig) -> bool:
    """Whether `moe_layer` sends the rows of a step to their experts in pieces: by the links of neighbours, as it does.

    Args: as of `exchange_seconds`.
    """
    if config.mesh.expert == 1:
        return False
    line = line_links(Target.parse_chip(target), (config.mesh.expert,))
    return pays([way(links=line) for way in _ways(config, model)[0]])


def experts_room(config: TrainConfig, model: ModelConfig) -> int:
    """Rows that a device has room for in a microbatch, of those that one other device sends to its experts: all choices
    of its tokens.
    """
    assert model.experts is not None  # `check_units` has seen to it
    parts = row_parts(config.mesh) * config.mesh.sequence * config.microbatches
    return math.ceil(config.batch_size * config.data.sequence_length / parts * model.experts.top_k)


def _between_stages(config: TrainConfig, target: str, model: ModelConfig, stream: float) -> float:
    """What stages send in every tick, both ways at once; and the embedding and the head, which each stage has whole
    while the schedule runs.
    """
    mesh, (_, _, ticks) = config.mesh, cut(config, model)
    links = links_of(mesh, target, PIPELINE)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2) / (mesh.fsdp * mesh.tensor)
    nbytes = tables * jnp.dtype(config.model.param_dtype).itemsize
    seconds = len(ticks.table) * estimate_collective("permute", stream / config.microbatches, links)
    seconds += estimate_collective("all_gather", nbytes, links)
    return seconds + (0.0 if config.lora.rank else estimate_collective("reduce_scatter", 4 * tables, links))


Way = functools.partial[ExchangeEstimate]


def _ways(config: TrainConfig, model: ModelConfig) -> tuple[list[Way], list[Way]]:
    """Estimates of the exchanges of a layer of experts over some links, forward and backward."""
    experts, mesh, room = model.experts, config.mesh, experts_room(config, model)
    assert experts is not None
    wide, inner = model.hidden_size, (experts.inner_size or model.intermediate_size) // mesh.tensor
    estimate = functools.partial(
        estimate_exchange,
        room,
        experts=experts.count // mesh.expert,
        dtype=config.model.compute_dtype,
        rows=room / mesh.expert,
    )
    forward = [
        functools.partial(estimate, k=wide, n=2 * inner),
        functools.partial(estimate, k=inner, n=wide, results=True),
    ]
    # Gradients of results go where the rows went, and those of rows come back.
    backward = [
        functools.partial(estimate, k=wide, n=inner),
        functools.partial(estimate, k=2 * inner, n=wide, results=True),
    ]
    return forward, backward


def _experts(config: TrainConfig, target: str, model: ModelConfig, recomputed: float) -> float:
    """What products do not hide of the rows' way to the experts and back, forward and backward."""
    links, pieces = links_of(config.mesh, target, "expert"), rows_in_pieces(config, target, model)

    def seconds(ways: list[Way]) -> float:
        times = [way(links=links) for way in ways]
        return sum(way.exposed if pieces else way.exchange for way in times)

    forward, backward = _ways(config, model)
    once = (1 + recomputed) * seconds(forward) + seconds(backward)
    return config.microbatches * (model.num_layers - model.dense_layers) * once


def _ring(config: TrainConfig, target: str, model: ModelConfig, tokens: float, recomputed: float) -> float:
    """Keys and values travel forward and backward, and in the backward pass their float32 gradients, too."""
    size, links = config.mesh.sequence, links_of(config.mesh, target, "sequence")
    if size == 1:
        return 0.0
    itemsize, seconds = jnp.dtype(config.model.compute_dtype).itemsize, 0.0
    for kind in model.layers:
        numbers = tokens * kind.mixer.ring_features(model) / config.mesh.tensor
        keys = estimate_collective("permute", numbers * itemsize, links)
        gradients = estimate_collective("permute", numbers * 4, links)
        hops, window = size - 1, kind.mixer.window
        if window is not None:  # the keys that a window reaches
            hops = min(hops, math.ceil((window - 1) * size / config.data.sequence_length))
        seconds += hops * (2 + recomputed) * keys + (size if hops else 0) * gradients
    return seconds
