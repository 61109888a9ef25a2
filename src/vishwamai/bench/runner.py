"""Running the benchmark: for every case, every implementation and every peer is checked, and those that are right are timed side by side."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from vishwamai.bench import numbers
from vishwamai.bench.catalogue import Operation, specs_of
from vishwamai.bench.numbers import Numbers
from vishwamai.bench.peaks import Peaks
from vishwamai.bench.subject import Arrays, Peer, Subject, subject
from vishwamai.bench.timing import Timing, side_by_side
from vishwamai.core.cases import Case
from vishwamai.core.config import ambient_chip, ambient_platform
from vishwamai.core.errors import FallbackWarning
from vishwamai.core.op import Implementation

_SLACK = 3.0
"""How much slower than its rate in a plain product a candidate is reckoned to be, when deciding how big a case to run."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much to do.

    Attributes:
      seconds: for timing all cases together, compiling and checking not included.
      call_seconds: a case is made smaller until its slowest candidate should need no more than this for a call.
      cases_per_op: at most so many cases of each operation.
    """

    seconds: float = 120.0
    call_seconds: float = 0.5
    cases_per_op: int | None = None

    @classmethod
    def quick(cls) -> Settings:
        return cls(seconds=12.0, call_seconds=0.06, cases_per_op=3)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One implementation (or peer) in one case.

    Attributes:
      candidate: "vishwamai native_cpu", or the peer's name; `framework`: "vishwamai", "jax" or "torch".
      implementation: name of our implementation, None for a peer.
      default: it is the implementation that runs when none is named.
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


@dataclasses.dataclass
class _Candidate:
    name: str
    framework: str
    implementation: str | None
    default: bool
    build: Callable[[Arrays], tuple[Callable[[], Any], Callable[[Any], Any], int | None]]


def planned(operations: Sequence[Operation], settings: Settings, long: bool = False) -> list[tuple[Operation, Case]]:
    """The cases to run: those with a real model's shape, the long ones only where asked for."""
    found = []
    for operation in operations:
        cases = [c for c in operation.cases if "model" in c.tags and (long or "long" not in c.tags)]
        found += [(operation, case) for case in cases[: settings.cases_per_op]]
    return found


def _memory_limit() -> int:
    """Half of the memory that is free now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class _TooLarge(Exception):
    """A program's own plan says that it would not fit."""


