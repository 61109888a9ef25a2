"""The collectives of a compiled program: kind, bytes, devices, and their time by the links."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.hlo import Instruction, Module
from vishwamai.core.links import estimate_collective, group_links

if TYPE_CHECKING:
    pass

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
_KINDS: dict[str, Kind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
}
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_PAIR = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_PAIRS = re.compile(r"source_target_pairs=\{([{}\d, ]*)\}")
_NUMBERS = re.compile(r"\d+,\d+")


def base(opcode: str) -> str:
    """The opcode without "-start" or "-done".

    >>> base("all-gather-start"), base("copy-done"), base("while")
    ('all-gather', 'copy', 'while')
    """
    return re.sub(r"-(start|done|update)$", "", opcode)


def is_collective(opcode: str) -> bool:
    """Whether devices exchange data by it, the halves of asynchronous ones included."""
    return base(opcode) in _KINDS


def group_of(attributes: str, devices: int) -> list[int]:
    """The first group of devices that a collective is among, by their numbers in the program.

    >>> group_of("replica_groups={{0,2},{1,3}}", 4), group_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    ([0, 2], [0, 2])
    >>> group_of("replica_groups=mesh['x'=2,'y'=2] {'y'}", 4)
    [0, 1]

    Raises:
      UnsupportedError: the groups are written in a way that is not known here.
    """
    pair = _PAIR.search(attributes)
    if pair:
        return [int(pair[1]), int(pair[2])]
    listed = _LISTED.search(attributes)
    if listed:
        first = re.findall(r"\{([\d, ]*)\}", listed[1] or "")
        return [int(n) for n in first[0].split(",")] if first else list(range(devices))
    axes = _AXES.search(attributes)
    if axes:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes[1])}
        among = re.findall(r"'([^']+)'", axes[2])
        if math.prod(sizes.values()) == devices and set(among) <= set(sizes) and ":" not in axes[2]:
            index = tuple(slice(None) if name in among else 0 for name in sizes)
            return np.arange(devices).reshape(tuple(sizes.values()))[index].reshape(-1).tolist()
    iota = _IOTA.search(attributes)
    if iota is None:
        raise UnsupportedError(f"the devices of a collective cannot be read: {attributes[:80]}.")
    shape, sizes, order = ([int(n) for n in (part or "").split(",") if n] for part in iota.groups())
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    return (numbers.transpose(order) if order else numbers).reshape(shape)[0].tolist()


def directed_links(instruction: Instruction) -> list[str]:
    """What a permute of neighbours occupies: "from,to" for every pair of devices. Nothing for other collectives, which
    take all links.

    >>> from vishwamai.core.hlo import parse_module
    >>> line = "ENTRY %m (p: f32[8]) -> f32[8] {\\n %p = f32[8]{0} parameter(0)\\n" + (
    ...     " %c = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}\\n}\\n")
    >>> directed_links(parse_module(line).by_name["c"])
    ['0,1', '1,0']
    """
    match = _PAIRS.search(instruction.attributes)
    return _NUMBERS.findall(match[1]) if match else []


def called(instruction: Instruction) -> str | None:
    """The computation of a fusion, of an asynchronous instruction, or of a program for the SparseCore."""
    return instruction.called("calls") or instruction.called("called_computations")


def inside(module: Module, instruction: Instruction) -> list[Instruction]:
    """The collectives in the computation that a fusion or an asynchronous instruction calls."""
    collectives = []
    for part in module.computations.get(called(instruction) or "", ()):
        collectives += [part] if is_collective(part.opcode) else inside(module, part)
    return collectives


def link_seconds(module: Module, devices: Sequence[Any]) -> Callable[[Instruction, bool], float]:
    """How long a collective of a program takes at the least: a function of the instruction, and of whether its sum is
    split again in the same fusion.

    Args:
      module: the program. devices: those that it is compiled for, in its order.

    Raises (the function): UnsupportedError: no link model has this group of devices.
    """

    def seconds(instruction: Instruction, scattered: bool = False) -> float:
        kind = _KINDS[base(instruction.opcode)]
        group = group_of(instruction.attributes, len(devices))
        operands = sum(module.by_name[name].nbytes for name in instruction.operands if name in module.by_name)
        nbytes = {
            "all_gather": float(operands * len(group)),
            "all_to_all": float(operands * len(group)),
        }.get(kind, float(operands))
        if kind == "all_reduce" and scattered:
            kind = "reduce_scatter"
        links = group_links([devices[i] for i in group], devices, f"{instruction.opcode} over {len(group)} devices")
        return estimate_collective(kind, nbytes, links)

    return seconds
