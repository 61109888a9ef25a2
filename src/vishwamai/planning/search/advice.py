"""Changes of a training configuration that make its step smaller: what each saves and costs, and what a probe says.

Savings are differences of `analytic.training_memory`, costs of `speed.training_time`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from vishwamai.core.errors import ConfigError, KernelError
from vishwamai.core.figures import Estimate
from vishwamai.core.numbers import divisors
from vishwamai.core.target import Target, devices_of
from vishwamai.planning.memory.analytic import training_memory
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.search.controller import REMAT
from vishwamai.planning.search.diagnosis import Change, Diagnosis, ranked
from vishwamai.planning.time.speed import training_time
from vishwamai.planning.training import trace_training
from vishwamai.training.config import TrainConfig
from vishwamai.training.slices import on_slice, why_no_stages

MOST = 6
"""Changes that are probed."""


def explain_training(
    config: TrainConfig, target: str, compiler: Compiler, report: Callable[[str], None] = lambda text: None
) -> Diagnosis:
    """What lies in the memory of one device at the peak of a training step; if that does not fit, what to change.

    Args:
      config: configuration of the step. target: slice.
      compiler: the process to ask. report: called with a line of text before each step that takes time.

    Raises:
      VishwamaiError: as `planning.training.trace_training`, and as `explain_memory`.
    """
    report(f"{target}: reading what lies in the memory at the peak")
    peak = compiler.peak(trace_training(config, target))
    if peak.total.value <= peak.limit:
        return Diagnosis(peak)
    return Diagnosis(peak, training_changes(config, target, compiler, report))


def training_changes(
    config: TrainConfig, target: str, compiler: Compiler, report: Callable[[str], None] = lambda text: None
) -> tuple[Change, ...]:
    """The changes that save memory, each probed, the cheapest that fits first; at most `MOST`.

    Args:
      config: configuration of the step that is too large. target: the slice.
      compiler: the process to ask. report: called with a line of text before each probe.

    Raises:
      VishwamaiError: as `planning.training.trace_training` for the configuration itself.
    """
    config = on_slice(config, target)
    base = training_memory(config, target)
    seconds = training_time(config, target, base).value
    unknown = Target.parse_chip(target).host_bandwidth is None
    proposed = []
    for words, changed in alternatives(config, target):
        saving = base.total.value - training_memory(changed, target).total.value
        cost = None if changed.remat == "offload" and unknown else training_time(changed, target).value - seconds
        if saving > 0:
            cost_estimate = None if cost is None else Estimate(cost, "analytic", "s")
            proposed.append(
                Change(
                    words,
                    Estimate(saving, "analytic"),
                    cost_estimate,
                    base.limit,
                    config=changed,
                    rounds=changed.optimizer != config.optimizer,
                )
            )
    # Those that are predicted to fit come first, the cheapest of them first.
    proposed.sort(
        key=lambda change: (
            base.total.value - change.saving.value > base.limit,
            float("inf") if change.cost is None else change.cost.value,
            -change.saving.value,
        )
    )
    changes = []
    for change in proposed[:MOST]:
        report(f"{target}: probing {change.words}")
        assert change.config is not None
        try:
            cost_estimate = compiler.probe(trace_training(change.config, target))
        except (ConfigError, KernelError) as error:  # such as a policy that the compiler cannot place
            changes.append(dataclasses.replace(change, declined=str(error).splitlines()[0][:200]))
            continue
        changes.append(dataclasses.replace(change, probe=cost_estimate.total))
    return ranked(changes)


def narrower_moments(config: TrainConfig) -> Iterator[TrainConfig]:
    """The configuration with the optimizer's moments in fewer bits, which changes numbers.

    >>> [config.optimizer.moment_dtype for config in narrower_moments(TrainConfig())]
    ['bfloat16', 'int8']
    """
    for dtype in {"float32": ("bfloat16", "int8"), "bfloat16": ("int8",)}.get(config.optimizer.moment_dtype, ()):
        if dtype == "bfloat16" or config.optimizer.name == "adamw":
            yield dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, moment_dtype=dtype))


def alternatives(config: TrainConfig, target: str) -> Iterator[tuple[str, TrainConfig]]:
    """Every single change of a configuration that may save memory, in the words of its keys.

    >>> [words for words, _ in alternatives(TrainConfig(batch_size=4), "v5e")]
    ['microbatches=2', 'microbatches=4', 'remat=dots', 'remat=block_wise', 'remat=full', 'remat=offload', ...]
    """
    free = dataclasses.replace(config, optimization=config.optimization.of_kernels)  # whose settings are in place
    rows = config.batch_size * config.mesh.pipeline // devices_of(target)  # all stages have the same
    for microbatches in divisors(rows):
        changed = dataclasses.replace(free, microbatches=microbatches)
        if microbatches > config.microbatches and why_no_stages(changed) is None:
            yield f"microbatches={microbatches}", changed
    if config.remat in (*REMAT, "offload"):
        level = REMAT.index(config.remat) if config.remat in REMAT else len(REMAT)
        for remat in (*REMAT[level + 1 :], *(() if config.remat == "offload" else ("offload",))):
            changed = dataclasses.replace(free, remat=remat)
            if why_no_stages(changed) is None:
                yield f"remat={remat}", changed
    for fsdp in divisors(config.mesh.data):
        if fsdp > 1:
            mesh = dataclasses.replace(config.mesh, data=config.mesh.data // fsdp, fsdp=config.mesh.fsdp * fsdp)
            yield f"mesh.data={mesh.data} mesh.fsdp={mesh.fsdp}", dataclasses.replace(free, mesh=mesh)
    for changed in narrower_moments(free):
        yield f"optimizer.moment_dtype={changed.optimizer.moment_dtype}", changed