def _compiled(function: Callable[..., Any], arguments: Any) -> tuple[Callable[[], Any], int]:
    """(the call, bytes that it takes) of a program compiled for the default device, arguments in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        program = jax.jit(function).lower(*arguments).compile()
    plan = program.memory_analysis()
    assert plan is not None  # every backend of ours gives it
    memory = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    if ambient_platform() == "cpu" and memory > _memory_limit():
        raise _TooLarge(f"needs {memory / 2**30:.1f} GiB, more than half of the memory that is free")
    placed = jax.device_put(arguments)
    return lambda: jax.block_until_ready(program(*placed)), memory


def _ours(case: Case, impl: Implementation, default: bool) -> _Candidate:
    def build(arrays: Arrays) -> Any:
        call, memory = _compiled(lambda arrays: case.run(arrays, implementation=impl.name), (arrays,))
        return call, numbers.as_tuple, memory

    return _Candidate(f"vishwamai {impl.name}", "vishwamai", impl.name, default, build)


def _theirs(peer: Peer) -> _Candidate:
    def build(arrays: Arrays) -> Any:
        arguments = peer.prepare(arrays)
        if peer.framework == "jax":
            call, memory = _compiled(peer.call, arguments)
            return call, lambda result: _restored(peer, numbers.as_tuple(result)), memory
        return _torch_call(peer, arguments), lambda result: _restored(peer, _torch_arrays(result)), None

    return _Candidate(peer.name, peer.framework, None, False, build)


def _restored(peer: Peer, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (peer.restore(outputs[0]), *outputs[1:])


def _torch_call(peer: Peer, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    import torch

    def call() -> Any:
        with torch.inference_mode():
            return peer.call(*arguments)

    return call


def _torch_arrays(result: Any) -> tuple[Any, ...]:
    from vishwamai.bench.subject import from_torch

    return tuple(from_torch(x) for x in (result if isinstance(result, tuple) else (result,)))


def candidates(operation: Operation, case: Case, about: Subject) -> tuple[list[_Candidate], list[tuple[str, str]]]:
    """(what can compute the case here, (implementation, why it cannot) for the others)."""
    spec = specs_of(operation, case)[0]
    platform, chip = ambient_platform(), ambient_chip()
    found: list[_Candidate] = []
    refused: list[tuple[str, str]] = []
    for impl in operation.op.implementations:
        if impl.platform not in (platform, None):
            continue
        reason = impl.why_not(spec, chip)
        if reason is None:
            found.append(_ours(case, impl, default=not found))
        else:
            refused.append((impl.name, reason))
    with_torch = importlib.util.find_spec("torch") is not None and platform == "cpu"
    found += [_theirs(p) for p in about.peers(case) if p.framework != "torch" or with_torch]
    return found, refused


def fitted(operation: Operation, case: Case, about: Subject, peaks: Peaks, settings: Settings) -> Case:
    """The case, or a smaller one of the same kind, so that the slowest candidate should keep within `settings.call_seconds`."""
    spec = specs_of(operation, case)[0]
    dtype = next(iter(case.arrays.values())).dtype
    slowest = min(peaks.rate(dtype, who) for who in ("jax", "torch"))
    seconds = max(_SLACK * spec.flops / slowest, spec.bytes_moved / peaks.best_bandwidth)
    if seconds <= settings.call_seconds:
        return case
    return about.smaller(case, settings.call_seconds / seconds) or case


def run_case(
    operation: Operation, case: Case, peaks: Peaks, settings: Settings, seconds: float
) -> Iterator[Measurement]:
    """Checks and times every candidate of one case; `seconds` for the timing."""
    about = subject(operation.name)
    case = fitted(operation, case, about, peaks, settings)
    spec = specs_of(operation, case)[0]
    dtype = next(iter(case.arrays.values())).dtype
    arrays = case.make()
    sample = about.sample(case, arrays)
    right = numbers.truth(sample)
    able, refused = candidates(operation, case, about)

    def untimed(name: str, framework: str, implementation: str | None, default: bool) -> Measurement:
        work = (dtype, spec.flops, spec.bytes_moved)
        return Measurement(operation.name, case.name, name, framework, implementation, default, *work)

    calls, checked, memories = {}, {}, {}
    blank = {c.name: untimed(c.name, c.framework, c.implementation, c.default) for c in able}
    for candidate in able:
        try:
            call, outputs, memory = candidate.build(arrays)
        except _TooLarge as reason:
            yield dataclasses.replace(blank[candidate.name], note=str(reason))
            continue
        found = numbers.check(outputs(call()), sample, right)
        if found.right:
            calls[candidate.name] = call
            checked[candidate.name], memories[candidate.name] = found, memory
        else:
            yield dataclasses.replace(blank[candidate.name], numbers=found, memory=memory)
    timings = side_by_side(calls, seconds) if calls else {}
    roofline = peaks.seconds(dtype, spec.flops, spec.bytes_moved)
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
    on_case: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Iterator[Measurement]:
    """Every measurement of every case; `on_case(done, total, name)` is told before each."""
    cases = planned(operations, settings, long)
    left = settings.seconds
    for i, (operation, case) in enumerate(cases):
        on_case(i, len(cases), f"{operation.name}: {case.name}")
        start = time.perf_counter()
        yield from run_case(operation, case, peaks, settings, left / (len(cases) - i))
        left = max(0.0, left - min(time.perf_counter() - start, left / (len(cases) - i)))
    on_case(len(cases), len(cases), "done")
