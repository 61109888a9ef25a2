"""The text of an optimised HLO module: its computations, and their instructions in order.

The compilers of XLA write it, `jax.stages.Compiled.as_text` gives it, and libtpu's dumps have it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

NAME = re.compile(r"%[\w.\-]+")
CALLED = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(branch_computations|called_computations)=\{([^}]*)\}"
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{\s*$")
_END = re.compile(r"^\}(?:\s|$|, execution_thread=)")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_BARE_NAME = re.compile(r"(?:^|, )([A-Za-z_][\w.\-]*)(?=,|$)")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{]|[)\]}]')
_METADATA = re.compile(r", (?:metadata|frontend_attributes)=(?=\{)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SOURCE = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`; brackets in quotes are text."""
    depth = 0
    for bracket in _BRACKET.finditer(text, start):
        depth += (bracket[0] in "([{") - (bracket[0] in ")]}")
        if depth == 0:
            return bracket.end()
    return len(text)


def _split(line: str) -> tuple[str, str, str, str, str]:
    """Shape, opcode, operands, attributes and metadata of what stands right of the equals sign.

    >>> _split('f32[8]{0} copy(%x), metadata={op_name="a"}')
    ('f32[8]{0}', 'copy', '%x', '', '{op_name="a"}')
    """
    end = _closing(line, 0) if line.startswith("(") else line.find(" ")
    shape, rest = line[:end], line[end:].lstrip()
    paren = rest.find("(")
    close = _closing(rest, paren)
    attributes, metadata = rest[close:], ""
    while (match := _METADATA.search(attributes)) is not None:
        after = _closing(attributes, match.end())
        metadata += attributes[match.end() : after]
        attributes = attributes[: match.start()] + attributes[after:]
    return shape, rest[:paren], rest[paren + 1 : close - 1], attributes, metadata


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape, without padding; 4-bit elements are half a byte.

    >>> shape_bytes("(bf16[2,8]{1,0:T(8,128)(2,1)S(1)}, u32[])"), shape_bytes("(s4[3], f8e4m3fn[2], token[])")
    (36, 4)
    """
    return sum(
        math.ceil(math.prod(int(n) for n in dims.split(",") if n) * _bits(kind) / 8)
        for kind, dims in _ARRAY.findall(shape)
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
      name: text without "%". shape: its result's, as the text has it. opcode: for example "fusion".
      operands: names of the instructions that it reads.
      text: between its brackets; of a constant, the value. attributes: what follows, without metadata.
      metadata: its source, as the text has it. root: whether it is the result of its computation.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str = dataclasses.field(repr=False)
    attributes: str = dataclasses.field(repr=False)
    metadata: str = dataclasses.field(default="", repr=False)
    root: bool = dataclasses.field(default=False, repr=False)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of its result."""
        return shape_bytes(self.shape)

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate; None where it gives none."""
        match = _CYCLES.search(self.attributes)
        return None if match is None else int(match[1])

    @property
    def target(self) -> str:
        """What a custom call calls; "" for other instructions."""
        match = _TARGET.search(self.attributes)
        return "" if match is None else match[1]

    @property
    def source(self) -> str:
        """The scopes and the operation of JAX that it comes from; "" where the text does not say."""
        match = _SOURCE.search(self.metadata)
        return "" if match is None else match[1]

    @property
    def frame(self) -> str:
        """Number of its stack frame in the tables of the program; "" for none."""
        match = _FRAME.search(self.metadata)
        return "" if match is None else match[1]

    @functools.cached_property
    def computations(self) -> tuple[tuple[str, str], ...]:
        """The computations that it names: how ("calls", "body", "branch_computations", ...), and their names."""
        calls = []
        for match in CALLED.finditer(self.attributes):
            if match[1]:
                calls.append((match[1], match[2]))
            else:
                calls += [(match[3], name.strip().lstrip("%")) for name in match[4].split(",") if name.strip()]
        return tuple(calls)

    def called(self, kind: str) -> str | None:
        """The computation that it names as "calls", "body", "condition", "to_apply" or "called_computations"."""
        return next((name for key, name in self.computations if key == kind), None)

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        kinds = ("branch_computations", "true_computation", "false_computation")
        return tuple(name for key, name in self.computations if key in kinds)


@dataclasses.dataclass(frozen=True)
class Module:
    """An optimised module. `entry`: the name of its main computation; `computations`: by name."""

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Every instruction."""
        return {instruction.name: instruction for body in self.computations.values() for instruction in body}


def _whole_lines(text: str) -> Iterator[str]:
    """The lines, with the attributes of an instruction that go on over several lines in one: a kernel's metadata may
    hold line breaks.
    """
    statement = ""
    for line in text.splitlines():
        if statement and line and not line[0].isspace() and not _END.match(line):
            statement += line
            continue
        if statement:
            yield statement
        statement = line if _INSTRUCTION.match(line) else ""
        if not statement:
            yield line
    if statement:
        yield statement


def parse_module(text: str) -> Module:
    """Takes the text of an optimised module apart. A text without computations has the entry "".

    >>> module = parse_module('''
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %y = f32[8]{0} copy(%x), metadata={op_name="jit(f)/copy"}, backend_config={"estimated_cycles":"92"}
    ... }''')
    >>> y = module.by_name["y"]
    >>> module.entry, y.cycles, y.operands, y.source, y.root
    ('main', 92, ('x',), 'jit(f)/copy', True)
    """
    entry, computations = "", {}
    body: list[Instruction] | None = None
    for line in _whole_lines(text):
        if body is None:
            if head := _COMPUTATION.match(line):
                body = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
        elif _END.match(line):
            body = None
        elif match := _INSTRUCTION.match(line):
            shape, opcode, operands, attributes, metadata = _split(match[3])
            names = tuple(name[1:] for name in NAME.findall(operands))
            if not names and opcode != "constant":
                names = tuple(_BARE_NAME.findall(operands))
            body.append(Instruction(match[2], shape, opcode, names, operands, attributes, metadata, bool(match[1])))
    return Module(entry, {name: tuple(instructions) for name, instructions in computations.items()})
