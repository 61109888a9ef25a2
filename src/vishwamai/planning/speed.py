"""The speed of a training step: MFU and tokens of a chip from its time, and a cheap time from shapes alone.

The analytic time is a sum of lower bounds: products at the chip's peak, the optimizer's arrays and the kept activations
through HBM, collectives over the links. Nothing overlaps in it. It ranks candidates; docs/planning.md has its error.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from vishwamai.core import hardware
from vishwamai.core.links import AxisLinks, estimate_collective
from vishwamai.core.target import Target
from vishwamai.models import ModelConfig
from vishwamai.planning.analytic import Breakdown, training_memory
from vishwamai.planning.figures import Estimate
from vishwamai.planning.training import devices_of, model_config
from vishwamai.training.config import TrainConfig
from vishwamai.training.flops import flops_per_token

_RECOMPUTED = {"none": 0.0, "dots": 0.0}
"""Share of the forward pass's products that a policy computes again; of the others, all."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the time of a training step means.

    Attributes:
      step: seconds of a step. tokens: of a step, on all chips. chips: how many.
      flops: of the model in a step, recomputation not counted, on all chips.
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
        hours = self.step.value * self.chips / 3600
        return Estimate(price * hours / self.tokens * 1e6, self.step.level, "USD per million tokens")

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.tokens_per_chip.value:.0f} tokens/s a chip, MFU {self.mfu.value:.1%} of "
            f"{self.peak / 1e12:.0f} TFLOP/s ({self.dtype})"
        )


def training_speed(config: TrainConfig, target: str, step: Estimate) -> Speed:
    """The speed of a configuration whose step takes so long on a target."""
    chip = Target.parse_chip(target)
    length = config.data.sequence_length
    tokens = config.batch_size * length
    dtype = config.model.compute_dtype
    flops = tokens * flops_per_token(model_config(config), length)
    return Speed(step, tokens, max(1, devices_of(target) // chip.devices), flops, chip.peak(dtype), dtype)


def training_time(config: TrainConfig, target: str, memory: Breakdown | None = None) -> Estimate:
    """Seconds of a training step by formulas, the analytic level.

    What the axes "expert", "sequence" and "tensor" of a mesh exchange is not counted.

    Args:
      config: the step, which fits the target's devices. target: a chip or slice.
      memory: what `training_memory` says of them, where the caller has it.

    Raises: as `training_memory`.
    """
    memory = memory or training_memory(config, target)
    chip, devices = Target.parse_chip(target), devices_of(target)
    length, model = config.data.sequence_length, model_config(config)
    tokens = config.batch_size * length / devices
    products = _products(model, length) * (1 + _RECOMPUTED.get(config.remat, 1.0) / 3)
    seconds = tokens * products / chip.peak_per_device(config.model.compute_dtype)

    parts = {name: part.value for name, part in memory.parts.items()}
    state = 2 * (parts["parameters"] + parts["optimizer"] + parts["gradients"])  # read and written once
    kept = 2 * parts["activations"] * config.microbatches
    seconds += (state + kept) / chip.hbm_bandwidth_per_device
    return Estimate(seconds + _collectives(config, target, parts["parameters"]), "analytic", "s")


def _products(model: ModelConfig, length: int) -> float:
    """FLOP of the products of a token, forward and backward, with half of the attention of a causal mask."""
    none = flops_per_token(model, 0)
    return none + (flops_per_token(model, length) - none) / 2


def _collectives(config: TrainConfig, target: str, local: float) -> float:
    """Seconds of gathering the parameters twice and of adding up gradients; `local`: a device's bytes of parameters."""
    mesh = config.mesh
    fsdp, others = _axes(target, mesh.fsdp)
    itemsize = jnp.dtype(config.model.param_dtype).itemsize
    narrow = jnp.dtype(config.model.compute_dtype).itemsize / itemsize
    seconds = 0.0
    if mesh.fsdp > 1:
        gathered = estimate_collective("all_gather", local * mesh.fsdp * narrow, fsdp)
        added = estimate_collective("reduce_scatter", local * mesh.fsdp * 4 / itemsize, fsdp)
        seconds += config.microbatches * (2 * gathered + added)
    if mesh.data > 1:
        seconds += estimate_collective("all_reduce", local * 4 / itemsize, others)
    return seconds


def _axes(target: str, fsdp: int) -> tuple[AxisLinks, AxisLinks]:
    """The links of an axis of so many devices, the last of the slice, and of the rest of it."""
    chip, sides = Target.parse_chip(target), Target.parse_tpu(target).topology or ()
    closed = hardware.wraps(chip, sides) if sides else ()
    left = max(1, fsdp // chip.devices)
    inner, outer = [], []
    for side, wrap in reversed(list(zip(sides, closed))):
        taken = math.gcd(side, left)
        left //= taken
        inner.append((taken, wrap and taken == side and taken > 2))
        outer.append((side // taken, wrap and taken == 1 and side > 2))
    return tuple(
        AxisLinks(chip, tuple(n for n, _ in axes if n > 1), tuple(w for n, w in axes if n > 1))
        for axes in (inner, outer)
    )  # type: ignore[return-value]
