"""`TPUProfiler`: a model's steps measured on the device of this machine, and estimated for a TPU that is not here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

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
from vishwamai.performance.usage import counted_peak, planned_memory
from vishwamai.planning.memory.compiler import verify

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_NAME = "profile_execution"
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
        self.dtype = None if dtype is None else _number_dtype(dtype)
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
        check_callable(_NAME, "model", model)
        for name, steps, least in (("warmup_steps", warmup_steps, 0), ("profile_steps", profile_steps, 1)):
            if not least <= steps <= _MOST_STEPS:
                raise ShapeError(f"{_NAME}: `{name}` is {steps}; pass a whole number from {least} to {_MOST_STEPS}.")
        if self.target is not None and not has_libtpu():
            raise DeviceError(f"{_NAME}: an estimate for {self.target} needs libtpu: {install_line('aot')}.")
        subject = _subject(model, input_shape, self.dtype, self.seed)
        _check_memory(sum(map(_nbytes, subject.inputs)), "the inputs")
        with Progress(_NAME) as progress, undisturbed(), self._traces() as directory:
            progress.say("tracing and compiling")
            start = time.perf_counter()
            compiled = _compiled(subject)
            compiling = time.perf_counter() - start
            memory, parts = planned_memory(compiled)
            _check_memory(memory.value, "the program")
            flops, source = _flops(subject, compiled)
            arguments = (*subject.state, *_values(subject, self.seed))

            def step() -> None:
                jax.block_until_ready(compiled(*arguments))

            with out_of_memory_named(_NAME):
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
            raise ConfigError(
                f"{_NAME}: `trace_directory` {self.trace_directory} cannot be written: {error}"
            ) from error
        yield self.trace_directory


@dataclasses.dataclass(frozen=True)
class _Subject:
    """What is profiled: a function of `state` and `inputs`. `tokens`: integers below this are legal inputs."""

    name: str
    run: Callable[..., Any]
    state: tuple[Any, ...]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    tokens: int
    devices: int

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The arguments without values."""
        return (*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.state), *self.inputs)


def _linen_variables(model: Any, inputs: Sequence[jax.ShapeDtypeStruct], seed: int) -> Any:
    try:
        return jax.jit(model.init)(jax.random.key(seed), *(jnp.zeros(x.shape, x.dtype) for x in inputs))
    except VishwamaiError:
        raise
    except Exception as error:  # of the caller's own model
        raise _not_taken(error) from error


def _not_taken(error: Exception) -> ShapeError:
    text = str(error).strip() or type(error).__name__
    return ShapeError(f"{_NAME}: `model` does not take inputs of `input_shape`: {text}")


def _subject(model: Any, input_shape: object, dtype: np.dtype[Any] | None, seed: int) -> _Subject:
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        inputs = _inputs(input_shape, dtype or np.dtype(np.float32))
        name = _called(type(model).__name__, inputs)
        return _Subject(name, model.apply, (_linen_variables(model, inputs, seed),), inputs, 2, 1)
    nnx = sys.modules.get("flax.nnx")  # who has a module has imported it
    if nnx is None or not isinstance(model, nnx.Module):
        inputs = _inputs(input_shape, dtype or np.dtype(np.float32))
        name = getattr(model, "__name__", type(model).__name__)
        return _Subject(_called(name, inputs), lambda *inputs: model(*inputs), (), inputs, 2, 1)
    from vishwamai.models import Decoder

    tokens = model.config.vocab_size if isinstance(model, Decoder) else 2
    inputs = _inputs(input_shape, dtype or np.dtype(np.int32 if isinstance(model, Decoder) else np.float32))
    graph, state = nnx.split(model)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            raise ShapeError(
                f"{_NAME}: `model`{jax.tree_util.keystr(path)} is {described(leaf)}; pass a module with its parameters."
            )
    shardings = [leaf.sharding for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    devices = max((len(sharding.device_set) for sharding in shardings), default=1)
    name = _called(type(model).__name__, inputs)
    return _Subject(name, lambda state, *inputs: nnx.merge(graph, state)(*inputs), (state,), inputs, tokens, devices)


def _called(name: str, inputs: Sequence[jax.ShapeDtypeStruct]) -> str:
    name = name.replace("<lambda>", "lambda")
    return f"{name}({', '.join(f'{shape.dtype}{list(shape.shape)}' for shape in inputs)})"


def _inputs(shapes: Any, dtype: np.dtype[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The inputs that `input_shape` describes."""
    several = isinstance(shapes, (tuple, list)) and len(shapes) > 0 and not _is_size(shapes[0])
    inputs = []
    for entry in shapes if several else (shapes,):
        shape = entry.shape if isinstance(entry, jax.ShapeDtypeStruct) else entry
        if not isinstance(shape, (tuple, list)) or not all(map(_is_size, shape)):
            raise ShapeError(
                f"{_NAME}: `input_shape` is {described(shapes)}; pass a shape such as (8, 128), a "
                "jax.ShapeDtypeStruct, or a tuple of these."
            )
        entry_dtype = _number_dtype(entry.dtype) if isinstance(entry, jax.ShapeDtypeStruct) else dtype
        inputs.append(jax.ShapeDtypeStruct(tuple(int(size) for size in shape), entry_dtype))
    return tuple(inputs)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 <= value < 2**31)


def _number_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        number_dtype = jnp.dtype(dtype)
    except Exception as error:
        raise ShapeError(f"TPUProfiler: `dtype` is {described(dtype)}; pass a dtype such as 'float32'.") from error
    if not (jnp.issubdtype(number_dtype, jnp.number) or number_dtype == np.bool_):
        raise ShapeError(
            f"TPUProfiler: dtype {number_dtype} is not one of numbers; pass one such as 'float32' or 'int32'."
        )
    return jax.dtypes.canonicalize_dtype(number_dtype)


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
            f"{_NAME}: {subject} takes {human(nbytes)}, this machine has {human(memory)}; pass smaller shapes."
        )


def _values(subject: _Subject, seed: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)

    def random_array(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.inexact):
            numbers = rng.standard_normal(shape.shape, np.float32)
        else:
            numbers = rng.integers(0, 2 if shape.dtype.itemsize == 1 else subject.tokens, shape.shape)
        return jax.device_put(numbers.astype(shape.dtype))

    return tuple(map(random_array, subject.inputs))


def _compiled(subject: _Subject) -> jax.stages.Compiled:
    try:
        lowered = jax.jit(subject.run).lower(*subject.state, *subject.inputs)
    except VishwamaiError:
        raise
    except Exception as error:  # of the caller's own model
        raise _not_taken(error) from error
    with out_of_memory_named(_NAME):
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


def _flops(subject: _Subject, compiled: jax.stages.Compiled) -> tuple[ProgramFlops, str]:
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


def _estimate(subject: _Subject, target: str, flops: ProgramFlops) -> TargetEstimate:
    chip = Target.parse_chip(target)
    schedule = inspect(subject.run, subject.shapes, target)
    memory = verify(subject.run, *subject.shapes, target=target)
    least = sum(count / chip.peak_per_device(dtype) for dtype, count in flops.by_dtype.items())
    mfu = least / schedule.seconds if schedule.seconds else 0.0
    step = Estimate(schedule.seconds, "verified", "s")
    return TargetEstimate(target, step, Estimate(mfu, "verified", "of peak"), memory, schedule.guessed)
