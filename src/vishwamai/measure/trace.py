"""Traces of a program that runs: written by `jax.profiler`, read back, and its time by operation.

The profiler names an event after its instruction in the compiled program. The program's text says which kernel or
scope an instruction comes from, so the times are added up by these names. What a loop or a branch holds has events of
its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from vishwamai.core.errors import DeviceError, KernelError
from vishwamai.core.types import PyTree
from vishwamai.measure.live import Origin, origins


@dataclasses.dataclass(frozen=True)
class OperationTime:
    """The time of the instructions of one name, per step and device.

    Attributes:
      name: scopes and kernel or operation, such as "block/vishwamai_matmul".
      calls: how often they run in a step.
      seconds: total time of the operations.
      share: fraction of the time of all operations.
    """

    name: str
    calls: float
    seconds: float
    share: float


def why_no_trace() -> str | None:
    """Why this process cannot take a trace; None where it can.

    A libtpu that was loaded to compile for other machines takes part in every trace. If its profiler is of another
    version than that of jaxlib, the process ends with a segmentation fault (jaxlib 0.10.2, libtpu 0.0.51).
    """
    maps = Path("/proc/self/maps")
    if jax.default_backend() == "tpu" or not maps.exists() or "libtpu.so" not in maps.read_text():
        return None
    return (
        "libtpu is loaded in this process, and a trace with it can end the process; take the trace in one that has "
        "compiled nothing for a TPU before"
    )


def record_trace(run: Callable[[], object], steps: int, directory: Path) -> Path:
    """Traces `steps` calls of `run`, which returns when its work is done.

    Returns:
      The file in `directory` that xprof and `jax.profiler.ProfileData` read.

    Raises:
      DeviceError: this process cannot take a trace, see `why_no_trace`.
      KernelError: another trace is being taken.
    """
    reason = why_no_trace()
    if reason is not None:
        raise DeviceError(f"a trace cannot be taken: {reason}.")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would fill the trace
    try:
        jax.profiler.start_trace(directory, profiler_options=options)
    except RuntimeError as error:
        raise KernelError(
            f"a trace cannot be taken: {error} End the other trace with jax.profiler.stop_trace()."
        ) from error
    try:
        for number in range(steps):
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                run()
    finally:
        jax.profiler.stop_trace()
    return max(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)


def operation_times(trace: object, text: str, steps: int) -> tuple[OperationTime, ...]:
    """The time by operation of a traced program, longest first.

    Args:
      trace: a `jax.profiler.ProfileData`, of `steps` calls of the program.
      text: HLO of the compiled program, `jax.stages.Compiled.as_text`.
      steps: how often it ran.
    """
    origin_of = origins(text)
    module = re.match(r"HloModule ([\w.\-]+)", text)
    calls: dict[str, float] = {}
    seconds: dict[str, float] = {}
    devices = set()
    for device, instruction, duration in _events(trace, module[1] if module else ""):
        origin = origin_of.get(instruction)
        if origin is not None and origin.contains:
            continue
        devices.add(device)
        name = scope_of(instruction, origin)
        calls[name] = calls.get(name, 0) + 1
        seconds[name] = seconds.get(name, 0) + duration
    total, runs = sum(seconds.values()) or 1.0, steps * max(1, len(devices))
    rows = [OperationTime(n, calls[n] / runs, elapsed / runs, elapsed / total) for n, elapsed in seconds.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _events(trace: Any, module: str) -> Iterator[tuple[str, str, float]]:
    """(device, instruction, seconds) of the program's operations.

    A TPU has a line of operations, named by their text. Other devices' events say their program and instruction.
    """
    for plane in trace.planes:
        tpu = plane.name.startswith("/device:TPU")
        for line in plane.lines:
            if tpu and line.name != "XLA Ops":
                continue
            for event in line.events:
                if tpu:
                    yield plane.name, event.name.partition(" = ")[0].lstrip("%"), event.duration_ns * 1e-9
                    continue
                stats: dict[str, PyTree] = {key: value for key, value in event.stats if key is not None}
                if stats.get("hlo_module") == module and "hlo_op" in stats:
                    yield f"{plane.name} {stats.get('device_ordinal')}", str(stats["hlo_op"]), event.duration_ns * 1e-9


_PLUMBING = re.compile(r"cond|branch_\d+_fun|while|body|closed_call|ffi_call|pallas_call|custom_[jv]+p_call|checkpoint")
"""Parts of an instruction's origin that name no scope of the caller."""


def scope_of(instruction: str, origin: Origin | None) -> str:
    """The name of an instruction in a table: its scopes, then its kernel or operation.

    >>> scope_of("ffi_call.4", Origin("jit(f)/block/cond/branch_0_fun/ffi_call", "vishwamai_matmul", False))
    'block/vishwamai_matmul'
    >>> scope_of("fusion.7", Origin("jit(f)/block/jit(silu)/mul", "", False)), scope_of("copy.2", None)
    ('block/silu/mul', 'copy')
    >>> scope_of("dot.1", Origin("jit(f)/transpose(jvp(block))/dot_general", "", False))
    'backward/block/dot_general'
    """
    plain = re.sub(r"(\.\d+)+$", "", instruction)
    if origin is None:
        return plain
    source = origin.source.partition("/")[2]
    source = re.sub(r"transpose\(jvp\(([^()]*)\)\)", r"backward/\1", source)
    source = re.sub(r"\b(?:jit|jvp)\(([^()]*)\)", r"\1", source)
    parts = [part for part in source.split("/") if part and not _PLUMBING.fullmatch(part)]
    if origin.kernel:
        parts.append(origin.kernel if origin.kernel.startswith("vishwamai") else plain)
    return "/".join(parts) or plain
