"""What a run reports: a record for each logged step, and the files that hold them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from vishwamai.core.types import PyTree
from vishwamai.training.tracking import Tracker


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of `metrics.jsonl`.

    Attributes:
      step: steps taken.
      loss: mean cross entropy of the step's counted tokens, in nats; with preferences their loss, the mean over pairs.
      tokens: tokens of all batches so far, padding included.
      tokens_per_second: since the record before, of the time in steps.
      gradient_norm: global norm before clipping.
      learning_rate: learning rate of the step.
      skipped: steps skipped so far for their gradients.
      memory: peak bytes: the fullest device's, or on the CPU the process's; the largest of all processes so far.
      seconds: wall time since the run (or its resumption) began. step_seconds: seconds spent in steps.
      evaluation_loss: loss on the held-out documents, at the steps that compute it.
      load_balance: the experts' load-balancing loss, 1 where all are equally used.
      overload: tokens of the fullest expert of any layer, relative to the mean.
      mfu: share of the devices' peak that `flops.flops_per_token` of the tokens reach; None where it is not known.
      compute_dtype: dtype of activations and products.
      accuracy: share of the pairs whose chosen answer has gained more than the other. margin: by how much, in the mean.
      run: `facts.RunFacts` as a dictionary, in the first record of each process.
    """

    step: int
    loss: float
    tokens: int
    tokens_per_second: float
    gradient_norm: float
    learning_rate: float
    skipped: int
    memory: int
    seconds: float
    step_seconds: float
    evaluation_loss: float | None = None
    load_balance: float | None = None
    overload: float | None = None
    mfu: float | None = None
    compute_dtype: str | None = None
    accuracy: float | None = None
    margin: float | None = None
    run: dict[str, Any] | None = None

    def to_json(self) -> str:
        """One line; what is None is left out, and a number that is not finite is null, for JSON has no NaN."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        lost = {name: None for name, x in values.items() if isinstance(x, float) and not math.isfinite(x)}
        return json.dumps(values | lost)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record of a line of `to_json`; null becomes NaN.

        Raises:
          ValueError, TypeError: the line is not a record.
        """
        values = json.loads(line)
        if not isinstance(values, dict):
            raise TypeError("expected an object of numbers")
        dtype, run = values.pop("compute_dtype", None), values.pop("run", None)
        if not all(isinstance(v, int | float | None) for v in values.values()) or not (
            isinstance(dtype, str | None) and isinstance(run, dict | None)
        ):
            raise TypeError("expected an object of numbers")
        numbers: dict[str, Any] = {name: math.nan if value is None else value for name, value in values.items()}
        return cls(**numbers, compute_dtype=dtype, run=run)


def read_records(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`. A line that is not a record is left out with a warning, except the last line
    without an end, which a kill has cut.
    """
    if not path.exists():
        return []
    records: list[Record] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            records.append(Record.from_json(line))
        except (ValueError, TypeError, RecursionError) as error:
            warnings.warn(
                f"{path}:{number}: the line is not a record of a step and is left out ({error}); remove it.",
                stacklevel=2,
            )
    return records


class RecordFiles:
    """A context that appends records to `metrics.jsonl`, and hands their numbers to trackers.

    Records after step `last`, from which the run goes on, are dropped from the file. `peak` is the largest memory of
    those that stay, which earlier processes of the run wrote.
    """

    def __init__(self, folder: Path, last: int, trackers: Sequence[Tracker] = ()):
        path = folder / "metrics.jsonl"
        earlier = [record for record in read_records(path) if record.step <= last]
        path.write_text("".join(record.to_json() + "\n" for record in earlier), encoding="utf-8")
        self.peak = max((record.memory for record in earlier), default=0)
        self.lines = path.open("a", encoding="utf-8")
        self.trackers = trackers

    def __enter__(self) -> RecordFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.lines.close()
        for tracker in self.trackers:
            tracker.close()

    def write(self, record: Record) -> None:
        """Adds a record; `metrics.jsonl` has it when this returns."""
        self.lines.write(record.to_json() + "\n")
        self.lines.flush()
        numbers = {name: value for name, value in vars(record).items() if isinstance(value, int | float)}
        del numbers["step"]
        for tracker in self.trackers:
            tracker.log(record.step, numbers)


class StepMeter:
    """Times the steps of a run and makes its records.

    Args:
      first: number of the step from which the run goes on.
      tokens: tokens of a step.
      flops_per_token: operations of a step for each. peak_flops: FLOP/s of all devices; None where it is not known.
      compute_dtype: dtype of activations and products.

    Attributes:
      peak: bytes that earlier processes of the run took. run: facts for the next record, which alone has them.
    """

    def __init__(self, first: int, tokens: int, flops_per_token: float, peak_flops: float | None, compute_dtype: str):
        self.tokens, self.flops_per_token, self.peak_flops = tokens, flops_per_token, peak_flops
        self.compute_dtype = compute_dtype
        self.start = time.perf_counter()
        self.steps = self.recorded = first
        self.seconds = self.recorded_seconds = 0.0
        self.peak = 0
        self.run: dict[str, Any] | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step."""
        started = time.perf_counter()
        yield
        self.steps += 1
        self.seconds += time.perf_counter() - started

    def record(self, scalars: dict[str, PyTree], learning_rate: float, evaluation_loss: float | None) -> Record:
        """The record of the last step.

        Args:
          scalars: results of the step, on the host, by the names of `Record`'s attributes, and others.
          learning_rate, evaluation_loss: figures of the step.
        """
        rate = (self.steps - self.recorded) * self.tokens / (self.seconds - self.recorded_seconds)
        self.recorded, self.recorded_seconds = self.steps, self.seconds
        run, self.run = self.run, None
        self.peak = max(self.peak, peak_memory())
        optional = ("load_balance", "overload", "accuracy", "margin")
        return Record(
            step=self.steps,
            loss=float(scalars["loss"]),
            tokens=self.steps * self.tokens,
            tokens_per_second=rate,
            gradient_norm=float(scalars["gradient_norm"]),
            learning_rate=learning_rate,
            skipped=int(scalars["skipped"]),
            memory=self.peak,
            seconds=time.perf_counter() - self.start,
            step_seconds=self.seconds,
            evaluation_loss=evaluation_loss,
            compute_dtype=self.compute_dtype,
            mfu=None if self.peak_flops is None else rate * self.flops_per_token / self.peak_flops,
            run=run,
            **{name: float(scalars[name]) for name in optional if name in scalars},
        )


def peak_memory() -> int:
    """Peak bytes of the fullest device of this process, or on the CPU of the process itself."""
    stats: list[dict[str, PyTree]] = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(stat.get("peak_bytes_in_use", 0) for stat in stats)
    if peak:
        return int(peak)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
