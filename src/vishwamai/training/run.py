"""A training run: the loop, and the directory that it writes.

The loop is a generator of records, so whoever iterates shows them as he likes and may stop at any of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from tokenizers import Tokenizer

from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.core.host_memory import give_back
from vishwamai.core.types import PyTree
from vishwamai.measure.trace import why_no_trace
from vishwamai.models import from_pretrained
from vishwamai.models.remote import remote_path, send, why_not_local
from vishwamai.training.checkpoints import Checkpoints, described, fetch_newest, holds_checkpoint, set_damaged_aside
from vishwamai.training.checks import check
from vishwamai.training.compute_dtype import as_recorded, resolved_for_run
from vishwamai.training.config import TrainConfig
from vishwamai.training.config_file import describe, from_dict, load_yaml
from vishwamai.training.data import Batch, held_out_batches, training_batches, unread
from vishwamai.training.facts import RunFacts
from vishwamai.training.job import TrainingJob, make_job
from vishwamai.training.model import with_local_model
from vishwamai.training.records import Record, RecordFiles, StepMeter, read_records
from vishwamai.training.report import write_report
from vishwamai.training.sample import sample
from vishwamai.training.sharding import over_all_devices
from vishwamai.training.step import TrainState
from vishwamai.training.stop import Stopped, stop_signals
from vishwamai.training.together import AnyAsked, check_shared, first_alone, is_first
from vishwamai.training.tracking import check_trackers, open_trackers

if TYPE_CHECKING:
    import grain


def train(
    config: TrainConfig,
    output: str | Path,
    resume: bool = False,
    profile: int = 0,
    on_start: Callable[[RunFacts], None] = lambda facts: None,
) -> Generator[Record, None, Stopped | None]:
    """Trains a model: prepares the data and the model, and returns the steps, which yield a record for each logged one.

    `output` gets `config.yaml`, `data/` (tokens), `metrics.jsonl`, `checkpoints/`, and at the end `model/`, in Hugging
    Face's form; with `log.tensorboard` also `tensorboard/`. SIGTERM, Ctrl-C and closing the generator save a checkpoint
    at the step reached; `resume` goes on from the newest one, with the same bits as a run that was never interrupted.
    The generator returns how a signal stopped it, or None.
    Where JAX has several processes (`vishwamai.parallel.initialize`), each calls this with the same arguments, and
    process 0 writes the files; a signal to one of them stops all after the same step.

    Args:
      config: result of `read_config`.
      output: a directory, which without `resume` must not hold a run.
      resume: go on from the newest checkpoint, or begin where there is none.
      profile: steps to trace into `output/profile`, from the third on, for XProf and Perfetto; 0 for none.
      on_start: called with what is trained when the first step is compiled, by process 0.

    Raises:
      ConfigError: the configuration cannot be used, or differs from that of the run to resume.
      DeviceError: too many steps in a row were skipped for their gradients, a checkpoint could not be written, or this
        process cannot take the trace that `profile` asks for.
    """
    if reason := why_not_local(output):
        raise ConfigError(f"train: {reason}.")
    folder = Path(output)
    original = resolved_for_run(over_all_devices(config, jax.device_count()), folder)
    config = with_local_model(original)
    check(config)
    check_trackers(config)
    if config.checkpoint.remote is not None and is_first():
        remote_path(config.checkpoint.remote)  # what is wrong with it is said before the first step
    if profile and (reason := why_no_trace()) is not None:
        raise DeviceError(f"train: `profile` is {profile}, but {reason}.")
    first_alone(lambda: claim(original, folder, resume))
    check_shared(folder, "config.yaml")
    return _steps(config, folder, *make_job(config, folder), resume, profile, on_start)


def _steps(
    config: TrainConfig,
    folder: Path,
    job: TrainingJob,
    state: TrainState,
    resume: bool,
    profile: int,
    on_start: Callable[[RunFacts], None],
) -> Generator[Record, None, Stopped | None]:
    """The loop of `train`."""
    if resume:
        first_alone(lambda: _restorable(config, folder))
    batches, step = iter(training_batches(job.corpus, config.seed, config.batch_size, *job.layout.reader)), 0
    held_out = held_out_batches(job.corpus, config.batch_size, *job.layout.reader)
    # Signals are taken until the last checkpoint is whole: an exception at its end would leave the write to a thread.
    with (
        stop_signals() as request,
        Checkpoints(folder / "checkpoints", config.checkpoint.keep, config.checkpoint.remote) as checkpoints,
    ):
        if resume and checkpoints.latest() is not None:
            like = described(job.unplace(state))
            del state  # its memory is that of the restored one
            restored = checkpoints.restore(like)
            state, step = job.place(restored.state), int(restored.state.step)
            batches.set_state(restored.data)
            del restored  # the layers in the usual form, which `place` has copied
        first_step, exploded, stop = step, None, AnyAsked(request)
        every, skips, read = config.evaluation.every, int(state.skips), step  # skipped in a row at step `read`
        tokens = config.batch_size * config.data.sequence_length
        meter = StepMeter(step, tokens, job.flops_per_token, job.peak_flops, config.model.compute_dtype)
        writes = contextlib.nullcontext()
        if is_first():
            writes = RecordFiles(folder, step, open_trackers(config, folder, step))
        with writes as files, _Trace(folder, profile, step + 2) as trace:
            if files is not None:
                meter.peak = files.peak
            while step < config.steps and not stop():
                trace.before(step)
                with meter.step():
                    batch = job.layout.put_batch(next(batches))
                    if step == first_step:
                        compiled = job.compile(state, batch)
                        if files is not None:
                            facts = job.facts(state, compiled)
                            meter.run = dataclasses.asdict(facts)
                            on_start(facts)
                        give_back()
                    state, scalars = job.step(state, batch)
                    step += 1
                    evaluates = every > 0 and (step % every == 0 or step == config.steps)
                    logged = evaluates or step % config.log.every == 0 or step == config.steps
                    if (
                        logged or skips + step - read >= config.guard.max_skips
                    ):  # waits for the device, so not each step
                        skips, read = int(scalars["skips"]), step
                        logged |= skips >= config.guard.max_skips
                    if logged:
                        scalars = jax.device_get(scalars)
                trace.after(step, state)
                if step % config.checkpoint.every == 0:
                    checkpoints.save(step, job.unplace(state), batches.get_state())
                if not logged:
                    continue
                record = meter.record(
                    scalars,
                    learning_rate=float(np.asarray(job.rate(step - 1 - int(scalars["skipped"])))),
                    evaluation_loss=_evaluated(config, job, state, held_out) if evaluates else None,
                )
                if files is not None:
                    files.write(record)
                if skips >= config.guard.max_skips:
                    exploded = record
                try:
                    yield record
                except GeneratorExit:
                    break
                if exploded is not None:
                    break
        # After skipped steps the state is as good as the last good one: only the counters have changed.
        checkpoints.save(step, job.unplace(state), batches.get_state())
    if exploded is not None:
        raise DeviceError(_exploded(config, exploded))
    if step < config.steps:
        return Stopped(step, request.number)
    job.export(exported_params(state))
    if config.checkpoint.remote is not None and is_first():
        send(folder / "model", remote_path(config.checkpoint.remote) / "model", "config.json")
    return None


def _restorable(config: TrainConfig, folder: Path) -> None:
    """Leaves the newest whole checkpoint in the directory of the run."""
    set_damaged_aside(folder / "checkpoints")
    if config.checkpoint.remote is not None:
        fetch_newest(config.checkpoint.remote, folder / "checkpoints")


def exported_params(state: TrainState) -> PyTree:
    """The parameters that a run evaluates and exports: their moving average where there is one."""
    return state.params if state.average is None else state.average


def finish(config: TrainConfig, output: str | Path) -> str | None:
    """Writes `report.html` of a finished run, and returns a sample of its model if the configuration has a prompt."""
    folder = Path(output)
    config, text = as_recorded(config, folder), None
    if config.sample.prompt is not None:
        model = from_pretrained(folder / "model", dtype=config.model.compute_dtype)
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        text = sample(model, tokenizer, config.sample.prompt, config.sample.tokens, config.seed)
    bad = [line for lines in unread(folder / "data").values() for line in lines]
    write_report(config, read_records(folder / "metrics.jsonl"), folder / "report.html", bad, text)
    return text


MAY_CHANGE = frozenset(
    {"steps", "compiler_options", "checkpoint", "evaluation", "guard", "log", "mesh", "pipeline", "sample"}
)
"""Sections that a resumed run may have otherwise than the run before."""


def claim(config: TrainConfig, folder: Path, resume: bool) -> None:
    """Makes the directory of a run and writes `config.yaml`, or compares it on resumption.

    A run without a checkpoint, such as one whose data could not be read, begins on resumption. With another
    configuration its data are made anew.

    Raises:
      ConfigError: the directory holds a run and `resume` is not set, or the run has another configuration.
    """
    record = folder / "config.yaml"
    if record.exists() and not resume:
        raise ConfigError(f"train: {folder} holds a run; pass --resume to go on with it, or another --output.")
    if record.exists():
        before = from_dict(load_yaml(record.read_text(encoding="utf-8")))
        for name in (n for n in vars(config) if n not in MAY_CHANGE):
            old, new = getattr(before, name), getattr(config, name)
            if old == new:
                continue
            if not holds_checkpoint(folder / "checkpoints"):
                shutil.rmtree(folder / "data", ignore_errors=True)
                break
            raise ConfigError(
                f"resume: {name} differs from the run in {folder}, which has a checkpoint: it was {old}, and is now "
                f"{new}; set it as it was, or pass another --output."
            )
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(describe(config), encoding="utf-8")


class _Trace:
    """A context in which the steps from `first` on are traced into `folder/profile`; of 0 steps, nothing is."""

    def __init__(self, folder: Path, steps: int, first: int):
        self.folder, self.first, self.last = folder / "profile", first, first + steps
        self.running = False

    def __enter__(self) -> _Trace:
        return self

    def __exit__(self, *error: object) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False

    def before(self, step: int) -> None:
        """Begins when `step` steps are done: the first two compile."""
        if step == self.first < self.last:
            jax.profiler.start_trace(self.folder)
            self.running = True

    def after(self, step: int, state: TrainState) -> None:
        """Ends when the last traced step has run."""
        if self.running and step == self.last:
            jax.block_until_ready(state)
            self.__exit__()


def _evaluated(
    config: TrainConfig, job: TrainingJob, state: TrainState, held_out: Sequence[Batch] | grain.MapDataset[Batch]
) -> float:
    """The loss on the held-out batches."""
    sums: list[tuple[jax.Array, jax.Array]] = []
    for number in range(min(config.evaluation.batches, len(held_out))):
        sums.append(job.evaluate(exported_params(state), job.layout.put_batch(held_out[number])))
    return float(sum(loss for loss, _ in sums) / sum(count for _, count in sums))


def _exploded(config: TrainConfig, record: Record) -> str:
    return (
        f"train: {config.guard.max_skips} steps in a row were skipped at step {record.step}: loss {record.loss:.4g}, "
        f"gradient norm {record.gradient_norm:.4g}. The parameters are those before them; lower "
        f"optimizer.learning_rate={config.optimizer.learning_rate:g} or raise guard.max_norm={config.guard.max_norm}."
    )
