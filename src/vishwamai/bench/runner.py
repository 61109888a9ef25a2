"""Running the benchmark: for every case, every implementation and every peer is checked, and those that are right are
timed side by side.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from vishwamai.bench import numbers
from vishwamai.bench.budget import Budget
from vishwamai.bench.candidates import candidates
from vishwamai.bench.contest import contest
from vishwamai.bench.gradient import gradient_case, has_gradient, work
from vishwamai.bench.machine import Usage
from vishwamai.bench.numbers import Numbers
from vishwamai.bench.subject import Subject, subject
from vishwamai.core.cases import Case
from vishwamai.measure.machine_peaks import MachinePeaks, measure_again, measure_cached
from vishwamai.measure.timing import Call, Timing, side_by_side
from vishwamai.ops.catalogue import Operation, specs_of

_PEAKS_SECONDS = 30.0
"""The machine's peaks are measured again after so long."""


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """How much to do, and from when on a ratio means nothing.

    Attributes:
      seconds: bound of timing all cases together, without compiling and checking.
      call_seconds: a case is made smaller until its slowest candidate should need no more than this for a call.
      slowest_call: a candidate whose call took more seconds than this is not timed, unless all are that slow.
      cases_per_op: largest number of cases of each operation; None = all.
      gradients_per_op: backward passes of at most so many of them; None = of all.
      long: the cases that are tagged long too; without it, only where an operation has no others.
      case_seconds: bound of all cases; one that would take longer, were it as slow as the slowest so far, is not begun.
        None = no bound.
      compile_seconds: the same for compiling cases for TPUs you do not have.
      model_seconds: kept for the real model.
      total_seconds: bound of the run; the cases and the compiling get less where the rest of it is needed, and the
        model is left out where less than `model_seconds` is left.
      spread: ratios of a timing with a larger spread are held back.
      others: and those of a case, while other processes used more than this share of the cores.
    """

    seconds: float = 60.0
    call_seconds: float = 0.2
    slowest_call: float = 2.0
    cases_per_op: int | None = 2
    gradients_per_op: int | None = 1
    long: bool = False
    case_seconds: float | None = 225.0
    compile_seconds: float | None = 30.0
    model_seconds: float = 45.0
    total_seconds: float | None = 285.0
    spread: float = 0.5
    others: float = 0.5

    @classmethod
    def quick(cls) -> BenchSettings:
        return cls(
            12.0,
            0.06,
            0.5,
            cases_per_op=1,
            gradients_per_op=0,
            case_seconds=50.0,
            compile_seconds=0.0,
            model_seconds=20.0,
            total_seconds=90.0,
        )

    @classmethod
    def all(cls) -> BenchSettings:
        return cls(
            120.0, 0.7, math.inf, None, None, long=True, case_seconds=None, compile_seconds=None, total_seconds=None
        )


@dataclasses.dataclass
class PeakMeter:
    """This machine's peaks: the best of what was measured so far.

    Attributes:
      quick: how `again` measures; None: it does not, and `best` stays.
    """

    best: MachinePeaks
    quick: bool | None = None

    def again(self) -> None:
        """Measures once more."""
        if self.quick is not None:
            self.best = measure_again(self.best, self.quick)

    def for_bytes(self, nbytes: float) -> None:
        """Measures copies of as many bytes, where they are not known."""
        if self.quick is not None:
            self.best = measure_cached(self.best, nbytes)


@dataclasses.dataclass(frozen=True)
class Step:
    """One case in one direction: forward, or forward and backward."""

    operation: Operation
    case: Case
    gradients: bool

    @property
    def key(self) -> tuple[str, str, bool]:
        """What names the step in a report."""
        return self.operation.name, self.case.name, self.gradients

    def __str__(self) -> str:
        return f"{self.operation.name}: {self.case.name}{', forward and backward' if self.gradients else ''}"


