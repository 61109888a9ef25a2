"""What the TPU compiler rejected, in words: which allocation, how many bytes against how many, what to change.

The compiler reports by text only. The patterns below were collected from libtpu 0.0.51 with jax 0.10.2 by provoking
each failure on every generation; a text that matches none is passed on as it is, under the name of the compiler's own
error code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from jax.sharding import NamedSharding

from vishwamai.core import jax_errors
from vishwamai.core.errors import DeviceError, KernelError, UnsupportedError, VishwamaiError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.numbers import human

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclasses.dataclass(frozen=True)
class CompilerProblem:
    """One thing that keeps a program from its chip.

    Attributes:
        kind: "vmem", "scoped vmem", "smem", "hbm", "mosaic", "pallas", "sharding" or "compiler".
        summary: sentence of the problem, with names and sizes.
        fix: advice, a sentence.
        kernel: name of the kernel, where the compiler gave one.
        used: bytes asked for; `limit`: bytes there are (both None where it is not about memory).
        allocations: the largest allocations, in words, largest first.
        where: file:line of the kernel source, where the compiler gave it.
    """

    kind: str
    summary: str
    fix: str
    kernel: str | None = None
    used: int | None = None
    limit: int | None = None
    allocations: tuple[str, ...] = ()
    where: str | None = None

    def __str__(self) -> str:
        lines = [self.summary, *(f"  - {a}" for a in self.allocations)]
        if self.where:
            lines.append(f"at {self.where}")
        return "\n".join([*lines, f"What to change: {self.fix}"])


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([\d.]+)([BKMGT]?)", text)
    assert match, text
    return int(float(match[1]) * _UNITS[match[2]])


def _where(message: str) -> str | None:
    """The first source position that the compiler gives: loc("..."("/path/file.py":41:26 ...))."""
    match = re.search(r'"([^"\s]+\.py)":(\d+):\d+', message)
    return f"{match[1]}:{match[2]}" if match else None


def _allocations(message: str) -> tuple[str, ...]:
    """The "Largest program allocations" list: size, tag and shape of each."""
    lines = []
    for part in re.split(r"\n\s*\d+\. Size: ", message)[1:]:
        size = part.split()[0]
        tag = re.search(r"Tag: ([^\n]*?)\.? ?(?:The u8 shape[^\n]*)?(?:\n|$)", part)
        buffers = re.search(r"This allocation has (\d+) buffering levels", part)
        name = re.search(r'op_name="([^"]*)"', part)
        shape = re.search(r"Shape: (\S+)", part)
        words = tag[1].strip() if tag else (shape[1] if shape else "unnamed")
        note = f" (buffered {buffers[1]} times)" if buffers else ""
        lines.append(f"{human(_bytes(size))}: {words}{note}" + (f", of {name[1]}" if name else ""))
    return tuple(lines[:5])


def _vmem_fix(chip: TpuChip) -> str:
    if chip.vmem_scoped_bytes >= chip.vmem_bytes:
        return "use smaller blocks (block shapes or block_size), fewer buffers, or scratch in a narrower dtype."
    return (
        "use smaller blocks, or let the kernel have more by pltpu.CompilerParams(vmem_limit_bytes=...): "
        f"{chip.name} has {human(chip.vmem_bytes)} per core, "
        f"of which a kernel gets {human(chip.vmem_scoped_bytes)} unless it asks."
    )


def _one_allocation(message: str, chip: TpuChip) -> CompilerProblem | None:
    pattern = r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\) :: (.*?) :: (\S+)"
    match = re.search(pattern, message, re.S)
    if not match:
        return None
    used, limit, inside, kernel = int(match[1]), int(match[2]), match[3], match[4]
    space = re.search(r"space=(\w+)", inside)
    tag = re.search(r"tag = '(.*?)(?: The u8 shape.*)?'", inside, re.S)
    shape = re.search(r"shape = '([^'{]*)", inside)
    kind = space[1] if space else "memory"
    if kind == "smem":
        fix = "prefetch less: split the grid over several calls, pack the integers, or leave the array in HBM and copy "
        fix += "the part that a step needs."
    else:
        fix = f"use a smaller block or scratch: {chip.name} has {human(chip.vmem_bytes)} of VMEM per core, "
        fix += "and no option raises that."
    return CompilerProblem(
        kind=kind,
        summary=f"kernel {kernel!r}: {tag[1].strip() if tag else 'one allocation'} "
        f"({shape[1] if shape else 'no shape'}) takes {human(used)}, "
        f"but {chip.name} has {human(limit)} of {kind.upper()} per core.",
        fix=fix,
        kernel=kernel,
        used=used,
        limit=limit,
    )


def _scoped(message: str, chip: TpuChip) -> CompilerProblem | None:
    match = re.search(r"Scoped allocation with size ([\d.]+[KMG]?) and limit ([\d.]+[KMG]?) exceeded", message)
    if not match:
        return None
    name = re.search(r"while allocating on stack for %?([\w.\-]+)", message)
    kernel = name[1] if name else None
    used, limit = _bytes(match[1]), _bytes(match[2])
    return CompilerProblem(
        kind="scoped vmem",
        summary=f"kernel {kernel!r} needs {human(used)} of VMEM for its blocks and scratch, "
        f"but may take {human(limit)} on {chip.name}.",
        fix=_vmem_fix(chip),
        kernel=kernel,
        used=used,
        limit=limit,
        allocations=_allocations(message),
    )


def _program_memory(message: str, chip: TpuChip) -> CompilerProblem | None:
    match = re.search(r"Ran out of memory in memory space (\w+)[^\n]*?Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?)", message)
    if not match:
        return None
    kind, used, limit = match[1], _bytes(match[2]), _bytes(match[3])
    label = re.search(r"XLA label: %?([\w.\-]+) =", message)
    if kind == "hbm":
        return _hbm(used, limit, chip, _allocations(message))
    return CompilerProblem(
        kind=kind,
        summary=f"the program needs {human(used)} of {kind.upper()} at once, but {chip.name} has {human(limit)} per "
        "core.",
        fix="use smaller blocks or fewer buffers."
        if kind == "vmem"
        else "keep fewer scalars: prefetch less, or leave arrays in HBM.",
        kernel=label[1] if label else None,
        used=used,
        limit=limit,
        allocations=_allocations(message),
    )


def _hbm(used: int, limit: int, chip: TpuChip, allocations: tuple[str, ...] = ()) -> CompilerProblem:
    return CompilerProblem(
        kind="hbm",
        summary=f"the program needs {human(used)} of HBM, but one {chip.name} device has {human(limit)}.",
        fix="make the batch or the sequence smaller, recompute instead of keeping (jax.checkpoint), "
        "donate arguments that are overwritten, use a narrower dtype, or shard over more chips "
        f'(target="{chip.name}:{"4x4" if len(chip.topology.split("x")) == 2 else "2x2x2"}" with shardings).',
        used=used,
        limit=limit,
        allocations=allocations,
    )


def _hbm_temporaries(message: str, chip: TpuChip) -> CompilerProblem | None:
    size = r"\(([\d.]+[KMGT]?)\)"
    match = re.search(rf"total memory required for (.*?) {size} exceeds available HBM {size}", message)
    return _hbm(_bytes(match[2]), _bytes(match[3]), chip) if match else None


def _mosaic(message: str, chip: TpuChip) -> CompilerProblem | None:
    match = re.search(
        r"Mosaic failed to compile TPU kernel with MLIR module name `(.*?)` HLO name `(.*?)`: (.*?)(?:\n|$)",
        message,
        re.S,
    )
    if not match:
        return None
    kernel, reason = match[2], re.sub(r"^E\d+: (?:CompileTime\w+: )?", "", match[3].strip())
    operation = re.search(r"The MLIR operation involved:\s*\n\s*(.*?)\n", message + "\n")
    if "Unsupported matmul" in reason or "UnsupportedRhsType" in reason or "UnsupportedLhsType" in reason:
        fix = f"{chip.name} multiplies bfloat16 and float32"
        fix += " and int8" if chip.has_int8 else ""
        fix += f" and {', '.join(chip.fp8_formats)}" if chip.fp8_formats else ""
        fix += "; convert the operands to one of these inside the kernel."
    elif "float16" in message or re.search(r"x2?xf16\b|xf16[,>]", message):
        fix = "TPUs have no float16: store bfloat16 or float32."
    elif "shape cast" in reason or "reshape" in reason:
        fix = (
            "reshape outside the kernel, or keep the last axis (128 lanes) as it is and reshape only the leading axes."
        )
    else:
        fix = "write the operation in another form; its operands as the compiler sees them are named above."
    return CompilerProblem(
        kind="mosaic",
        summary=f"kernel {kernel!r} does not compile for {chip.name}: {reason}"
        + (f"\n  operation: {operation[1].strip()[:200]}" if operation else ""),
        fix=fix,
        kernel=kernel,
        where=_where(message),
    )


def _primitive(message: str, chip: TpuChip) -> CompilerProblem | None:
    primitive = jax_errors.missing_primitive(message)
    if primitive is None:
        return None
    return CompilerProblem(
        kind="pallas",
        summary=f"Pallas has no `{primitive}` inside a TPU kernel.",
        fix=f"move `{primitive}` out of the kernel, or build it from operations that the vector unit has.",
    )


def _partition(message: str, chip: TpuChip) -> CompilerProblem | None:
    if not jax_errors.cannot_partition_kernel(message):
        return None
    return CompilerProblem(
        kind="sharding",
        summary=(
            "a Pallas kernel was given sharded operands; the compiler does not know how to split a kernel over devices."
        ),
        fix=_explicit("names", "(spec, ...)"),
    )


def _explicit(names: str, specs: str) -> str:
    """How kernels get their parts on a mesh of these axes, for operands of these specs."""
    return (
        "make the mesh axes explicit, there vishwamai's own operations wrap themselves: "
        f"Mesh(devices, {names}, axis_types=(jax.sharding.AxisType.Explicit,) * len({names})); "
        "or name the operands' specs for the call alone, "
        f"jax.sharding.explicit_axes(function, in_sharding={specs})(*operands) under jax.set_mesh(mesh); "
        "or wrap the call in jax.shard_map with the specs of its operands."
    )


def _with_specs(problem: CompilerProblem, shardings: Sequence[NamedSharding]) -> CompilerProblem:
    """The problem of a kernel that cannot be split, with the mesh axes and the specs of the program's arguments."""
    if problem.kind != "sharding" or not shardings:
        return problem
    specs = [f"jax.sharding.PartitionSpec({', '.join(map(repr, sharding.spec))})" for sharding in shardings]
    text = _explicit(repr(shardings[0].mesh.axis_names), f"({', '.join(specs)}{',' * (len(specs) == 1)})")
    return dataclasses.replace(problem, fix=f"{text} The specs are those of the program's arguments.")


