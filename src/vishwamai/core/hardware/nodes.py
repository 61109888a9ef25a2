"""The memory nodes of this machine (NUMA), as Linux lists them: which processors read which memory without a detour."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

SYSTEM = "/sys/devices/system/node"


@dataclasses.dataclass(frozen=True)
class MemoryNode:
    """A memory node.

    Attributes:
      number: the node's number.
      processors: numbers of the processors nearest to its memory.
      memory: bytes of it, None where the system does not say.
      distances: distance to the memory of each node, 10 for its own.
    """

    number: int
    processors: tuple[int, ...]
    memory: int | None = None
    distances: tuple[int, ...] = ()


def memory_nodes(root: str | None = None) -> tuple[MemoryNode, ...]:
    """The nodes in the order of their numbers; one with all processors where the system lists none.

    Args:
      root: a directory of the form of `/sys/devices/system/node`; None for `VISHWAMAI_CPU_NODES`, or that.
    """
    folder = Path(root or os.environ.get("VISHWAMAI_CPU_NODES") or SYSTEM)
    nodes = []
    for node in folder.glob("node[0-9]*"):
        memory = re.search(r"MemTotal:\s*(\d+) kB", _text(node / "meminfo"))
        nodes.append(
            MemoryNode(
                int(node.name[4:]),
                processors_of(_text(node / "cpulist")),
                None if memory is None else 1024 * int(memory[1]),
                tuple(map(int, _text(node / "distance").split())),
            )
        )
    everything = MemoryNode(0, tuple(sorted(_allowed())))
    return tuple(sorted(nodes, key=lambda node: node.number)) or (everything,)


def usable_processors(nodes: tuple[MemoryNode, ...]) -> list[list[int]]:
    """For each number of a node, its processors that this process may use."""
    allowed, size = _allowed(), 1 + max(node.number for node in nodes)
    usable: list[list[int]] = [[] for _ in range(size)]
    for node in nodes:
        usable[node.number] = [processor for processor in node.processors if processor in allowed]
    return usable


def processors_of(text: str) -> tuple[int, ...]:
    """The numbers of a list as Linux writes it.

    >>> processors_of("0-2,8,10-11")
    (0, 1, 2, 8, 10, 11)
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def ranges(processors: tuple[int, ...]) -> str:
    """The list that `processors_of` reads.

    >>> ranges((0, 1, 2, 8, 10, 11))
    '0-2,8,10-11'
    """
    groups: list[list[int]] = []
    for processor in processors:
        if groups and groups[-1][-1] == processor - 1:
            groups[-1].append(processor)
        else:
            groups.append([processor])
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # absent in some containers
        return ""