@dataclasses.dataclass(frozen=True)
class CaseMeasurement:
    """One implementation (or peer) in one case.

    Attributes:
      candidate: "vishwamai native_cpu", or the peer's name; `framework`: "vishwamai", "jax" or "torch".
      implementation: name of our implementation, None for a peer.
      default: it is the implementation that runs when none is named.
      gradients: bool, True for forward and backward pass together; else the forward pass.
      numbers: result of the check, None where it did not run.
      timing: None where its numbers are wrong or it did not run.
      share: the roofline's time over its own: how much of this machine's measured peak it reaches; None where it was
        not timed, and where that is more than all of it (`overshot`): then the peak was measured too low.
      ratios: how many times as fast as each peer that is right; empty where they are held back.
      withheld: why the ratios are held back.
      memory: bytes of arguments, outputs and temporaries together, as XLA planned them; None where unknown (torch).
      note: why it did not run.
    """

    op: str
    case: str
    candidate: str
    framework: str
    implementation: str | None
    default: bool
    dtype: str
    flops: int
    bytes_moved: int
    gradients: bool = False
    numbers: Numbers | None = None
    timing: Timing | None = None
    share: float | None = None
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    withheld: str = ""
    memory: int | None = None
    note: str = ""

    @property
    def flops_per_second(self) -> float | None:
        return None if self.timing is None else self.flops / self.timing.median

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.timing is None else self.bytes_moved / self.timing.median

    @property
    def overshot(self) -> bool:
        """Its share of the peak was above 100 %."""
        return self.timing is not None and self.share is None

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """(name, how many times as fast as it) of the fastest peer; None without one, or where ratios are held back."""
        return min(self.ratios.items(), key=lambda pair: pair[1], default=None)

    def against(self, peaks: MachinePeaks) -> CaseMeasurement:
        """The same with its share of these peaks."""
        if self.timing is None:
            return self
        share = peaks.seconds(self.dtype, self.flops, self.bytes_moved) / self.timing.median
        return dataclasses.replace(self, share=share if share <= 1 else None)


def planned(operations: Sequence[Operation], settings: BenchSettings) -> list[tuple[Operation, Case]]:
    """The cases to run: those with a real model's shape."""
    selected = []
    for operation in operations:
        cases = [c for c in operation.cases if "model" in c.tags]
        short = [c for c in cases if settings.long or "long" not in c.tags]
        selected += [(operation, case) for case in (short or cases)[: settings.cases_per_op]]
    return selected


def by_turns(cases: Sequence[tuple[Operation, Case]]) -> list[tuple[Operation, Case]]:
    """The first case of every operation, then the second of each, so that a bound on the time leaves no operation
    out.
    """
    turns: dict[str, int] = {}
    numbered = []
    for operation, case in cases:
        turns[operation.name] = turns.get(operation.name, 0) + 1
        numbered.append((turns[operation.name], operation, case))
    return [(operation, case) for _, operation, case in sorted(numbered, key=lambda entry: entry[0])]


def steps(operations: Sequence[Operation], settings: BenchSettings) -> list[Step]:
    """What `run` does: every case, the first of every operation first, and the backward passes of the first that have
    one.
    """
    sequence = []
    count: dict[str, int] = {}
    for operation, case in by_turns(planned(operations, settings)):
        sequence.append(Step(operation, case, False))
        done = count.get(operation.name, 0)
        due = settings.gradients_per_op is None or done < settings.gradients_per_op
        if due and has_gradient(case):
            sequence.append(Step(operation, case, True))
            count[operation.name] = done + 1
    return sequence


def fitted(
    operation: Operation,
    case: Case,
    about: Subject,
    peaks: MachinePeaks,
    settings: BenchSettings,
    gradients: bool = False,
) -> Case:
    """The case, or a smaller one of the same kind, so that the slowest candidate should keep within
    `settings.call_seconds`.
    """
    spec = specs_of(operation, case)[0]
    dtype = next(iter(case.arrays.values())).dtype
    slowest = min(peaks.rate(dtype, library) for library in ("jax", "torch"))
    passes = 3 if gradients else 1
    seconds = passes * max(about.slack * spec.flops / slowest, spec.bytes_moved / peaks.best_bandwidth)
    if seconds <= settings.call_seconds:
        return case
    return about.smaller(case, settings.call_seconds / seconds) or case


