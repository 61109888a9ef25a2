"""`TPUProfiler`: a model's steps measured on the device of this machine, and estimated for a TPU that is not here."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from vishwamai.aot import has_libtpu, inspect
from vishwamai.bench.machine import Usage, cpu
from vishwamai.core.arguments import check_callable, checked, checks_its_own, described
from vishwamai.core.errors import ConfigError, DeviceError, ShapeError, UnsupportedError, VishwamaiError
from vishwamai.core.figures import Estimate, Measurement
from vishwamai.core.installing import install_line
from vishwamai.core.jax_errors import out_of_memory_named
from vishwamai.core.numbers import human
from vishwamai.core.progress import Progress
from vishwamai.core.target import Target
from vishwamai.measure.flops import ProgramFlops, program_flops
from vishwamai.measure.machine_peaks import local_peaks
from vishwamai.measure.measurement import undisturbed
from vishwamai.measure.trace import OperationTime, operation_times, record_trace, why_no_trace
from vishwamai.performance.profile_results import ProfileResults, TargetEstimate
from vishwamai.performance.subject import NAME, Subject, input_values, not_taken, number_dtype, subject_of
from vishwamai.performance.usage import counted_peak, planned_memory
from vishwamai.planning.memory.compiler import verify

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_MOST_STEPS = 100_000
_TRACED = 5
"""Steps that are traced, at most: a trace of many is slow to read."""
_OTHERS = 0.1
"""Share of the cores that other processes may use before the machine is called busy."""


@checks_its_own("trace_directory")
class TPUProfiler:
    """Profiles a model on the device of this machine: a TPU where there is one, otherwise the CPU or GPU.

    Args:
      target: a TPU whose estimate is made as well, such as "v5e"; needs libtpu and no TPU. None makes none.
      trace_directory: directory of the trace for xprof, created where it is missing; None keeps none.
      dtype: dtype of inputs that are shapes; None takes int32 for a `vishwamai.models.Decoder`, whose inputs are
        tokens, and float32 for others.
      seed: seed of the inputs: floats are normal, tokens of a `Decoder` uniform over its vocabulary, other integers
        0 or 1.

    Raises:
      DeviceError: `target` is unknown or not a TPU.
      UnsupportedError: `target` is a slice of several devices.
      ConfigError: `trace_directory` is not a path, or is a file.
      ShapeError: `dtype` is not a dtype of numbers, or `seed` is negative.

    >>> import jax.numpy as jnp
    >>> profiler = TPUProfiler(target=None, trace_directory=None, dtype="float32", seed=0)
    >>> found = profiler.profile_execution(jnp.sin, (64, 64), warmup_steps=1, profile_steps=5)
    >>> len(found.times), found.memory.level, found.percentiles[90].unit, found.estimate
    (5, 'verified', 's', None)
    """

    def __init__(
        self,
        target: str | None = None,
        trace_directory: str | os.PathLike[str] | None = None,
        dtype: DTypeLike | None = None,
        seed: int = 0,
    ):
        if target is not None and Target.parse_tpu(target).topology is not None:
            raise UnsupportedError(
                f"TPUProfiler: target {target!r} is a slice, and the estimate is for one device; pass a chip such as "
                '"v5e".'
            )
        if seed < 0:
            raise ShapeError(f"TPUProfiler: `seed` is {seed}; pass 0 or more.")
        self.target = target
        self.trace_directory = _directory(trace_directory)
        self.dtype = None if dtype is None else number_dtype(dtype)
        self.seed = seed

    @checked
    def profile_execution(
        self, model: Any, input_shape: object, warmup_steps: int = 5, profile_steps: int = 10
    ) -> ProfileResults:
        """Runs `model` on inputs of this shape and measures it.

        The model is compiled once. After the steps that warm up, every step is timed with its results waited for. Then
        up to 5 more steps are traced by `jax.profiler`, and the trace is read back. The estimate of the target, where
        there is one, is made last; it takes seconds to minutes. It loads libtpu, and a process that has loaded libtpu
        without a TPU takes no trace any more: `notes` say so. If the target's compiler declines the program, `estimate`
        is None and `notes` say why.

        FLOP are those of the program's products and of this library's operations, with loops as often as they run.
        MFU compares them with the peak of each dtype: published for a TPU, measured on this machine for others.

        Args:
          model: a function of arrays, jitted or not, or a module of Flax, NNX or linen. A step is one call; profile a
            function that takes gradients for a training step. The module's state is an argument of the step, and does
            not change. The variables of a linen module are drawn from the profiler's seed.
          input_shape: the shape of its input, such as `(8, 128)`, or a `jax.ShapeDtypeStruct`; for several inputs a
            tuple of these.
          warmup_steps: 0 to 100,000.
          profile_steps: 1 to 100,000.

        Raises:
          KernelError: `model` is not a function, or another trace is being taken.
          ShapeError: the steps or the shapes are not as above, or `model` does not take such inputs.
          ConfigError: the trace's directory cannot be written.
          DeviceError: the program does not fit the memory, or libtpu is missing for the target's estimate.
        """
        check_callable(NAME, "model", model)
        for name, steps, least in (("warmup_steps", warmup_steps, 0), ("profile_steps", profile_steps, 1)):
            if not least <= steps <= _MOST_STEPS:
                raise ShapeError(f"{NAME}: `{name}` is {steps}; pass a whole number from {least} to {_MOST_STEPS}.")
        if self.target is not None and not has_libtpu():
            raise DeviceError(f"{NAME}: an estimate for {self.target} needs libtpu: {install_line('aot')}.")
        subject = subject_of(model, input_shape, self.dtype, self.seed)
        _check_memory(sum(map(_nbytes, subject.inputs)), "the inputs")
        with Progress(NAME) as progress, undisturbed(), self._traces() as directory:
            progress.say("tracing and compiling")
            start = time.perf_counter()
            compiled = _compiled(subject)
            compiling = time.perf_counter() - start
            memory, parts = planned_memory(compiled)
            _check_memory(memory.value, "the program")
            flops, source = _flops(subject, compiled)
            arguments = (*subject.state, *input_values(subject, self.seed))

            def step() -> None:
                jax.block_until_ready(compiled(*arguments))

            with out_of_memory_named(NAME):
                for done in range(warmup_steps):
                    progress.say(f"warming up, step {done + 1} of {warmup_steps}")
                    step()
                usage, times = Usage(), []
                for done in range(profile_steps):
                    progress.say(f"measuring, step {done + 1} of {profile_steps}")
                    start = time.perf_counter()
                    step()
                    times.append(time.perf_counter() - start)
                busy = usage.complaint(_OTHERS)
                progress.say("tracing steps")
                path, operations, untraced = _traced(step, min(_TRACED, profile_steps), directory, compiled)
            progress.say("measuring this machine's peak")
            mfu, peaks, notes = _mfu(flops, statistics.median(times), subject.devices)
            estimate = None
            if self.target is not None:  # after the trace, which a loaded libtpu forbids
                progress.say(f"compiling for {self.target}")
                try:
                    estimate = _estimate(subject, self.target, flops)
                except VishwamaiError as error:  # what was measured is kept, and the reason is said
                    notes = (*notes, f"no estimate for {self.target}: {error}")
        kind = jax.devices()[0].device_kind
        nbytes = sum(parts[name].value for name in ("arguments", "outputs")) - parts["aliased"].value
        return ProfileResults(
            name=subject.name,
            device=kind,
            times=tuple(times),
            compiling=Measurement(compiling, kind, "s"),
            flops=flops,
            flops_source=source,
            mfu=mfu,
            peaks=peaks,
            bandwidth=Measurement(nbytes / statistics.median(times), kind, "B/s"),
            memory=memory,
            memory_parts=parts,
            device_peak=counted_peak(),
            operations=operations,
            trace=None if self.trace_directory is None else path,
            busy=busy,
            notes=(*untraced, *notes),
            estimate=estimate,
        )

    @contextlib.contextmanager
    def _traces(self) -> Iterator[Path]:
        """The directory of the trace; one that is removed afterwards where none was given."""
        if self.trace_directory is None:
            with tempfile.TemporaryDirectory(prefix="vishwamai-trace-", ignore_cleanup_errors=True) as directory:
                yield Path(directory)
            return
        try:
            self.trace_directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.trace_directory):
                pass
        except OSError as error:
            raise ConfigError(f"{NAME}: `trace_directory` {self.trace_directory} cannot be written: {error}") from error
        yield self.trace_directory


def _directory(directory: object) -> Path | None:
    if directory is None:
        return None
    if (
        not isinstance(directory, (str, os.PathLike))
        or not isinstance(os.fspath(directory), str)
        or not os.fspath(directory)
    ):
        raise ConfigError(f"TPUProfiler: `trace_directory` is {described(directory)}; pass the path of a directory.")
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"TPUProfiler: `trace_directory` {path} is not a directory; pass another path.")
    return path


def _nbytes(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize


def _check_memory(nbytes: float, subject: str) -> None:
    """Raises DeviceError where a CPU's memory cannot hold it; other devices say so themselves."""
    memory = cpu().memory
    if memory is not None and nbytes > memory and jax.default_backend() == "cpu":
        raise DeviceError(
            f"{NAME}: {subject} takes {human(nbytes)}, this machine has {human(memory)}; pass smaller shapes."
        )


