"""`optimize_batch_size`: the largest batch whose training step fits a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

from vishwamai.core.arguments import checked
from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.core.figures import LEVELS, Level
from vishwamai.core.numbers import human
from vishwamai.core.target import Target, devices_of
from vishwamai.core.types import PyTree
from vishwamai.planning.memory.allocation import llama_like, training_config
from vishwamai.planning.memory.analytic import training_memory
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.training import trace_training
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.flops import flops_per_token
from vishwamai.training.model import model_config
from vishwamai.training.slices import TPU

Memory = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Bound:
    """The most tokens per second that a roofline allows, and what sets it: "compute" or "memory bandwidth"."""

    tokens_per_second: float
    name: Literal["compute", "memory bandwidth"]


@checked
def optimize_batch_size(
    model_config: Mapping[str, object],
    memory_budget: int,
    target_throughput: float = 0.0,
    *,
    sequence_length: int = 2048,
    target: str = "v5e",
    step: Mapping[str, object] | None = None,
    level: str = "verified",
) -> int:
    """The largest batch of a training step that fits a budget of memory on each device of a target.

    Memory is nearly linear in the batch. So a line through the batches that were asked for gives the next one to ask
    for, until one batch fits and the next larger one does not.

    The throughput is checked against a roofline: the products at the device's peak, or parameters, gradients and
    optimizer read and written once. No step is faster; a real step is slower. Links are not counted.

    Args:
      model_config: keys of a Hugging Face config.json; the others are a Llama's, as for `MemoryPlanner`.
      memory_budget: bytes of each device; at most what the compiler lets it use counts.
      target_throughput: tokens per second of all devices together that the batch should reach.
      sequence_length: tokens of a row.
      target: a chip, or a slice such as "v5e:4x4", whose devices split the parameters unless `step` says otherwise.
      step: keys of a training configuration, such as `{"remat": "full"}`.
      level: "analytic" (formulas), "probe" (the compiler's totals) or "verified" (probed, and the chosen batch
        compiled).

    Returns:
      Rows of a step over all devices, a multiple of the devices times the microbatches.

    Raises:
      DeviceError: the smallest batch exceeds the budget, or the largest one cannot reach the throughput. The text says
        which bound holds, and the nearest values that can be reached. Or libtpu is missing.
      ShapeError: a number is not positive, or the level is unknown.
      ConfigError, UnsupportedError: the model or the step cannot be planned.

    >>> small = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 128}
    >>> optimize_batch_size(small, 32 << 20, sequence_length=64, level="analytic")
    24
    >>> optimize_batch_size(small, 4 << 20, sequence_length=64, level="analytic")
    Traceback (most recent call last):
    ...
    vishwamai.core.errors.DeviceError: optimize_batch_size: memory is the bound: a batch of 1 takes ...
    """
    if memory_budget < 1 or sequence_length < 1 or not 0 <= target_throughput < math.inf:
        raise ShapeError(
            f"optimize_batch_size: `memory_budget` is {memory_budget}, `sequence_length` {sequence_length} and "
            f"`target_throughput` {target_throughput}; pass positive bytes and tokens, and tokens per second from 0."
        )
    if level not in LEVELS:
        raise ShapeError(f"optimize_batch_size: `level` is {level!r}; pass one of {', '.join(LEVELS)}.")
    keys = _with_width(model_config, sequence_length)
    chip, devices = Target.parse_chip(target), devices_of(target)
    budget = min(memory_budget, chip.hbm_usable_bytes)

    def config(batch: int) -> TrainConfig:
        return training_config(keys, step or {}, target, batch, sequence_length)

    unit = devices * config(devices).microbatches

    def analytic(count: int) -> float:
        return training_memory(config(count * unit), target).total.value

    guess = largest(analytic, budget)
    if level == "analytic":
        count, smallest = guess, analytic(1)
    else:
        with Compiler() as compiler:
            probes: dict[int, float] = {}

            def probed(count: int) -> float:
                if count not in probes:
                    probes[count] = compiler.probe(trace_training(config(count * unit), target)).total.value
                return probes[count]

            count = largest(probed, budget, guess)
            if count and level == "verified":

                def compiled(count: int) -> float:
                    return compiler.verify(trace_training(config(count * unit), target)).total.value

                count = _verified(compiled, probed, budget, count)
            smallest = probes[1] if 1 in probes else 0.0
    if not count:
        raise DeviceError(_no_batch(config(unit), target, unit, smallest, budget, level))
    batch = count * unit
    _check_throughput(config(batch), target, target_throughput)
    return batch


_COMPILATIONS = 4
"""Programs that `optimize_batch_size` compiles at most."""


def _verified(compiled: Memory, probed: Memory, budget: float, count: int) -> int:
    """A count up to `count` whose compiled program fits the budget; 0 if none does.

    A program may take more than its probe said. Its share of more is then taken from what the next probe may say.
    """
    for _ in range(_COMPILATIONS):
        nbytes = compiled(count)
        if nbytes <= budget:
            return count
        count = min(count - 1, largest(probed, probed(count) * budget / nbytes, count - 1))
        if count < 1:
            return 0
    raise DeviceError(
        f"optimize_batch_size: {_COMPILATIONS} compiled programs took more than the budget of {human(budget)}, though "
        f'their probes did not; the last took {human(nbytes)}. Pass a smaller `memory_budget`, or level="probe".'
    )


def largest(memory: Memory, budget: float, guess: int = 0) -> int:
    """The largest count whose memory fits a budget, where memory grows with the count; 0 if 1 does not fit.

    The next count to ask for is on the line through the nearest two that were asked, which needs few questions where
    memory is nearly linear; every third halves what is left, so that any growth ends.

    Args:
      memory: bytes of a count from 1.
      budget: bytes.
      guess: the first count to ask for, if positive.

    >>> asked = []
    >>> largest(lambda n: asked.append(n) or 100 + 7 * n, 1000), len(asked) < 8
    (128, True)
    """
    low, at_low = 0, -math.inf
    high, at_high = 0, math.inf  # 0: none known that does not fit
    count = max(guess, 1)
    for turn in range(200):
        nbytes = memory(count)
        if nbytes <= budget:
            low, at_low, before = count, nbytes, (low, at_low)
        else:
            high, at_high, before = count, nbytes, (high, at_high)
        if high and high - low <= 1:
            return low
        second, at_other = (high, at_high) if high and low else before
        if high and not low:
            proposed = 1 if high <= 2 or turn > 2 else _on_line(before, (high, at_high), budget) or high // 2
        elif turn % 3 == 2 and high:
            proposed = (low + high) // 2
        else:
            proposed = _on_line((low, at_low), (second, at_other), budget) or 2 * low
        if turn % 2:  # one above the line, so that the answer is closed in from both sides
            proposed += 1
        count = max(low + 1, min(proposed, high - 1 if high else max(64 * low, 2)))
    raise AssertionError("memory does not grow with the count")


def _on_line(first: tuple[int, float], second: tuple[int, float], budget: float) -> int | None:
    """Where the line through two points reaches the budget; None where it has no slope."""
    (x, at_x), (y, at_y) = first, second
    if x == y or not (math.isfinite(at_x) and math.isfinite(at_y)) or (slope := (at_y - at_x) / (y - x)) <= 0:
        return None
    return int(x + (budget - at_x) / slope)


def throughput_bound(config: TrainConfig, target: str) -> Bound:
    """The roofline of a training step on all devices of a target; see `optimize_batch_size`."""
    config = resolved(config, TPU)
    chip, devices = Target.parse_chip(target), devices_of(target)
    length = config.data.sequence_length
    tokens = config.batch_size * length
    flops = flops_per_token(model_config(config), length) * tokens / devices
    compute = flops / chip.peak_per_device(config.model.compute_dtype)
    parts = training_memory(config, target).parts
    nbytes = 2 * sum(parts[name].value for name in ("parameters", "gradients", "optimizer"))
    traffic = nbytes / chip.hbm_bandwidth_per_device
    return Bound(tokens / max(compute, traffic), "compute" if compute >= traffic else "memory bandwidth")


def _check_throughput(config: TrainConfig, target: str, tokens_per_second: float) -> None:
    bound = throughput_bound(config, target)
    if bound.tokens_per_second >= tokens_per_second:
        return
    more = math.ceil(tokens_per_second / bound.tokens_per_second) * devices_of(target)
    raise DeviceError(
        f"optimize_batch_size: {bound.name} is the bound: the largest batch that fits, {config.batch_size}, gives at "
        f"most {bound.tokens_per_second:,.0f} tokens/s on {target}, and {tokens_per_second:,.0f} were requested; lower "
        f"`target_throughput`, or take a target with at least {more} such devices."
    )


def _no_batch(config: TrainConfig, target: str, unit: int, smallest: float, budget: float, level: Level | str) -> str:
    took = f"takes {human(smallest)} ({level})" if smallest else f"does not fit ({level})"
    text = (
        f"optimize_batch_size: memory is the bound: a batch of {unit} {took} on each device of {target}, and the "
        f"budget is {human(budget)}"
    )
    least = dataclasses.replace(config, remat="full")
    needs = training_memory(least, target).total.value
    if config.remat != "full" and needs <= budget:
        return f"{text}; with step={{'remat': 'full'}} it takes {human(needs)} (analytic), which fits."
    return f"{text}; the nearest that fits is a budget of {human(min(needs, smallest or needs))}, or more devices."


def _with_width(model: Mapping[str, PyTree], sequence_length: int) -> dict[str, object]:
    width = model.get("hidden_size")
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ShapeError(
            f"optimize_batch_size: `model_config` has hidden_size={width!r}; pass a positive whole number."
        )
    return llama_like(width, sequence_length) | dict(model)
