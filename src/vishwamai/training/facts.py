"""What a run trains, on what and with what: told before its first step, and kept in its first record and its report."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import math
import os
import platform
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.numbers import human
from vishwamai.core.types import PyTree
from vishwamai.measure.measurement import program_bytes
from vishwamai.training.config import TrainConfig
from vishwamai.training.data import Corpus

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "libtpu")
_SHARE = 0.4
"""Of the peak of the devices that steps reach, where nothing is measured yet: the estimate of the time is rough."""


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What one process trains; a run that is resumed has several.

    Attributes:
      date: when it began, in ISO 8601, with the zone.
      machine: system, processor and cores. devices: their number and kind. versions: by package.
      parameters: number of the model. trained: number of those that change.
      documents, tokens: numbers of the data, held-out ones included.
      steps: number of the run. batch_size: rows of a step. sequence_length: tokens of a row.
      epochs: passes over the rows.
      compute_dtype, param_dtype: dtypes of activations and products, and of parameters.
      step_bytes: memory of a step on one device, by the compiler; None where it does not say.
      estimated_seconds: seconds of all steps; None where there is nothing to estimate from.
    """

    date: str
    machine: str
    devices: str
    versions: dict[str, str]
    parameters: int
    trained: int
    documents: int
    tokens: int
    steps: int
    batch_size: int
    sequence_length: int
    epochs: float
    compute_dtype: str
    param_dtype: str
    step_bytes: int | None
    estimated_seconds: float | None

    def __str__(self) -> str:
        changed = "" if self.trained == self.parameters else f", {self.trained:,} of them trained"
        memory = "" if self.step_bytes is None else f", {human(self.step_bytes)} of memory on a device"
        seconds = self.estimated_seconds
        spent = "" if seconds is None else f", roughly {datetime.timedelta(seconds=max(1, round(seconds)))}"
        return (
            f"model: {self.parameters:,} parameters{changed}, in {self.param_dtype}, products in {self.compute_dtype}\n"
            f"data: {self.documents:,} documents, {self.tokens:,} tokens\n"
            f"steps: {self.steps:,} of {self.batch_size} rows of {self.sequence_length} tokens, "
            f"{self.epochs:.2f} epochs\ndevices: {self.devices}{memory}{spent}"
        )


def run_facts(
    config: TrainConfig,
    corpus: Corpus,
    state: PyTree,
    frozen: PyTree,
    compiled: jax.stages.Compiled,
    flops_per_token: float,
    peak_flops: float | None,
) -> RunFacts:
    """The facts of a run whose step is compiled.

    Args:
      config: configuration of the run, with a resolved dtype.
      corpus: its rows.
      state: its parameters. frozen: those that adapters leave alone, or None.
      compiled: the step, a `jax.stages.Compiled`.
      flops_per_token: operations of a step for each token.
      peak_flops: FLOP/s of all devices; None measures a product on this one.
    """
    trained, still = _count(state), _count(frozen)
    rows = sum(len(rows) for rows in corpus.training)
    documents = sum(len(rows.tokens.offsets) - 1 for rows in corpus.training)
    tokens = config.steps * config.batch_size * config.data.sequence_length
    rate = _SHARE * peak_flops if peak_flops is not None else _SHARE * _measured(config.model.compute_dtype)
    return RunFacts(
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=f"{platform.system()}, {_processor()}, {os.cpu_count()} cores",
        devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        versions={"vishwamai": vishwamai.__version__, "python": platform.python_version()} | _versions(),
        parameters=trained + still,
        trained=trained,
        documents=documents // (2 if config.objective == "dpo" else 1),
        tokens=corpus.token_count,
        steps=config.steps,
        batch_size=config.batch_size,
        sequence_length=config.data.sequence_length,
        epochs=config.steps * config.batch_size / max(rows, 1),
        compute_dtype=config.model.compute_dtype,
        param_dtype=config.model.param_dtype,
        step_bytes=program_bytes(compiled),
        estimated_seconds=tokens * flops_per_token / rate if rate else None,
    )


def _count(tree: object) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _measured(dtype: str, size: int = 768) -> float:
    """FLOP/s of a product on the first device, the best of three."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return name[1] if name else platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
