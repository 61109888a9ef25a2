"""What the machine code of a Triton kernel says without a GPU: registers, spills, shared memory, tensor-core instructions, width of loads.

Kernels are compiled by the triton package itself (its LLVM, ptxas and cuobjdump), for Hopper (sm_90a) unless another target is named. The launches
are those that an operation makes: a case is traced with the Triton implementation, and every kernel that it would launch is recorded with its
constants, so nothing here is compiled that does not run, and nothing that runs is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai import ops
from vishwamai.core import gpu, triton_call
from vishwamai.core.cases import Case
from vishwamai.core.errors import DeviceError, FallbackWarning
from vishwamai.core.explain import record_plans
from vishwamai.core.triton_call import POINTERS

REGISTERS, SHARED, THREADS, BLOCKS = 65536, 233472, 2048, 32
"""Of a Hopper multiprocessor: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", 9.0. A block reserves 1 KiB of shared memory more than it asks for."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One launch of a kernel: how, and the types of its buffers."""

    launch: gpu.Launch
    types: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Code:
    """The machine code of one compiled kernel.

    Attributes:
      kernel: its name.
      warps, stages: as launched.
      registers: of a thread.
      spill: bytes of registers that are stored to memory and loaded again, stores and loads added.
      shared: bytes of shared memory of a program.
      programs: programs that fit a Hopper multiprocessor at once; 0 on other targets.
      wgmma, mma: instructions of Hopper's tensor cores by warp groups, and older ones by warps (on AMD, matrix instructions).
      tma: instructions of the copy engine.
      loads, copies: loads from global memory into registers, and asynchronous ones into shared memory (on AMD, loads of both kinds are loads).
      wide: those of them that move 16 bytes.
    """

    kernel: str
    warps: int
    stages: int
    registers: int
    spill: int
    shared: int
    programs: int
    wgmma: int
    mma: int
    tma: int
    copies: int
    loads: int
    wide: int


# --- Which launches ---------------------------------------------------------------------------------------------------------------------------------


def launches(case: Case, *, backward: bool = True) -> list[Recorded]:
    """Every launch that a case makes with its op's Triton implementation, in order; nothing is computed or compiled."""
    found: list[Recorded] = []
    before = gpu.launcher("jax")
    assert before is not None

    def record(how: gpu.Launch, inputs: dict[str, Any], outputs: dict[str, gpu.Result]) -> list[Any]:
        starts = {f"{name}_init": out for name, out in outputs.items() if out.initialized}
        types = tuple((name, POINTERS[x.dtype.name]) for name, x in {**inputs, **starts, **outputs}.items())
        found.append(Recorded(dataclasses.replace(how), types))
        return before(how, inputs, outputs)

    def run(arrays: dict[str, Any]) -> Any:
        chosen = {name: arrays[name] for name in case.differentiable} if backward else {}
        rest = {name: x for name, x in arrays.items() if name not in chosen}
        outputs, pull = jax.vjp(lambda chosen: case.run({**rest, **chosen}, implementation="triton"), chosen)
        floating = all(jnp.issubdtype(y.dtype, jnp.floating) for y in jax.tree.leaves(outputs))
        return outputs, pull(outputs) if chosen and floating else None

    gpu.register_launcher("jax", record)
    try:
        # Traced afresh: a trace that is cached records nothing.
        jax.clear_caches()
        jax.eval_shape(run, case.shapes())
    finally:
        gpu.register_launcher("jax", before)
    unique = {dataclasses.replace(r, launch=dataclasses.replace(r.launch, grid=())): r for r in found}
    return list(unique.values())


# --- Reading the code -------------------------------------------------------------------------------------------------------------------------------


def inspect_launch(recorded: Recorded, target: int | str = 90) -> Code:
    """Compiles one launch for `target` (compute capability, or AMD's name such as "gfx942") and reads its code.

    Raises:
      DeviceError: triton is not installed, or its compiler refuses the kernel.
    """
    how = dataclasses.replace(recorded.launch, grid=())
    kernel = triton_call.compiled(how.kernel, recorded.types, how, target)
    if "amdgcn" in kernel.asm:
        return _read_amd(kernel, how)
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = os.path.join(folder, "kernel.ptx"), os.path.join(folder, "kernel.cubin")
        with open(ptx, "w") as file:
            file.write(kernel.asm["ptx"])
        architecture = re.search(r"\.target\s+(\w+)", kernel.asm["ptx"])
        assert architecture is not None
        log = _tool("ptxas", "-v", f"--gpu-name={architecture[1]}", ptx, "-o", cubin)
        with open(cubin, "wb") as file:
            file.write(kernel.asm["cubin"])
        code = _tool("cuobjdump", "--dump-sass", cubin)
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None, log
    spill = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    opcodes = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    bases = [opcode.split(".")[0] for opcode in opcodes]

    def count(*names: str) -> int:
        return sum(base in names for base in bases)

    return Code(
        kernel=how.kernel.name,
        warps=how.warps,
        stages=how.stages,
        registers=int(registers[1]),
        spill=spill,
        shared=kernel.metadata.shared,
        programs=_resident(int(registers[1]), kernel.metadata.shared, how.warps),
        wgmma=count("HGMMA", "QGMMA", "IGMMA"),
        mma=count("HMMA", "IMMA", "QMMA"),
        tma=count("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP"),
        copies=count("LDGSTS"),
        loads=count("LDG"),
        wide=sum(base in ("LDG", "LDGSTS") and ".128" in opcode for base, opcode in zip(bases, opcodes, strict=True)),
    )