def _compiled(subject: Subject) -> jax.stages.Compiled:
    try:
        lowered = jax.jit(subject.run).lower(*subject.state, *subject.inputs)
    except VishwamaiError:
        raise
    except Exception as error:  # of the caller's own model
        raise not_taken(error) from error
    with out_of_memory_named(NAME):
        return lowered.compile()


def _traced(
    step: Callable[[], None], steps: int, directory: Path, compiled: jax.stages.Compiled
) -> tuple[Path | None, tuple[OperationTime, ...], tuple[str, ...]]:
    """The trace's file, the time by operation, and notes."""
    reason = why_no_trace()
    if reason is not None:
        return None, (), (f"no trace and no time by operation: {reason}.",)
    path = record_trace(step, steps, directory)
    trace = jax.profiler.ProfileData.from_file(str(path))
    operations = operation_times(trace, compiled.as_text() or "", steps)
    return path, operations, () if operations else ("the trace has no operations of this program.",)


def _flops(subject: Subject, compiled: jax.stages.Compiled) -> tuple[ProgramFlops, str]:
    flops = program_flops(subject.run, *subject.shapes)
    if flops.total:
        loops = f"; {flops.unknown_loops} loops of unknown length count once" if flops.unknown_loops else ""
        return flops, f"products and this library's operations{loops}"
    xla_flops = float((compiled.cost_analysis() or {}).get("flops", 0.0))
    return ProgramFlops({"float32": xla_flops} if xla_flops > 0 else {}), "XLA's count, as the program has no products"


