"""How a program would run on a TPU you do not have: cycles, units, waiting, what bounds it. An estimate, from the
compiler's own schedule.

`inspect` compiles the function for the target, follows the final bundles of every program of the executable (see
`interpret`), and sets the time against the roofline. How far it can be trusted is measured in docs/aot.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence

from vishwamai.aot.compile.options.config import RuntimeConfig, compiler_options_of
from vishwamai.aot.compile.traced import Program, trace_call
from vishwamai.aot.schedule import report, text
from vishwamai.aot.schedule.advice import advise
from vishwamai.aot.schedule.dump import Dump, dump, dump_many
from vishwamai.aot.schedule.estimate import ScheduleEstimate
from vishwamai.aot.schedule.roofline import roofline
from vishwamai.aot.schedule.simulate import simulate
from vishwamai.aot.schedule.times import TOP
from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError, UnsupportedError, VishwamaiError
from vishwamai.core.target import Target, devices_of
from vishwamai.core.types import PyTree

__all__ = ["Inspection", "KernelSchedule", "inspect", "inspect_many"]


class KernelSchedule(ScheduleEstimate):
    """The estimated run of one program on one jax device; printing it gives the table."""

    def advice(self) -> tuple[str, ...]:
        """What bounds the program and what to try, most important first."""
        return advise(self)

    def table(self) -> str:
        """The schedule as plain text."""
        return text.table(self)

    def __str__(self) -> str:
        return self.table()

    def as_dict(self) -> dict[str, object]:
        """Everything as plain values, for JSON."""
        return text.as_dict(self)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained HTML page: the timeline of units per block, the roofline, what bounds it and what to
        try.

        Raises:
            UnsupportedError: Jinja2 is not installed.
        """
        report.write(self, path)


@checked
@dataclasses.dataclass(frozen=True)
class Inspection:
    """One program to inspect: `inspect`'s arguments.

    Example:
        >>> import jax
        >>> Inspection(jax.numpy.sin, (jax.ShapeDtypeStruct((8, 128), "float32"),), target="v5e").target
        'v5e'
    """

    fn: Callable[..., PyTree]
    args: Sequence[object] = ()
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    target: str = "v5e"
    flops: float | None = None
    nbytes: float | None = None
    dtype: str | None = None
    name: str | None = None
    compiler_options: Mapping[str, object] | RuntimeConfig | None = None


def _custom_calls(dump: Dump) -> frozenset[str]:
    """Names of the kernels by the top-level program's own remarks, for executables whose text cannot be read."""
    top = dump.sources.get(TOP)
    return frozenset(re.findall(r"/\* %([\w.\-]+) = custom-call\(", top.bundles)) if top else frozenset()


def check_one_device(caller: str, target: str) -> None:
    """Raises UnsupportedError, which names `caller`, where a target has several devices."""
    if devices_of(target) > 1:
        raise UnsupportedError(
            f"{caller}: target {target!r} is a slice, and schedules count no communication; pass a chip and the part "
            "of one device, or take vishwamai.planning.step_time, which adds the collectives."
        )


def prepare(
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    target: str,
    options: Mapping[str, str] | None = None,
) -> Program:
    """Traces `fn(*args, **kwargs)` for one device, to be compiled with `options`.

    Raises:
        UnsupportedError: the target is a slice of several devices; or as `trace_call`.
    """
    check_one_device("inspect", Target.parse_tpu(target).name or target)
    return trace_call(fn, args, kwargs, target).with_options(options or {})


def schedule_of(case: Inspection, program: Program, dump: Dump) -> KernelSchedule:
    simulation = simulate(dump.sources, dump.chip, program.scalars, dump.twins)
    issued = sum(simulation.flops.values())
    xla_flops = dump.cost.get("flops") or 0.0
    if case.flops is not None:
        flops, source = case.flops, "given"
    elif xla_flops >= 0.25 * issued and not simulation.looped:
        # Less, and a kernel without a cost estimate hides from the compiler's count, which takes a loop's body once.
        flops, source = xla_flops, "counted by the compiler"
    else:
        flops, source = issued, "as issued to the matrix units, padding included"
    # float32 products are several bfloat16 passes: as issued they run at that rate, as useful work at a sixth of it.
    kinds = simulation.flops or {"bf16": 1.0}
    dtype = case.dtype or max(kinds, key=lambda kind: kinds[kind]).replace("f32", "bf16")
    nbytes = float(program.io_bytes) if case.nbytes is None else case.nbytes
    return KernelSchedule(
        name=case.name or getattr(case.fn, "__name__", "program"),
        target=case.target,
        simulation=simulation,
        roofline=roofline(dump.chip, flops, nbytes, dtype),
        flops_source=source,
        vmem={kernel["name"]: kernel["vmem"] for kernel in dump.kernels},
        pallas=frozenset(kernel["name"] for kernel in dump.kernels if kernel["pallas"]) or _custom_calls(dump),
        warning=dump.warning,
    )