@functools.cache
def _path(name: str) -> str:
    triton = __import__("triton")
    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)


def _tool(name: str, *arguments: str) -> str:
    """What one of triton's own binaries prints.

    Raises:
      DeviceError: it fails.
    """
    done = subprocess.run([_path(name), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise DeviceError(f"{name} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout + done.stderr


def _resident(registers: int, shared: int, warps: int) -> int:
    """Programs on a Hopper multiprocessor at once; a warp's registers are allocated in blocks of 256."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32) // warps
    return min(by_registers, SHARED // (shared + 1024), THREADS // (32 * warps), BLOCKS)


def _read_amd(kernel: Any, how: gpu.Launch) -> Code:
    assembly = kernel.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    return Code(
        kernel=how.kernel.name,
        warps=how.warps,
        stages=how.stages,
        registers=field("vgpr_count"),
        spill=4 * (field("vgpr_spill_count") + field("sgpr_spill_count")),
        shared=kernel.metadata.shared,
        programs=0,
        wgmma=0,
        mma=len(re.findall(r"\bv_(?:s?mfma|wmma)", assembly)),
        tma=0,
        copies=0,
        loads=len(re.findall(r"\b(?:global_load|buffer_load)", assembly)),
        wide=len(re.findall(r"\b(?:global_load|buffer_load)_dwordx4", assembly)),
    )


# --- The table --------------------------------------------------------------------------------------------------------------------------------------

COLUMNS = ("registers", "spill", "shared", "programs", "wgmma", "mma", "tma")


def table(rows: Iterable[tuple[str, Code]]) -> str:
    """A Markdown table of named codes.

    >>> print(table([("8 rows", Code("forward", 4, 3, 40, 0, 64, 12, 0, 0, 0, 0, 4, 4))]))
    | launch | kernel | warps x stages | registers | spill | shared | programs | wgmma | mma | tma | 16-byte loads |
    |---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
    | 8 rows | forward | 4 x 3 | 40 | 0 | 64 | 12 | 0 | 0 | 0 | 4 of 4 |
    """
    heads = ["launch", "kernel", "warps x stages", *COLUMNS, "16-byte loads"]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'--:|' * (len(heads) - 2)}"]
    for name, code in rows:
        cells = [name, code.kernel, f"{code.warps} x {code.stages}"]
        cells += [f"{getattr(code, column):,}" for column in COLUMNS]
        lines.append(f"| {' | '.join([*cells, f'{code.wide} of {code.loads + code.copies}'])} |")
    return "\n".join(lines)


def model_cases() -> list[Case]:
    """The shapes of real models that an operation's Triton implementation serves, of every operation that has one."""
    found = []
    for package in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
        cases = f"{package.name}.cases"
        if importlib.util.find_spec(cases) is None:
            continue
        for case in importlib.import_module(cases).CASES:
            if "model" in case.tags and _is_served(case):
                found.append(case)
    return found


def _is_served(case: Case) -> bool:
    """Whether a case's op has a Triton implementation that takes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        plans = [plan for plan in record_plans(case.run, case.shapes()) if plan.op.name == case.op]
    return any(
        impl.name == "triton" and impl.why_not(plans[0].spec, None) is None for impl in plans[0].op.implementations
    )


def survey(cases: Iterable[Case], target: int | str = 90) -> list[tuple[str, Code]]:
    """The code of every launch of `cases`, named by its case; a launch that an earlier case made is not repeated."""
    seen: set[Recorded] = set()
    rows = []
    for case in cases:
        for recorded in launches(case):
            key = dataclasses.replace(recorded, launch=dataclasses.replace(recorded.launch, grid=()))
            if key not in seen:
                seen.add(key)
                rows.append((f"{case.op}: {case.name}", inspect_launch(recorded, target)))
    return rows
