"""`tune_flags`: options of the TPU compiler under which a program takes fewer cycles, by its own schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from vishwamai.aot.compile.compiled import Memory
from vishwamai.aot.compile.options.ask import ask
from vishwamai.aot.compile.options.config import RuntimeConfig, configure_runtime_options, option_text
from vishwamai.aot.compile.options.table import TPU_OPTIONS
from vishwamai.aot.compile.traced import Program
from vishwamai.aot.schedule.dump import dump_many
from vishwamai.aot.schedule.inspection import Inspection, check_one_device, prepare, schedule_of
from vishwamai.core.arguments import checks_its_own, described
from vishwamai.core.errors import ConfigError, ShapeError, VishwamaiError
from vishwamai.core.figures import Estimate
from vishwamai.core.hardware import TpuChip
from vishwamai.core.progress import Progress
from vishwamai.core.target import Target

_NAME = "tune_flags"
_LEAST_GAIN = 1e-3
"""Of the baseline's time: less is not worth an option."""
_MOST_TOGETHER = 4
"""Compilations kept for options that gained alone, tried together."""
_JUDGED = ("fusion", "memory", "schedule")
"""Areas of options whose effect a schedule shows. It counts no communication and no copies to the host."""

_SWITCHES = tuple(o.name for o in TPU_OPTIONS.values() if o.area == "fusion" and o.kind == "bool")

Values = tuple[tuple[str, bool | int | float | str], ...]


@dataclasses.dataclass(frozen=True)
class FlagTrial:
    """The program compiled under some options.

    Attributes:
      options: names and values; empty for the baseline.
      time: seconds of a step on one device, by the schedule; None where the compiler made no program.
      memory: HBM of the compiled program; None as well.
      fits: True where it fits the device.
      problem: why there is no program; None where there is one.
    """

    options: Values
    time: Estimate | None
    memory: Estimate | None
    fits: bool = True
    problem: str | None = None

    @property
    def names(self) -> list[str]:
        """The options as texts, "name=value"; of the baseline, that word."""
        return [f"{name}={option_text(value)}" for name, value in self.options] or ["baseline"]


@dataclasses.dataclass(frozen=True)
class FlagTuning:
    """What `tune_flags` found; print it for the table.

    Attributes:
      target: the chip.
      baseline: the program without options.
      best: the fastest that fits; the baseline, where nothing gained.
      config: the options of `best`, accepted by the installed compiler.
      trials: compiled programs in the order of the trials, the baseline first.
      untried: options that were left out, and why.
      uncertain: figures that the baseline's schedule does not tell, so that times are less certain.
    """

    target: str
    baseline: FlagTrial
    best: FlagTrial
    config: RuntimeConfig
    trials: tuple[FlagTrial, ...]
    untried: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """The baseline's time over that of the best."""
        assert self.baseline.time is not None and self.best.time is not None
        return self.baseline.time.value / self.best.time.value if self.best.time.value else 1.0

    def __str__(self) -> str:
        gained = f"{self.gain:.3f}x as fast by the schedule" if self.best.options else "no option gained anything"
        lines = [f"{self.target}: {gained}"]
        same = [
            t for t in self.trials if t.options and (t.time, t.memory) == (self.baseline.time, self.baseline.memory)
        ]
        for trial in sorted((t for t in self.trials if t not in same), key=_seconds):
            marks = "*" if trial == self.best else " ", *" " * len(trial.options[1:])
            lines += [f"{mark} {name}" for mark, name in zip(marks, trial.names)]
            figures = f"{trial.time}, {trial.memory}{'' if trial.fits else ', does not fit'}"
            lines.append(f"      {figures if trial.problem is None else trial.problem[:72]}")
        lines += [f"  no change: {name}" for trial in same for name in trial.names]
        lines += [f"  not tried: {text}" for text in self.untried]
        lines += [f"  less certain: {text}" for text in self.uncertain]
        return "\n".join(lines)


