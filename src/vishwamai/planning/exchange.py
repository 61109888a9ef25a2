"""Seconds that a training step spends in collectives, by formulas: what each mesh axis exchanges, over its links.

Nothing overlaps in these sums: they rank meshes. Narayanan et al., "Efficient Large-Scale Language Model Training on
GPU Clusters" (2021) count tensor parallelism alike; `ops.attention.ring_hops` is the ring, `ops.moe.parallel` the
exchange of tokens.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from vishwamai.core.links import estimate_collective
from vishwamai.models import ModelConfig
from vishwamai.planning.mesh_links import links_of
from vishwamai.training.config import TrainConfig


def exchange_seconds(
    config: TrainConfig, target: str, model: ModelConfig, local: float, experts: float, recomputed: float
) -> dict[str, float]:
    """Seconds by mesh axis; "data" is the sum of gradients over all axes that split tokens and not parameters.

    Args:
      config: the step, whose mesh has all devices of `target`. model: which it trains.
      local: bytes of a device's parameters. experts: of them, those that `mesh.expert` splits.
      recomputed: share of the forward pass that is computed again.

    Raises: as `estimate_collective`.
    """
    mesh = config.mesh
    wide = jnp.dtype(config.model.param_dtype).itemsize
    narrow = jnp.dtype(config.model.compute_dtype).itemsize
    copies = mesh.data * mesh.fsdp * mesh.expert * mesh.sequence  # of a token's computation there is one in each
    tokens = config.batch_size * config.data.sequence_length / copies  # a device's, in all microbatches
    stream = tokens * model.hidden_size * narrow
    found: dict[str, float] = {}

    fsdp = links_of(mesh, target, "fsdp")
    gathered = estimate_collective("all_gather", local * mesh.fsdp * narrow / wide, fsdp)
    added = estimate_collective("reduce_scatter", local * mesh.fsdp * 4 / wide, fsdp)
    found["fsdp"] = config.microbatches * (2 * gathered + added)
    apart, shared = links_of(mesh, target, "data", "sequence"), links_of(mesh, target, "data", "expert", "sequence")
    found["data"] = estimate_collective("all_reduce", experts * 4 / wide, apart)
    found["data"] += estimate_collective("all_reduce", (local - experts) * 4 / wide, shared)

    # The results of attention and of the network of each layer, forward and backward, and those of the embedding.
    sums = model.num_layers * (4 + 2 * recomputed) + 2
    found["tensor"] = sums * estimate_collective("all_reduce", stream, links_of(mesh, target, "tensor"))
    found["sequence"] = _ring(config, target, model, tokens, recomputed)

    if model.experts is not None and model.num_layers > model.dense_layers:
        # Both ways, forward and backward; every device has room for all choices of every other.
        rows = mesh.expert * mesh.expert * stream * model.experts.top_k
        once = estimate_collective("all_to_all", rows, links_of(mesh, target, "expert"))
        found["expert"] = (model.num_layers - model.dense_layers) * (4 + 2 * recomputed) * once
    return {axis: seconds for axis, seconds in found.items() if seconds}


def _ring(config: TrainConfig, target: str, model: ModelConfig, tokens: float, recomputed: float) -> float:
    """Keys and values travel forward and backward, and in the backward pass their float32 gradients, too."""
    size, links = config.mesh.sequence, links_of(config.mesh, target, "sequence")
    if size == 1:
        return 0.0
    if model.latent is None:
        features = 2 * model.num_kv_heads * model.head_dim
    else:
        features = model.num_heads * (model.latent.nope_dim + model.latent.rope_dim + model.latent.value_dim)
    numbers = tokens * features / config.mesh.tensor
    keys = estimate_collective("permute", numbers * jnp.dtype(config.model.compute_dtype).itemsize, links)
    gradients = estimate_collective("permute", numbers * 4, links)
    seconds = 0.0
    for kind in model.layers:
        hops = size - 1
        if kind.window is not None:  # the keys that a window reaches
            hops = min(hops, math.ceil((kind.window - 1) * size / config.data.sequence_length))
        seconds += hops * (2 + recomputed) * keys + (size if hops else 0) * gradients
    return seconds
