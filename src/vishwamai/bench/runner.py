"""Running the benchmark: for every case, every implementation and every peer is checked, and those that are right are timed side by side."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from vishwamai.bench import numbers
from vishwamai.bench.candidates import TooLarge, candidates
from vishwamai.bench.catalogue import Operation, specs_of
from vishwamai.bench.gradient import gradient_case, work
from vishwamai.bench.numbers import Numbers
from vishwamai.bench.peaks import Peaks
from vishwamai.bench.subject import Subject, subject
from vishwamai.bench.timing import Timing, side_by_side
from vishwamai.core.cases import Case


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much to do.

    Attributes:
      seconds: for timing all cases together, compiling and checking not included.
      call_seconds: a case is made smaller until its slowest candidate should need no more than this for a call.
      cases_per_op: at most so many cases of each operation.
      compile_seconds: after so long, no further case is compiled for TPUs that are not here; None = no bound.
    """

    seconds: float = 120.0
    call_seconds: float = 0.7
    cases_per_op: int | None = None
    compile_seconds: float | None = 150.0

    @classmethod
    def quick(cls) -> Settings:
        return cls(seconds=12.0, call_seconds=0.06, cases_per_op=3, compile_seconds=25.0)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One implementation (or peer) in one case.

    Attributes:
      candidate: "vishwamai native_cpu", or the peer's name; `framework`: "vishwamai", "jax" or "torch".
      implementation: name of our implementation, None for a peer.
      default: it is the implementation that runs when none is named.
      gradients: of forward and backward pass together; else of the forward pass.
      numbers: whether it is right, None where it did not run.
      timing: None where its numbers are wrong or it did not run.
      share: the roofline's time over its own: how much of this machine's measured peak it reaches.
      ratios: how many times as fast as each peer that is right.
      memory: bytes of arguments, outputs and temporaries together, as XLA planned them; None where nobody says (torch).
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
    memory: int | None = None
    note: str = ""

    @property
    def flops_per_second(self) -> float | None:
        return None if self.timing is None else self.flops / self.timing.median

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.timing is None else self.bytes_moved / self.timing.median


def planned(operations: Sequence[Operation], settings: Settings, long: bool = False) -> list[tuple[Operation, Case]]:
    """The cases to run: those with a real model's shape, the long ones only where asked for."""
    found = []
    for operation in operations:
        cases = [c for c in operation.cases if "model" in c.tags and (long or "long" not in c.tags)]
        found += [(operation, case) for case in cases[: settings.cases_per_op]]
    return found


def fitted(
    operation: Operation, case: Case, about: Subject, peaks: Peaks, settings: Settings, gradients: bool = False
) -> Case:
    """The case, or a smaller one of the same kind, so that the slowest candidate should keep within `settings.call_seconds`."""
    spec = specs_of(operation, case)[0]
    dtype = next(iter(case.arrays.values())).dtype
    slowest = min(peaks.rate(dtype, who) for who in ("jax", "torch"))
    passes = 3 if gradients else 1
    seconds = passes * max(about.slack * spec.flops / slowest, spec.bytes_moved / peaks.best_bandwidth)
    if seconds <= settings.call_seconds:
        return case
    return about.smaller(case, settings.call_seconds / seconds) or case


def run_case(
    operation: Operation, case: Case, peaks: Peaks, settings: Settings, seconds: float, gradients: bool = False
) -> Iterator[Measurement]:
    """Checks and times every candidate of one case.

    Args:
      seconds: for the timing.
      gradients: of forward and backward pass together, in place of the forward pass alone; nothing for a case without gradients.
    """
    about = subject(operation.name)
    case = fitted(operation, case, about, peaks, settings, gradients)
    spec = specs_of(operation, case)[0]
    flops, nbytes = spec.flops, spec.bytes_moved
    able, refused = candidates(operation, case, about, gradients)
    if gradients:
        differentiated = gradient_case(case)
        if differentiated is None:
            return
        case = differentiated
        flops, nbytes = work(case, spec)
    dtype = next(iter(case.arrays.values())).dtype
    arrays = case.make()
    sample = about.gradient_sample(case, arrays) if gradients else about.sample(case, arrays)
    right = numbers.truth(sample)

    def untimed(name: str, framework: str, implementation: str | None, default: bool) -> Measurement:
        return Measurement(
            operation.name, case.name, name, framework, implementation, default, dtype, flops, nbytes, gradients
        )

    calls, checked, memories = {}, {}, {}
    blank = {c.name: untimed(c.name, c.framework, c.implementation, c.default) for c in able}
    for candidate in able:
        memory = None
        try:
            call, outputs, memory = candidate.build(arrays)
            found = numbers.check(outputs(call()), sample, right)
        except TooLarge as reason:
            yield dataclasses.replace(blank[candidate.name], note=str(reason))
            continue
        except Exception as error:  # it is told as wrong, with what it raised, and the others still get their turn
            found = numbers.raised(error)
        if found.right:
            calls[candidate.name] = call
            checked[candidate.name], memories[candidate.name] = found, memory
        else:
            yield dataclasses.replace(blank[candidate.name], numbers=found, memory=memory)
    timings = side_by_side(calls, seconds) if calls else {}
    roofline = peaks.seconds(dtype, flops, nbytes)
    for candidate in able:
        if candidate.name not in timings:
            continue
        timing = timings[candidate.name]
        others = {
            c.name: timing.ratio(timings[c.name])
            for c in able
            if c.implementation is None and c.name in timings and c is not candidate
        }
        yield dataclasses.replace(
            blank[candidate.name],
            numbers=checked[candidate.name],
            timing=timing,
            share=roofline / timing.median,
            ratios=others,
            memory=memories[candidate.name],
        )
    for name, reason in refused:
        yield dataclasses.replace(untimed(f"vishwamai {name}", "vishwamai", name, False), note=reason)


def run(
    operations: Sequence[Operation],
    peaks: Peaks,
    settings: Settings,
    long: bool = False,
    gradients: bool = False,
    on_case: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Iterator[Measurement]:
    """Every measurement of every case, with `gradients` of its backward pass too; `on_case(done, total, name)` is told before each."""
    cases = planned(operations, settings, long)
    directions = (False, True) if gradients else (False,)
    steps = [(operation, case, direction) for operation, case in cases for direction in directions]
    left = settings.seconds
    for i, (operation, case, direction) in enumerate(steps):
        on_case(i, len(steps), f"{operation.name}: {case.name}")
        share = left / (len(steps) - i)
        start = time.perf_counter()
        yield from run_case(operation, case, peaks, settings, share, direction)
        left = max(0.0, left - min(time.perf_counter() - start, share))
    on_case(len(steps), len(steps), "done")
