"""What the machine code of a Triton kernel says without a GPU: registers, spills, shared memory, tensor-core
instructions, width of loads.

Kernels are compiled by the triton package itself (its LLVM, ptxas and cuobjdump), for Hopper (sm_90a) unless another
target is named. The launches are those that an operation makes: a case is traced with the Triton implementation, and
every kernel that it would launch is recorded with its constants, so nothing here is compiled that does not run, and
nothing that runs is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.cases import Case
from vishwamai.core.errors import DeviceError
from vishwamai.core.hardware import GPUS
from vishwamai.core.triton_launch import POINTERS, compiled
from vishwamai.core.types import PyTree

_HOPPER = GPUS["h100"]


@dataclasses.dataclass(frozen=True)
class RecordedLaunch:
    """One launch of a kernel: how, and the types of its buffers."""

    launch: gpu.Launch
    types: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Code:
    """The machine code of one compiled kernel.

    Attributes:
      kernel: its name.
      warps, stages: counts at the launch.
      registers: count a thread.
      spill: bytes of registers that are stored to memory and loaded again, stores and loads added.
      shared: bytes of shared memory of a program.
      programs: programs that fit a Hopper multiprocessor at once; 0 on other targets.
      wgmma, mma: instructions of Hopper's tensor cores by warp groups, and older ones by warps (on AMD, matrix
        instructions).
      tma: instructions of the copy engine.
      loads, copies: loads from global memory into registers, and asynchronous ones into shared memory (on AMD, loads of
        both kinds are loads).
      wide: count of accesses that move 16 bytes.
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


def launches(case: Case, *, backward: bool = True) -> list[RecordedLaunch]:
    """Every launch that a case makes with its op's Triton implementation, in order; nothing is computed or compiled."""
    recorded: list[RecordedLaunch] = []
    before = gpu.launcher("jax")
    assert before is not None

    def record(how: gpu.Launch, inputs: dict[str, jax.Array], outputs: dict[str, gpu.Result]) -> list[jax.Array]:
        starts = {f"{name}_init": out for name, out in outputs.items() if out.initialized}
        types = tuple((name, POINTERS[x.dtype.name]) for name, x in {**inputs, **starts, **outputs}.items())
        recorded.append(RecordedLaunch(dataclasses.replace(how), types))
        return before(how, inputs, outputs)

    def run(arrays: dict[str, jax.Array]) -> tuple[PyTree, PyTree]:
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
    unique = {dataclasses.replace(r, launch=dataclasses.replace(r.launch, grid=())): r for r in recorded}
    return list(unique.values())


def inspect_launch(recorded: RecordedLaunch, target: int | str = 90) -> Code:
    """Compiles one launch for `target` (compute capability, or AMD's name such as "gfx942") and reads its code.

    Raises:
      DeviceError: triton is not installed, or its compiler rejects the kernel.
    """
    how = dataclasses.replace(recorded.launch, grid=())
    kernel = compiled(how.kernel, recorded.types, how, target)
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
    """Programs on a Hopper multiprocessor at once.

    A warp's registers are allocated in blocks of 256; a block reserves 1 KiB of shared memory more than it asks for.
    """
    sm = _HOPPER
    assert sm.registers_per_sm and sm.shared_per_sm and sm.threads_per_sm and sm.blocks_per_sm
    by_registers = sm.registers_per_sm // (-(-registers // 8) * 8 * 32) // warps
    return min(by_registers, sm.shared_per_sm // (shared + 1024), sm.threads_per_sm // (32 * warps), sm.blocks_per_sm)


def _read_amd(kernel: Any, how: gpu.Launch) -> Code:
    assembly = kernel.asm["amdgcn"]

    def field(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(match[1]) if match else 0

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
