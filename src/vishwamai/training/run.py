"""A training run: the loop, and the directory that it writes.

The loop is a generator of records, so whoever iterates shows them as he likes and may stop at any of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from vishwamai.core.config import local_platform
from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.core.execute import only_for
from vishwamai.core.hardware import tpu_for
from vishwamai.core.host_memory import give_back
from vishwamai.measure.trace import why_no_trace
from vishwamai.models import from_pretrained
from vishwamai.models.axes import MeshAxes
from vishwamai.training.checkpoints import Checkpoints, described, holds_checkpoint, set_damaged_aside
from vishwamai.training.checks import check
from vishwamai.training.compute_dtype import as_recorded, resolved_for_run
from vishwamai.training.config import TrainConfig
from vishwamai.training.config_file import describe, from_dict, load_yaml
from vishwamai.training.data import Batch, Corpus, held_out_batches, prepare, training_batches, unread
from vishwamai.training.exported import export, files_next_to_weights
from vishwamai.training.facts import RunFacts, run_facts
from vishwamai.training.flops import flops_per_token, peak_flops
from vishwamai.training.layout import Layout
from vishwamai.training.lora import attach, initial_adapters, whole
from vishwamai.training.mesh import over_all_devices
from vishwamai.training.model import ModelParts, host_memory, make_model, with_local_model
from vishwamai.training.optimizers import schedule
from vishwamai.training.pipelined import PipelinedLoss, pipelined, pipelined_logprobs
from vishwamai.training.preferences import answer_logprobs, with_reference
from vishwamai.training.program import training_program
from vishwamai.training.records import Record, RecordFiles, StepMeter, read_records
from vishwamai.training.remat import fitting_policy, memory_limit
from vishwamai.training.report import write_report
from vishwamai.training.sample import sample
from vishwamai.training.stages import Stages, moved
from vishwamai.training.step import (
    Loss,
    TrainState,
    counted,
    run_model,
)
from vishwamai.training.stop import Stopped, stop_signals
from vishwamai.training.together import AnyAsked, check_shared, first_alone, is_first


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
      config: of `read_config`.
      output: a directory, which without `resume` must not hold a run.
      resume: go on from the newest checkpoint, or begin where there is none.
      profile: steps to trace into `output/profile`, from the third on, for XProf and Perfetto; 0 for none.
      on_start: called with what is trained when the first step is compiled, by process 0.

    Raises:
      ConfigError: the configuration cannot be used, or differs from that of the run to resume.
      DeviceError: too many steps in a row were skipped for their gradients, a checkpoint could not be written, or this
        process cannot take the trace that `profile` asks for.
    """
    folder = Path(output)
    original = resolved_for_run(over_all_devices(config, jax.device_count()), folder)
    config = with_local_model(original)
    check(config)
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
        first_alone(lambda: set_damaged_aside(folder / "checkpoints"))
    batches, at = iter(training_batches(job.corpus, config.seed, config.batch_size, *job.layout.reader)), 0
    held_out = held_out_batches(job.corpus, config.batch_size, *job.layout.reader)
    # Signals are taken until the last checkpoint is whole: an exception at its end would leave the write to a thread.
    with stop_signals() as asked, Checkpoints(folder / "checkpoints", config.checkpoint.keep) as checkpoints:
        if resume and checkpoints.latest() is not None:
            like = described(job.usual(state))
            del state  # its memory is that of the restored one
            restored = checkpoints.restore(like)
            state, at = job.place(restored.state), int(restored.state.step)
            batches.set_state(restored.data)
            del restored  # the layers in the usual form, which `place` has copied
        begun, exploded, stop = at, None, AnyAsked(asked)
        every, skips, read = config.evaluation.every, int(state.skips), at  # skipped in a row at step `read`
        tokens = config.batch_size * config.data.sequence_length
        meter = StepMeter(at, tokens, job.flops_per_token, job.peak_flops, config.model.compute_dtype)
        writes = RecordFiles(folder, at, config.log.tensorboard) if is_first() else contextlib.nullcontext()
        with writes as files, _Trace(folder, profile, at + 2) as trace:
            if files is not None:
                meter.peak = files.peak
            while at < config.steps and not stop():
                trace.before(at)
                with meter.step():
                    batch = job.layout.put_batch(next(batches))
                    if at == begun:
                        compiled = job.compile(state, batch)
                        if files is not None:
                            facts = job.facts(state, compiled)
                            meter.run = dataclasses.asdict(facts)
                            on_start(facts)
                        give_back()
                    state, shown = job.step(state, batch)
                    at += 1
                    evaluates = every > 0 and (at % every == 0 or at == config.steps)
                    logged = evaluates or at % config.log.every == 0 or at == config.steps
                    if logged or skips + at - read >= config.guard.max_skips:  # waits for the device, so not each step
                        skips, read = int(shown["skips"]), at
                        logged |= skips >= config.guard.max_skips
                    if logged:
                        shown = jax.device_get(shown)
                trace.after(at, state)
                if at % config.checkpoint.every == 0:
                    checkpoints.save(at, job.usual(state), batches.get_state())
                if not logged:
                    continue
                record = meter.record(
                    shown,
                    learning_rate=float(np.asarray(job.rate(at - 1 - int(shown["skipped"])))),
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
        checkpoints.save(at, job.usual(state), batches.get_state())
    if exploded is not None:
        raise DeviceError(_exploded(config, exploded))
    if at < config.steps:
        return Stopped(at, asked.number)
    job.export(exported_params(state))
    return None


def exported_params(state: TrainState) -> Any:
    """The parameters that a run evaluates and exports: their moving average where there is one."""
    return state.params if state.average is None else state.average


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """What a run works with.

    Attributes:
      corpus: the rows.
      layout: where batches and state lie.
      usual: the state with its layers in the usual form; place: as the stages of a pipeline hold them.
      step: state and batch to the next state and what the step shows; it takes the state's memory.
      compile: compiles `step` for a state and a batch. facts: what is trained, of a state and the compiled step.
      evaluate: parameters and batch to the sum of the loss, and over how many tokens or pairs.
      rate: the learning rate of a step.
      export: writes the parameters, in Hugging Face's form, into the run's directory.
      flops_per_token: operations of a step. peak_flops: FLOP/s of all devices; None where it is not known.
    """

    corpus: Corpus
    layout: Layout
    usual: Callable[[TrainState], TrainState]
    place: Callable[[TrainState], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]
    compile: Callable[[TrainState, Batch], Any]
    facts: Callable[[TrainState, Any], RunFacts]
    evaluate: Callable[[Any, Batch], Any]
    rate: Callable[[int], Any]
    export: Callable[[Any], None]
    flops_per_token: float
    peak_flops: float | None


@contextlib.contextmanager
def _kernels(config: TrainConfig) -> Iterator[None]:
    """While a function of the run is traced: the kernels that the configuration asks for, for these devices alone."""
    with config.optimization.kernels(), only_for(local_platform()):
        yield


def make_job(config: TrainConfig, folder: Path) -> tuple[TrainingJob, TrainState]:
    """Prepares the data, makes the model, the optimizer and the jitted functions of a run, and its initial state."""
    prepared = first_alone(lambda: prepare(config, folder / "data"))
    corpus = prepare(config, folder / "data") if prepared is None else prepared  # the others read what it wrote
    tokenizer = Tokenizer.from_file(str(folder / "data" / "tokenizer.json"))
    files = files_next_to_weights(config, tokenizer, folder / "data")
    made = make_model(config, tokenizer)
    parts = made.described
    program = training_program(config, parts, tpu_for(jax.devices()[0].device_kind))
    layout, stages = program.layout, program.shapes.stages
    gather = layout.gather if layout.mesh is not None else None
    params, frozen = _weights(config, made, stages, layout), None
    del made  # its arrays lie on the devices now
    if config.lora.rank:
        gather = functools.partial(whole, gather=layout.whole)
        params, frozen = layout.made(lambda: _placed(stages, _adapters(config, parts))), params

    def step_under(policy: str) -> Any:
        step = program.step(policy)

        def one_step(state: TrainState, batch: Batch, frozen: Any) -> tuple[TrainState, dict[str, Any]]:
            with only_for(local_platform()):
                return step(state, batch, frozen)

        return jax.jit(one_step, donate_argnums=0, compiler_options=program.options)

    plain_loss = program.loss("none")

    def evaluation(params: Any, batch: Batch, frozen: Any) -> Any:
        if stages is not None:
            part = functools.partial(_pipelined_loss_and_count, plain_loss, config.microbatches)
        else:
            part = functools.partial(_loss_and_count, plain_loss, layout.model_axes)
        with _kernels(config):
            return layout.over_devices(part, params, gradients=False, frozen=frozen)(params, batch)[1]

    start = frozen
    if config.objective == "dpo" and start is None:
        start = jax.tree.map(jnp.copy, params)  # the state's are given away
    state = layout.made(functools.partial(program.shapes.initial, update=program.update), params)

    if config.objective == "dpo":

        def reference(params: Any, batch: dict[str, Any]) -> Any:
            with _kernels(config):
                if stages is not None:
                    alone = dataclasses.replace(plain_loss, adapt=None)
                    return pipelined_logprobs(alone, params, batch, microbatches=config.microbatches)
                axes = layout.model_axes
                model, hidden, _ = run_model(parts.graph, parts.rest, params, batch, gather=gather, axes=axes)
                return answer_logprobs(model.config, model.head_weight(), hidden, batch, axes)

        score = functools.partial(jax.jit(layout.by_row(reference, start)), start)
        corpus = with_reference(corpus, score, layout, config.batch_size, folder / "data")

    policy, limit = config.remat, memory_limit(config.remat)
    if limit is not None:
        first = layout.put_batch(next(iter(training_batches(corpus, config.seed, config.batch_size, *layout.reader))))

        def needs(policy: str) -> int:
            found = step_under(policy).lower(state, first, frozen).compile().memory_analysis()
            both = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
            return both + found.temp_size_in_bytes

        policy = fitting_policy(limit, needs)

    usual = functools.partial(moved, stages, layout=layout, placed=False)

    def merged(params: Any, frozen: Any) -> Any:
        return whole(attach(config.lora, frozen, params))

    def write(params: Any) -> None:
        if frozen is not None:
            places = layout.shardings(jax.eval_shape(merged, params, frozen))
            params = jax.jit(merged, out_shardings=places)(params, frozen)
        params = usual(params)
        params = layout.on_host(params)
        first_alone(lambda: export(parts, params, files, folder / "model"))

    step = step_under(policy)

    def compile_step(state: TrainState, batch: Batch) -> Any:
        return step.lower(state, batch, frozen=frozen).compile()

    flops, peak = flops_per_token(parts.config, config.data.sequence_length), peak_flops(config.model.compute_dtype)
    peak = None if peak is None else peak * layout.devices

    def facts(state: TrainState, compiled: Any) -> RunFacts:
        return run_facts(config, corpus, state.params, frozen, compiled, flops, peak)

    job = TrainingJob(
        corpus=corpus,
        layout=layout,
        usual=usual,
        place=functools.partial(moved, stages, layout=layout, placed=True),
        step=functools.partial(step, frozen=frozen),
        compile=compile_step,
        facts=facts,
        evaluate=functools.partial(jax.jit(evaluation), frozen=frozen),
        rate=schedule(config.optimizer, config.steps),
        export=write,
        flops_per_token=flops,
        peak_flops=peak,
    )
    return job, state


def _weights(config: TrainConfig, parts: ModelParts, stages: Stages | None, layout: Layout) -> Any:
    """The parameters that a run begins with, as its devices hold them."""
    new = parts.new
    if new is not None:
        return layout.made(lambda: _placed(stages, new()))
    with host_memory(config):
        return layout.put(_placed(stages, parts.params))


def _adapters(config: TrainConfig, parts: ModelParts) -> Any:
    """Those that a run begins with, in the usual form."""
    return initial_adapters(config.lora, parts.params, jax.random.key(config.seed), parts.ranks)


def _placed(stages: Stages | None, params: Any) -> Any:
    return params if stages is None else stages.place(params)


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
    written = folder / "config.yaml"
    if written.exists() and not resume:
        raise ConfigError(f"train: {folder} holds a run; pass --resume to go on with it, or another --output.")
    if written.exists():
        before = from_dict(load_yaml(written.read_text(encoding="utf-8")))
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
    written.write_text(describe(config), encoding="utf-8")


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

    def before(self, at: int) -> None:
        """Begins when `at` steps are done: the first two compile."""
        if at == self.first < self.last:
            jax.profiler.start_trace(self.folder)
            self.running = True

    def after(self, at: int, state: TrainState) -> None:
        """Ends when the last traced step has run."""
        if self.running and at == self.last:
            jax.block_until_ready(state)
            self.__exit__()


def _loss_and_count(
    loss: Loss, axes: MeshAxes, params: Any, batch: Batch, **frozen: Any
) -> tuple[None, tuple[Any, Any]]:
    """The loss of a batch as a sum, and over how many tokens or pairs."""
    return None, (loss(params, batch, **frozen)[1]["loss"], counted(batch, axes))


def _pipelined_loss_and_count(
    loss: PipelinedLoss, microbatches: int, params: Any, batch: Batch, **frozen: Any
) -> tuple[None, tuple[Any, Any]]:
    """The same through the stages of a pipeline."""
    sums = pipelined(loss, params, batch, 1.0, microbatches=microbatches, gradients=False, **frozen)[1]
    return None, (sums["loss"], counted(batch, loss.axes))


def _evaluated(config: TrainConfig, job: TrainingJob, state: TrainState, held_out: Any) -> float:
    """The loss on the held-out batches."""
    sums: list[tuple[Any, Any]] = []
    for number in range(min(config.evaluation.batches, len(held_out))):
        sums.append(job.evaluate(exported_params(state), job.layout.put_batch(held_out[number])))
    return float(sum(loss for loss, _ in sums) / sum(count for _, count in sums))


def _exploded(config: TrainConfig, record: Record) -> str:
    return (
        f"train: {config.guard.max_skips} steps in a row were skipped at step {record.step}: loss {record.loss:.4g}, "
        f"gradient norm {record.gradient_norm:.4g}. The parameters are those before them; lower "
        f"optimizer.learning_rate={config.optimizer.learning_rate:g} or raise guard.max_norm={config.guard.max_norm}."
    )
