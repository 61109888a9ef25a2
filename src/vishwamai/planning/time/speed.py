"""The speed of a training step: MFU and tokens of a chip from its time, and a cheap time from shapes alone.

The analytic time is a sum of lower bounds: products at the chip's peak; the optimizer's arrays, the weights of each
pass and the kept activations through HBM; what is offloaded to the host and back; collectives over the links. Nothing
overlaps in it, except experts' rows that travel in pieces. It ranks candidates; docs/planning-time.md has its error.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp

from vishwamai.core.figures import Estimate, cost_of_tokens
from vishwamai.core.target import Target, devices_of
from vishwamai.models import ModelConfig
from vishwamai.planning.exchange import exchange_seconds
from vishwamai.planning.memory.analytic import (
    Breakdown,
    described,
    exchanged_embedding,
    frozen_parameters,
    split_parameters,
    training_memory,
)
from vishwamai.planning.memory.pipeline_buffers import microbatches_kept, stretch
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.flops import flops_per_token
from vishwamai.training.slices import TPU

_RECOMPUTED = {"none": 0.0, "dots": 0.0}
"""Share of the forward pass's products and collectives that a policy computes again; of the others, all."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the time of a training step means.

    Attributes:
      step: seconds of a step. tokens: of a step, on all chips. chips: how many.
      flops: operations of the model in a step, recomputation not counted, on all chips.
      peak: FLOP/s of one chip, published. dtype: of the products that the peak is of.
    """

    step: Estimate
    tokens: int
    chips: int
    flops: float
    peak: float
    dtype: str

    @property
    def tokens_per_chip(self) -> Estimate:
        """Tokens that a chip trains in a second."""
        return Estimate(self.tokens / self.chips / self.step.value, self.step.level, "tokens/s")

    @property
    def mfu(self) -> Estimate:
        """The model's FLOP over what the chips' peak allows in this time."""
        share = self.flops / (self.chips * self.peak * self.step.value)
        return Estimate(share, self.step.level, "of peak")

    def cost(self, price: float) -> Estimate:
        """USD for a million tokens, at a price in USD for a chip and hour."""
        return cost_of_tokens(price, self.step, self.tokens, self.chips)

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.tokens_per_chip.value:.0f} tokens/s a chip, MFU {self.mfu.value:.1%} of "
            f"{self.peak / 1e12:.0f} TFLOP/s ({self.dtype})"
        )


def training_speed(config: TrainConfig, target: str, step: Estimate) -> Speed:
    """The speed of a configuration whose step takes so long on a target."""
    config = resolved(config, TPU)
    chip = Target.parse_chip(target)
    length = config.data.sequence_length
    tokens = config.batch_size * length
    dtype = config.model.compute_dtype
    flops = tokens * flops_per_token(described(config), length)
    return Speed(step, tokens, max(1, devices_of(target) // chip.devices), flops, chip.peak(dtype), dtype)


def training_time(config: TrainConfig, target: str, memory: Breakdown | None = None) -> Estimate:
    """Seconds of a training step by formulas, the analytic level.

    Args:
      config: the step, which fits the target's devices. target: a chip or slice.
      memory: result of `training_memory` for them, where the caller has it.

    Raises:
      VishwamaiError: as `training_memory`.
    """
    config = resolved(config, TPU)
    memory = memory or training_memory(config, target)
    chip, devices = Target.parse_chip(target), devices_of(target)
    length, model = config.data.sequence_length, described(config)
    tokens = config.batch_size * length / devices
    recomputed = _RECOMPUTED.get(config.remat, 1.0)
    waits = stretch(config, model, recomputed)
    seconds = waits * tokens * _products(model, length) * (1 + recomputed / 3)
    seconds /= chip.peak_per_device(config.model.compute_dtype)

    parts = {name: part.value for name, part in memory.parts.items()}
    traffic = 2 * (parts["parameters"] + parts["optimizer"])  # read and written once
    traffic += 2 * parts["gradients"] * config.microbatches
    saved = parts["activations"] / microbatches_kept(config, model)
    narrow = jnp.dtype(config.model.compute_dtype).itemsize / jnp.dtype(config.model.param_dtype).itemsize
    # Each pass reads the weights that are gathered, and the activations that it keeps or has kept.
    split, frozen = split_parameters(config), frozen_parameters(config)
    parted = (*split.items(), *frozen.items())
    embedding = exchanged_embedding(config)
    gathered = (config.mesh.fsdp - 1) * (sum(nbytes for axes, nbytes in parted if "fsdp" in axes) - embedding)
    traffic += waits * (2 + recomputed) * (parts["parameters"] + gathered) * narrow * config.microbatches
    traffic += waits * 2 * saved * config.microbatches
    seconds += traffic / chip.hbm_bandwidth_per_device
    seconds += _offloaded(config, target, parts["activations"]) / (chip.host_bandwidth_per_device or math.inf)
    exchanged = exchange_seconds(config, target, model, split, recomputed, frozen, embedding)
    seconds += sum(time * (1 if axis in ("data", "pipeline") else waits) for axis, time in exchanged.items())
    return Estimate(seconds, "analytic", "s")


def _offloaded(config: TrainConfig, target: str, saved: float) -> float:
    """Bytes that `remat: offload` writes to the host's memory and reads back: what `full` keeps more than it."""
    if config.remat != "offload":
        return 0.0
    alike = dataclasses.replace(config, remat="full", optimization=config.optimization.of_kernels)
    nbytes = training_memory(alike, target).parts["activations"].value - saved
    return 2 * nbytes * config.microbatches


@functools.lru_cache(maxsize=16)
def _products(model: ModelConfig, length: int) -> float:
    """FLOP of the products of a token, forward and backward, with half of the attention of a causal mask."""
    none = flops_per_token(model, 0)
    return none + (flops_per_token(model, length) - none) / 2