def _block_shape(message: str, chip: TpuChip) -> CompilerProblem | None:
    if not jax_errors.illegal_block_shape(message):
        return None
    mismatch = jax_errors.block_shape(message)
    return CompilerProblem(
        kind="pallas",
        summary=f"kernel {mismatch.kernel!r}: a block of {mismatch.block} over an array of {mismatch.array} cannot be "
        "tiled."
        if mismatch
        else message.splitlines()[0],
        fix="make the last block axis a multiple of 128 and the one before it a multiple of 8, "
        "or equal to the array's own size.",
        kernel=mismatch.kernel if mismatch else None,
        where=mismatch.where if mismatch else None,
    )


def _unrecognised(message: str, chip: TpuChip) -> CompilerProblem | None:
    first = message.strip().splitlines()[0]
    return CompilerProblem(
        kind="compiler",
        summary=f"the compiler for {chip.name} rejected the program: {first[:500]}",
        fix="the text is the compiler's own; https://openxla.org/xla/errors explains its codes (E....).",
        where=_where(message),
    )


_READERS: tuple[Callable[[str, TpuChip], CompilerProblem | None], ...] = (
    _one_allocation,
    _scoped,
    _program_memory,
    _hbm_temporaries,
    _mosaic,
    _primitive,
    _partition,
    _block_shape,
    _unrecognised,
)