@checked
def inspect(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    target: str = "v5e",
    *,
    kwargs: Mapping[str, object] | None = None,
    flops: float | None = None,
    nbytes: float | None = None,
    dtype: str | None = None,
    name: str | None = None,
    compiler_options: Mapping[str, object] | RuntimeConfig | None = None,
) -> KernelSchedule:
    """Estimates how `fn(*args, **kwargs)` runs on a TPU that need not be here, from the schedule that its compiler
    makes.

    Args:
        fn: a function, jitted or not.
        args: its arguments: arrays or `jax.ShapeDtypeStruct`s. Values of integer arrays that steer kernels (page
            tables, group sizes) are used; of a ShapeDtypeStruct they are unknown, and loops that hang on them are
            reported in `KernelSchedule.guessed`.
        target: "v4", "v5e", "v5p", "v6e" or "tpu7x". A slice of several devices is for `vishwamai.planning.step_time`,
            which counts communication, too.
        kwargs: keyword arguments.
        flops: useful FLOP of the call; default: the compiler's count, or what the matrix units are given.
        nbytes: useful bytes to and from HBM; default: all arguments and results once.
        dtype: whose peak the roofline takes, "bf16", "int8", "fp8", "float32"; default: that of the products.
        name: the table's name of it; default: the function's.
        compiler_options: options of `compile_for`.

    Raises:
        UnsupportedError: the target is a slice; or as `compile_for`.
        DeviceError, KernelError, ConfigError: as `compile_for`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        >>> schedule = inspect(lambda a, b: a @ b, (x, x), "v5e")  # doctest: +SKIP
        >>> print(schedule.table())  # doctest: +SKIP
    """
    options = compiler_options_of("inspect", compiler_options)
    case = Inspection(fn, args, kwargs or {}, target, flops, nbytes, dtype, name)
    program = prepare(fn, args, case.kwargs, target, options)
    return schedule_of(case, program, dump(program))


_WEEK = 7 * 24 * 3600.0


@checked
def inspect_many(
    cases: Sequence[Inspection], timeout: float = 900.0, workers: int = 1
) -> list[KernelSchedule | VishwamaiError]:
    """`inspect` for several cases of one or more targets, with up to `workers` compiler processes for all that are not
    in the cache.

    A case that the compiler rejects gives its error in place of a schedule. `timeout`: seconds for each process.

    Raises:
        ShapeError: there are no cases.

    Example:
        >>> import jax
        >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
        >>> cases = [Inspection(jax.numpy.matmul, (x, x), target=chip) for chip in ("v5e", "v6e")]  # doctest: +SKIP
        >>> [schedule.target for schedule in inspect_many(cases, workers=1)]  # doctest: +SKIP
        ['v5e', 'v6e']
    """
    if workers < 1 or not 0 < timeout <= _WEEK:
        raise ShapeError(
            f"inspect_many: `timeout` is {timeout} and `workers` {workers}; pass seconds up to a week, and 1 or more."
        )
    if not cases:
        raise ShapeError("inspect_many: `cases` is empty; pass at least one Inspection.")
    programs = [_prepared(case) for case in cases]
    dumps = dump_many([program for program in programs if isinstance(program, Program)], timeout, workers)
    results: list[KernelSchedule | VishwamaiError] = []
    for case, program in zip(cases, programs):
        if isinstance(program, Program):
            dump = next(dumps)
            results.append(dump if isinstance(dump, VishwamaiError) else schedule_of(case, program, dump))
        else:
            results.append(program)
    return results


def _prepared(case: Inspection) -> Program | VishwamaiError:
    try:
        options = compiler_options_of("inspect_many", case.compiler_options)
        return prepare(case.fn, case.args, case.kwargs, case.target, options)
    except VishwamaiError as error:
        return error


def to_json(schedule: KernelSchedule) -> str:
    """`KernelSchedule.as_dict` as text."""
    return json.dumps(schedule.as_dict(), indent=1)
