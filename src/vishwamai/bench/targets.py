"""The cases on TPUs that are not here: do they compile, how much memory do they take, and how long does the compiler think they run."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax

from vishwamai.aot import compile_for
from vishwamai.bench.catalogue import Operation
from vishwamai.core.cases import Case
from vishwamai.core.errors import FallbackWarning, VishwamaiError
from vishwamai.core.explain import explain
from vishwamai.core.hardware import chip


@dataclasses.dataclass(frozen=True)
class TargetRow:
    """One case on one chip.

    Attributes:
      implementation: which one runs there.
      compiles: whether the compiler made a program; `problem` says why not.
      vmem: scoped VMEM of the largest kernel, bytes per core; None without a kernel.
      hbm: arguments, outputs, temporaries and code, bytes of one device.
      fits: whether that is within what the device has.
      seconds: the compiler's own estimate of a kernel's run time; None where it gives none, and for programs of XLA's own operations, whose loops
        it counts as one pass.
      roofline: seconds that the chip's data-sheet peaks allow at the best.
      compile_seconds: what the compilation took here.
    """

    op: str
    case: str
    target: str
    implementation: str
    compiles: bool
    vmem: int | None
    hbm: int | None
    fits: bool
    seconds: float | None
    roofline: float
    compile_seconds: float
    problem: str = ""


def compile_case(operation: Operation, case: Case, target: str) -> TargetRow:
    """Compiles one case, in its full size, for one chip."""
    shapes = case.shapes()

    def call(arrays: dict[str, jax.Array]) -> object:
        return case.run(arrays)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        explained = next(c for c in explain(call, shapes, target=target).calls if c.op == operation.name)
        start = time.perf_counter()
        try:
            program, problem = compile_for(call, shapes, target=target), ""
        except VishwamaiError as error:
            program, problem = None, str(error)
    seconds = time.perf_counter() - start

    found, spec = chip(target), explained.spec
    dtype = next(iter(case.arrays.values())).dtype
    roofline = max(spec.flops / found.peak_per_device(dtype), spec.bytes_moved / found.hbm_bandwidth_per_device)
    if program is None:
        return TargetRow(
            operation.name,
            case.name,
            target,
            explained.runs,
            False,
            None,
            None,
            False,
            None,
            roofline,
            seconds,
            problem,
        )
    kernels = [k.vmem for k in program.kernels if k.pallas]
    return TargetRow(
        op=operation.name,
        case=case.name,
        target=target,
        implementation=explained.runs,
        compiles=True,
        vmem=max(kernels, default=None),
        hbm=program.memory.total,
        fits=program.memory.fits,
        seconds=program.cost.seconds if kernels and (program.cost.seconds or 0) > 0 else None,
        roofline=roofline,
        compile_seconds=seconds,
    )


def run(
    cases: Sequence[tuple[Operation, Case]],
    targets: Sequence[str],
    on_case: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Iterator[TargetRow]:
    """A row for every case on every target."""
    total = len(cases) * len(targets)
    for i, (operation, case) in enumerate(cases):
        for j, target in enumerate(targets):
            on_case(i * len(targets) + j, total, f"{target}: {operation.name}: {case.name}")
            yield compile_case(operation, case, target)
    on_case(total, total, "done")