def _mfu(flops: ProgramFlops, seconds: float, devices: int) -> tuple[Measurement | None, str, tuple[str, ...]]:
    """MFU, what the peak is, and notes."""
    if not flops.total:
        return None, "", ()
    peaks = local_peaks()
    least = flops.seconds(peaks)
    if least is None:
        return None, peaks.how, ()
    share = least / devices / seconds
    if share <= 1:
        return Measurement(share, jax.devices()[0].device_kind, "of peak"), peaks.how, ()
    if peaks.published:
        return None, peaks.how, (f"MFU would be {share:.2f}: the clock or the count of FLOP is wrong.",)
    note = (
        f"MFU is {share:.1%}, above 100 %, which no device reaches: the peak was measured too low, by other work "
        "on this machine or by a clock that has risen since. Run it again while nothing else runs."
    )
    return Measurement(share, jax.devices()[0].device_kind, "of peak"), peaks.how, (note,)


def _estimate(subject: Subject, target: str, flops: ProgramFlops) -> TargetEstimate:
    chip = Target.parse_chip(target)
    schedule = inspect(subject.run, subject.shapes, target)
    memory = verify(subject.run, *subject.shapes, target=target)
    least = sum(count / chip.peak_per_device(dtype) for dtype, count in flops.by_dtype.items())
    mfu = least / schedule.seconds if schedule.seconds else 0.0
    step = Estimate(schedule.seconds, "verified", "s")
    return TargetEstimate(target, step, Estimate(mfu, "verified", "of peak"), memory, schedule.guessed)