def diagnose(message: str, chip: TpuChip) -> CompilerProblem:
    """Reads the text of a compiler error.

    Example:
        >>> from vishwamai.core.hardware import TPUS
        >>> text = "Scoped allocation with size 20.00M and limit 16.00M exceeded scoped vmem limit by 4.00M."
        >>> problem = diagnose(text, TPUS["v5e"])
        >>> problem.kind, problem.used >> 20, problem.limit >> 20
        ('scoped vmem', 20, 16)
    """
    return next(problem for reader in _READERS if (problem := reader(message, chip)))


def from_compiler(error: BaseException) -> bool:
    """Whether an exception speaks for the TPU compiler (XLA, Mosaic, Pallas' lowering), not for the traced function."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"JaxRuntimeError", "XlaRuntimeError", "MosaicError"}:
        return True
    return jax_errors.from_pallas_lowering(error)


def as_error(problem: CompilerProblem | None, text: str) -> VishwamaiError:
    """The error for a problem: DeviceError for memory, UnsupportedError for a missing operation, else KernelError."""
    kind = problem.kind if problem else ""
    if kind in ("vmem", "scoped vmem", "smem", "hbm", "memory"):
        result: VishwamaiError = DeviceError(text)
    elif kind in ("mosaic", "pallas", "sharding"):
        result = UnsupportedError(text)
    else:
        result = KernelError(text)
    result.problem = problem  # type: ignore[attr-defined]
    return result


def translate(error: Exception, chip: TpuChip, shardings: Sequence[NamedSharding] = ()) -> VishwamaiError:
    """The vishwamai error that says what `error` means; `problem_of` of it gives the `CompilerProblem`. `shardings`: of
    the program's arguments, as far as they are known.
    """
    problem = _with_specs(diagnose(str(error), chip), shardings)
    return as_error(problem, str(problem))


def problem_of(error: BaseException) -> CompilerProblem:
    """The `CompilerProblem` that a translated error carries.

    Raises:
        KeyError: the error does not come from `translate`.
    """
    problem = find_problem(error)
    if problem is None:
        raise KeyError(f"{error!r} does not come from the compiler")
    return problem


def find_problem(error: BaseException) -> CompilerProblem | None:
    """The `CompilerProblem` that an error carries, None for errors that do not come from `translate`."""
    return getattr(error, "problem", None)
