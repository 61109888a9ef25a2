"""The text of an optimised HLO module: its computations, and their instructions in the order of the schedule."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
NAME = re.compile(r"%[\w.\-]+")
CALLED = re.compile(r"(calls|to_apply|body|condition)=%([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{[^}]*\})?")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+)")


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "({[") - (text[index] in ")}]")
        if depth == 0:
            return index + 1
    return len(text)


def _without(text: str, key: str) -> str:
    """Drops an attribute `key={...}`."""
    at = text.find(f", {key}={{")
    return text if at < 0 else text[:at] + text[_closing(text, at + len(key) + 3) :]


def split(line: str) -> tuple[str, str, str, str]:
    """Shape, opcode, operands and attributes of what stands right of the equals sign; the attributes without metadata.

    >>> split('f32[8]{0} copy(%x), metadata={op_name="a"}')
    ('f32[8]{0}', 'copy', '%x', '')
    """
    end = _closing(line, 0) if line.startswith("(") else line.find(" ")
    shape, rest = line[:end], line[end:].lstrip()
    paren = rest.find("(")
    close = _closing(rest, paren)
    attributes = rest[close:]
    for key in ("metadata", "frontend_attributes"):
        attributes = _without(attributes, key)
    return shape, rest[:paren], rest[paren + 1 : close - 1], attributes


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape, without padding; 4-bit elements are half a byte.

    >>> shape_bytes("(bf16[2,8]{1,0:T(8,128)(2,1)S(1)}, u32[])")
    36
    """
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * _bits(kind) // 8 for kind, dims in _ARRAY.findall(shape)
    )


def _bits(kind: str) -> int:
    if kind == "pred":
        return 8
    width = re.search(r"\d+", kind)
    return int(width[0]) if width else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: without "%". shape: of its result, as the text has it. opcode: such as "fusion".
      operands: names of the instructions that it reads.
      text: between its brackets; of a constant, the value. attributes: what follows, without metadata.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str = dataclasses.field(repr=False)
    attributes: str = dataclasses.field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its result."""
        return shape_bytes(self.shape)

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate; None where it gives none."""
        found = _CYCLES.search(self.attributes)
        return None if found is None else int(found[1])

    @property
    def target(self) -> str:
        """What a custom call calls; "" for other instructions."""
        found = _TARGET.search(self.attributes)
        return "" if found is None else found[1]

    def called(self, kind: str) -> str | None:
        """The computation that it names as "calls", "body", "condition" or "to_apply"."""
        return next((name for key, name in CALLED.findall(self.attributes) if key == kind), None)

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        found = (NAME.findall(many or one) for many, one in _BRANCHES.findall(self.attributes))
        return tuple(name[1:] for names in found for name in names)


@dataclasses.dataclass(frozen=True)
class Module:
    """An optimised module. `entry`: the name of its main computation; `computations`: by name."""

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Every instruction."""
        return {one.name: one for body in self.computations.values() for one in body}


def parse_module(text: str) -> Module:
    """Takes the text of an optimised module apart.

    >>> module = parse_module('''
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %y = f32[8]{0} copy(%x), backend_config={"window_config":{"estimated_cycles":"92"}}
    ... }''')
    >>> module.entry, module.by_name["y"].cycles, module.by_name["y"].operands
    ('main', 92, ('x',))
    """
    entry, computations = "", {}
    body: list[Instruction] = []
    for line in text.splitlines():
        head = COMPUTATION.match(line)
        if head:
            body = computations.setdefault(head[1], [])
            entry = head[1] if line.startswith("ENTRY") else entry
            continue
        match = INSTRUCTION.match(line)
        if match:
            shape, opcode, operands, attributes = split(match[2])
            names = tuple(name[1:] for name in NAME.findall(operands))
            body.append(Instruction(match[1], shape, opcode, names, operands, attributes))
    return Module(entry, {name: tuple(found) for name, found in computations.items()})
