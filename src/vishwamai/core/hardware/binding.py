"""Processors and memory nodes of a process: the options `--threads` and `--numa` of commands.

A binding holds for the threads that exist and for those that start later, so it comes before jax. Linux inherits both
settings: the affinity (sched_setaffinity) and the memory policy (set_mempolicy, as numactl sets it).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from vishwamai.core.environment import THREADS
from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.core.hardware.nodes import memory_nodes, processors_of, ranges, usable_processors

INTERLEAVE = "interleave"
CORES = "/sys/devices/system/cpu"
_SYSCALLS = {"x86_64": 238, "aarch64": 237, "riscv64": 237}
"""Numbers of set_mempolicy (asm/unistd.h)."""
_PREFERRED, _INTERLEAVED = 1, 3
"""MPOL_PREFERRED and MPOL_INTERLEAVE of linux/mempolicy.h."""
_MASK_WORDS = 16
"""Words of a mask of nodes, 1024 bits: the most that Linux is built for."""


@dataclasses.dataclass(frozen=True)
class Binding:
    """Where a process runs and takes memory.

    Attributes:
      processors: numbers of the processors.
      threads: threads of kernels, XLA and OpenMP; None for as many as there are processors.
      nodes: memory nodes of the policy; empty for the system's own, which is the node of the thread that writes first.
      interleave: flag, pages come from the nodes in turn. Otherwise they come from the only node while it has room.
    """

    processors: tuple[int, ...]
    threads: int | None = None
    nodes: tuple[int, ...] = ()
    interleave: bool = False

    def __str__(self) -> str:
        text = f"bound to processors {ranges(self.processors)}"
        if self.threads is not None:
            text += f", {self.threads} threads"
        if self.nodes:
            first = "in turn from nodes" if self.interleave else "first from node"
            text += f", memory {first} {ranges(self.nodes)}"
        return text


def is_numa(text: str) -> bool:
    """Whether `--numa` can be read: "interleave", or node numbers.

    >>> [is_numa(text) for text in ("interleave", "0", "0-1,3", "all", "-1")]
    [True, True, True, False, False]
    """
    part = r"\d{1,4}(-\d{1,4})?"
    return text == INTERLEAVE or re.fullmatch(rf"{part}(,{part})*", text) is not None


def choose(threads: int | None, numa: str | None, cores: str = CORES) -> Binding:
    """The binding of the options; nothing is changed.

    The processors are those that this process may use: one of each core before a second one, from the nodes in turn.

    Args:
      threads: number of processors; None for all.
      numa: "interleave", or node numbers such as "0" or "0-1"; None for all nodes and the system's policy.
      cores: directory of the form of `/sys/devices/system/cpu`, for tests.

    Raises:
      ConfigError: more processors than there are, or nodes without one that this process may use.
    """
    nodes = memory_nodes()
    usable = usable_processors(nodes)
    present = [number for number, processors in enumerate(usable) if processors]
    places = present if numa in (None, INTERLEAVE) else sorted(set(processors_of(numa)))
    if not places or not set(places) <= set(present):
        raise ConfigError(
            f"--numa is {numa}, but the memory nodes with processors for this process are {ranges(tuple(present))}; "
            f"pass some of them, or {INTERLEAVE}."
        )
    order = list(_turns(_cores_first(usable[place], cores) for place in places))
    if threads is not None and threads > len(order):
        where = "" if len(places) == len(present) else f" of node {ranges(tuple(places))}"
        raise ConfigError(
            f"--threads is {threads}, but this process may use {len(order)} processors{where}; pass at most "
            f"{len(order)}."
        )
    processors = tuple(sorted(order[:threads]))
    if numa == INTERLEAVE:
        return Binding(processors, threads, tuple(node.number for node in nodes if node.memory != 0), True)
    return Binding(processors, threads, tuple(places) if numa is not None and len(places) == 1 else ())


def _cores_first(processors: Iterable[int], cores: str) -> list[int]:
    """The processors, one of each core before the second ones, which share their core's units."""
    ranks: dict[int, int] = {}
    seen: dict[str, int] = {}
    for processor in processors:
        core = siblings(processor, cores)
        ranks[processor] = seen[core] = seen.get(core, -1) + 1
    return sorted(ranks, key=lambda processor: (ranks[processor], processor))


def siblings(processor: int, cores: str = CORES) -> str:
    """The processors of a processor's core, as Linux lists them; the processor alone where it does not."""
    try:
        return (Path(cores) / f"cpu{processor}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)


def _turns(groups: Iterable[Iterable[int]]) -> Iterable[int]:
    """An element of each group in turn, while they last."""
    for row in itertools.zip_longest(*groups):
        yield from (number for number in row if number is not None)


def apply(binding: Binding) -> str | None:
    """Binds this process, its threads and those that it starts.

    Returns:
      What could not be set although the binding holds without it; None where all is set.

    Raises:
      DeviceError: the system has no such binding, or denies it.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise DeviceError("--threads and --numa bind processors, which needs Linux; set VISHWAMAI_CPU_THREADS instead.")
    if binding.threads is not None:
        os.environ.update(dict.fromkeys(THREADS, str(binding.threads)))
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(int(thread), binding.processors)
    except OSError as error:
        raise DeviceError(
            f"--threads and --numa: processors {ranges(binding.processors)} cannot be bound: {error.strerror}."
        ) from error
    if not binding.nodes:
        return None
    reason = _set_policy(_INTERLEAVED if binding.interleave else _PREFERRED, binding.nodes)
    if reason is None:
        return None
    fix = "in a container, add the capability SYS_NICE or choose its memory nodes (--cpuset-mems)"
    if binding.interleave:
        raise DeviceError(f"--numa {INTERLEAVE}: the memory policy cannot be set: {reason}; {fix}.")
    return f"the memory policy cannot be set: {reason}; memory comes from the node of the thread that writes it first"


def _set_policy(mode: int, nodes: tuple[int, ...]) -> str | None:
    """Sets the memory policy of this thread and of those that it starts; the reason where that fails."""
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        return f"the number of its system call on {platform.machine()} is not known"
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    for node in nodes:
        mask[node // width] |= 1 << node % width
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_ulong(_MASK_WORDS * width + 1)  # Linux reads one bit less
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(mode), mask, size) == 0:
        return None
    return os.strerror(ctypes.get_errno())