def run_case(
    operation: Operation,
    case: Case,
    peaks: MachinePeaks,
    settings: BenchSettings,
    seconds: float,
    gradients: bool = False,
) -> Iterator[CaseMeasurement]:
    """Checks and times every candidate of one case.

    Args:
      seconds: bound of the timing.
      gradients: bool, True for forward and backward pass together, in place of the forward pass alone; nothing for a
        case without gradients.
    """
    about = subject(operation.name)
    case = fitted(operation, case, about, peaks, settings, gradients)
    spec = specs_of(operation, case)[0]
    flops, nbytes = spec.flops, spec.bytes_moved
    able, declined = candidates(operation, case, about, gradients)
    if gradients:
        differentiated = gradient_case(case)
        if differentiated is None:
            return
        case = differentiated
        flops, nbytes = work(case, spec)
    dtype = next(iter(case.arrays.values())).dtype
    arrays = case.make()
    sample = about.gradient_sample(case, arrays) if gradients else about.sample(case, arrays)
    right = numbers.truth(sample, gradients)

    def untimed(name: str, framework: str, implementation: str | None, default: bool) -> CaseMeasurement:
        return CaseMeasurement(
            operation.name, case.name, name, framework, implementation, default, dtype, flops, nbytes, gradients
        )

    busy = ""

    def timed(calls: Mapping[str, Call]) -> dict[str, Timing]:
        nonlocal busy
        usage = Usage()
        timings = side_by_side(calls, seconds)
        busy = usage.complaint(settings.others)
        return timings

    outcomes = contest(
        able, arrays, lambda _, outputs: numbers.check(outputs, sample, right), timed, settings.slowest_call
    )
    peers = [o for o in outcomes if o.candidate.implementation is None and o.timing is not None]
    # Those that could not be timed first, as they are known first.
    for outcome in sorted(outcomes, key=lambda o: o.timing is not None):
        measured, timing = outcome.candidate, outcome.timing
        blank = untimed(measured.name, measured.framework, measured.implementation, measured.default)
        row = dataclasses.replace(
            blank, numbers=outcome.numbers, timing=timing, memory=outcome.memory, note=outcome.note
        )
        if timing is not None:
            others = {o.candidate.name: o.timing for o in peers if o is not outcome and o.timing is not None}
            withheld = busy or _unsteady(timing, settings.spread)
            steady = {} if withheld else {n: t for n, t in others.items() if not _unsteady(t, settings.spread)}
            if others and not steady and not withheld:
                withheld = f"the peers' {_unsteady(next(iter(others.values())), settings.spread)}"
            ratios = {name: timing.ratio(peer_timing) for name, peer_timing in steady.items()}
            row = dataclasses.replace(row, ratios=ratios, withheld=withheld if others else "").against(peaks)
        yield row
    for name, reason in declined:
        yield dataclasses.replace(untimed(f"vishwamai {name}", "vishwamai", name, False), note=reason)


def _unsteady(timing: Timing, limit: float) -> str:
    """Why a timing is no base for a ratio; empty where it is one."""
    return f"spread {timing.spread:.0%}" if timing.spread > limit else ""


def run(
    sequence: Sequence[Step],
    meter: PeakMeter,
    settings: BenchSettings,
    on_case: Callable[[int, int, str], None] = lambda done, total, name: None,
    budget: Budget | None = None,
) -> Iterator[tuple[Step, list[CaseMeasurement]]]:
    """Each step with its measurements; `on_case(done, total, name)` is called before each. A step that would not end
    within `settings.case_seconds`, or `budget`, is not begun, nor is any after it.

    The peaks are measured again now and then, and after the last: `meter.best` has them at the end, and
    `CaseMeasurement.against` takes the share of them.
    """
    left = settings.seconds
    bound = (budget or Budget()).part(settings.case_seconds)
    measured = time.perf_counter()
    for i, step in enumerate(sequence):
        if not bound.has_room:
            break
        start = time.perf_counter()
        on_case(i, len(sequence), str(step))
        share = left / (len(sequence) - i)
        case_rows = list(run_case(step.operation, step.case, meter.best, settings, share, step.gradients))
        for nbytes in {m.bytes_moved for m in case_rows if m.timing is not None}:
            meter.for_bytes(nbytes)
        now = time.perf_counter()
        left = max(0.0, left - min(now - start, share))
        if i + 1 == len(sequence) or now - measured > _PEAKS_SECONDS:
            meter.again()
            measured = time.perf_counter()
        bound.took(time.perf_counter() - start)
        yield step, [m.against(meter.best) for m in case_rows]
    on_case(len(sequence), len(sequence), "done")