@checks_its_own("compilations", "workers")
def tune_flags(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    target: str = "v5e",
    *,
    kwargs: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
    compilations: int = 32,
    workers: int = 1,
) -> FlagTuning:
    """Tries options of the TPU compiler on a program, and returns those under which its schedule takes fewer cycles.

    The program is compiled without options, then under each value alone, in the order given. Options that gained are
    tried together, the largest gain first, and kept where they gain more. The result is a compiled program that fits,
    never slower than the baseline by its schedule. Nothing runs: times are estimates (docs/aot.md says how far to trust
    them). Programs are kept on disk, so a second call with the same program compiles nothing.

    Args:
      fn: a function, jitted or not.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s, as `vishwamai.aot.inspect` takes them.
      target: one chip: "v4", "v5e", "v5p", "v6e" or "tpu7x".
      kwargs: keyword arguments of `fn`.
      options: values to try by name, a list for each option; None takes what is known to change fusions and VMEM.
      compilations: programs to compile at most, the baseline included; 2 or more.
      workers: compiler processes at once.

    Returns:
      The trials, the best of them, and its options as a `RuntimeConfig`.

    Raises:
      ConfigError: the installed compiler has no such option or does not take its value; or no schedule shows what an
        option does (communication, copies to the host, checks).
      ShapeError: `compilations` or `workers` is too small, or `options` is empty.
      UnsupportedError: `target` is a slice of several devices.
      DeviceError, KernelError: as `vishwamai.aot.inspect`, for the program without options.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((512, 512), "bfloat16")
    >>> tries = {"xla_tpu_scoped_vmem_limit_kib": [32768]}
    >>> found = tune_flags(jax.numpy.matmul, (x, x), "v5e", options=tries, compilations=2)  # doctest: +SKIP
    >>> found.config.environment()  # doctest: +SKIP
    {}
    """
    for name, value, least in (("compilations", compilations, 2), ("workers", workers, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ShapeError(f"{_NAME}: `{name}` is {described(value)}; pass a whole number, {least} or more.")
    check_one_device(_NAME, target)
    chip = Target.parse_chip(target)
    tries, untried = _default_tries(chip) if options is None else (_requested_tries(options), [])
    judge = _Judge(Inspection(fn, args, kwargs or {}, target), prepare(fn, args, kwargs or {}, target), workers)
    with Progress(_NAME) as progress:
        progress.say("compiling the baseline")
        (baseline,) = judge([()])
        if baseline.problem is not None:
            raise judge.errors[()]
        left = compilations - 1
        singles = min(len(tries), left - min(_MOST_TOGETHER, left // 4))
        untried += [
            f"{name}={option_text(value)}: {compilations} compilations are over" for name, value in tries[singles:]
        ]
        trials = [baseline]
        step = 2 * workers
        for start in range(0, singles, step):
            progress.say(f"{start} of {singles} options, then those that gained together")
            trials += judge([(trial,) for trial in tries[start : min(start + step, singles)]])
        best = _best(baseline, trials)
        for winner in _winners(baseline, trials)[1 : left - singles + 1]:
            combined = dict(best.options) | dict(winner.options)
            progress.say(f"{len(combined)} options together")
            trials += judge([tuple(sorted(combined.items()))])
            best = _best(best, trials[-1:])
        progress.say("asking for all options of the best together")
        config = configure_runtime_options(dict(best.options))
    return FlagTuning(target, baseline, best, config, tuple(trials), tuple(untried), judge.uncertain)


class _Judge:
    """Compiles a program under options, and reads time and memory from what the compiler made."""

    def __init__(self, case: Inspection, program: Program, workers: int):
        self.case, self.program, self.workers = case, program, workers
        self.errors: dict[Values, VishwamaiError] = {}
        self.uncertain: tuple[str, ...] = ()

    def __call__(self, sets: Sequence[Values]) -> list[FlagTrial]:
        programs = [self.program.with_options({n: option_text(v) for n, v in options}) for options in sets]
        return list(self._read(sets, programs))

    def _read(self, sets: Sequence[Values], programs: Sequence[Program]) -> Iterator[FlagTrial]:
        for options, program, dump in zip(sets, programs, dump_many(programs, workers=self.workers)):
            if isinstance(dump, VishwamaiError):
                self.errors[options] = dump
                yield FlagTrial(options, None, None, False, " ".join(str(dump).split()))
                continue
            schedule, memory = schedule_of(self.case, program, dump), Memory(**dump.memory)
            if not options:
                self.uncertain = schedule.guessed
            time, size = Estimate(schedule.seconds, "verified", "s"), Estimate(memory.total, "verified")
            yield FlagTrial(options, time, size, memory.fits)


def _gains(baseline: FlagTrial, trial: FlagTrial) -> bool:
    assert baseline.time is not None
    if trial.time is None or not trial.fits:
        return False
    return not baseline.fits or trial.time.value < (1 - _LEAST_GAIN) * baseline.time.value


def _seconds(trial: FlagTrial) -> float:
    return trial.time.value if trial.time is not None else float("inf")


def _best(start: FlagTrial, trials: Sequence[FlagTrial]) -> FlagTrial:
    """The fastest of the trials that gain over `start`, or `start`."""
    return min((trial for trial in trials if _gains(start, trial)), key=_seconds, default=start)


def _winners(baseline: FlagTrial, trials: Sequence[FlagTrial]) -> list[FlagTrial]:
    """The best value of each option that gained alone, the largest gain first."""
    winners: dict[str, FlagTrial] = {}
    for trial in sorted((t for t in trials if len(t.options) == 1 and _gains(baseline, t)), key=_seconds):
        winners.setdefault(trial.options[0][0], trial)
    return list(winners.values())


def _default_tries(chip: TpuChip) -> tuple[list[tuple[str, bool | int | float | str]], list[str]]:
    """What is tried where the caller names nothing; and what the installed compiler does not have."""
    limits = [
        chip.vmem_scoped_bytes * factor >> 10 for factor in (2, 4) if chip.vmem_scoped_bytes * factor < chip.vmem_bytes
    ]
    values: list[tuple[str, bool | int | float | str]] = [("xla_tpu_scoped_vmem_limit_kib", kib) for kib in limits]
    values += [(name, value) for name in _SWITCHES for value in (True, False)]
    ask([{"option": name, "value": option_text(value)} for name, value in values])  # in one process; then all are known
    tries, untried = [], []
    for name, value in values:
        try:
            configure_runtime_options({name: value})
        except ConfigError as error:
            untried.append(f"{name}={option_text(value)}: {' '.join(str(error).split())}")
        else:
            tries.append((name, value))
    return tries, untried


def _requested_tries(options: Mapping[str, object]) -> list[tuple[str, bool | int | float | str]]:
    """The caller's values, checked."""
    if not options:
        raise ShapeError(f"{_NAME}: `options` is empty; pass a list of values for each option, or None.")
    values: list[tuple[str, bool | int | float | str]] = []
    for name, listed in options.items():
        if not isinstance(name, str) or not name.startswith("xla_"):
            raise ConfigError(f"{_NAME}: {described(name)} is no option of the compiler; their names begin with xla_.")
        if not isinstance(listed, (list, tuple)) or not listed:
            raise ConfigError(f"{_NAME}: `{name}` is {described(listed)}; pass a list of the values to try.")
        option = TPU_OPTIONS.get(name)
        if option is not None and option.area not in _JUDGED:
            raise ConfigError(f"{_NAME}: no schedule shows what `{name}` does ({option.area}); leave it out.")
        values += [(name, value) for value in listed]
    for name, value in values:
        configure_runtime_options({name: value})
    return values
