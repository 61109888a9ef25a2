"""What is alive while each operation of a compiled program runs: bytes, from the text of its scheduled HLO.

Each result lives from its operation to its last use. Tuples, bitcasts and elements of tuples are names of other
results, and a loop works in its operand's memory. What a loop, a branch or a call needs inside is added to what is
alive around it. Arguments live from the start to the end, as the caller holds them. The compiler shares and pads memory
in ways that the text does not say, so its own total differs.
"""

from __future__ import annotations

import dataclasses
import math
import re

_ALIAS = re.compile(r"\{([0-9, ]*)\}: \(([0-9]+), \{\}")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAMES = ("tuple", "get-tuple-element", "bitcast", "while", "opt-barrier", "after-all", "copy-done")
_INSIDE = ("while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class LiveAt:
    """One operation of the program's entry.

    Attributes:
      name: of the instruction, as traces name it. opcode: such as "fusion".
      source: the scopes and the operation of JAX that it comes from; "" where the text does not say.
      live: bytes alive while it runs. made: bytes of its own result.
    """

    name: str
    opcode: str
    source: str
    live: int
    made: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      name, opcode: as in its text. made: bytes of its result. operands: names. called: computations.
      source: as of `LiveAt`. kernel: the target of a custom call. root: whether it is the result of its computation.
      frame: number of its stack frame in the tables of the program; "" for none.
    """

    name: str
    opcode: str
    made: int
    operands: tuple[str, ...]
    called: tuple[str, ...]
    source: str
    kernel: str
    root: bool
    frame: str = ""


def instructions(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every computation of a compiled program, in order."""
    return _read(text)[0]


def live_bytes(text: str) -> tuple[LiveAt, ...]:
    """The operations of a scheduled program in order, with the bytes alive at each.

    Args:
      text: of the compiled program, `jax.stages.Compiled.as_text`.

    >>> text = '''HloModule f, is_scheduled=true
    ... ENTRY %main (x: f32[256]) -> f32[256] {
    ...   %x = f32[256]{0} parameter(0)
    ...   %a = f32[256]{0} exponential(%x), metadata={op_name="jit(f)/exp"}
    ...   ROOT %b = f32[256]{0} add(%a, %x)
    ... }'''
    >>> [(one.name, one.live, one.source) for one in live_bytes(text)]
    [('a', 2048, 'jit(f)/exp'), ('b', 3072, '')]
    """
    computations, entry = _read(text)
    if entry is None:
        return ()
    header = text[text.find("input_output_alias=") :].partition("\n")[0] if "input_output_alias=" in text else ""
    donated = frozenset(int(place or 0) for place, _ in _ALIAS.findall(header.partition("entry_computation")[0]))
    return tuple(_follow(computations, entry, donated))


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an instruction comes from.

    Attributes:
      source: as of `LiveAt`. kernel: the target of a custom call, such as "vishwamai_matmul"; "" for other operations.
      contains: its time is that of the operations in it, as a loop's.
    """

    source: str
    kernel: str
    contains: bool


def origins(text: str) -> dict[str, Origin]:
    """Where every instruction of a compiled program comes from, by its name."""
    computations, _ = _read(text)
    every = (one for body in computations.values() for one in body)
    return {one.name: Origin(one.source, one.kernel, one.opcode in _INSIDE) for one in every}


def _read(text: str) -> tuple[dict[str, list[Instruction]], str | None]:
    computations: dict[str, list[Instruction]] = {}
    current, entry = None, None
    for line in text.splitlines():
        if current is None:
            if match := _COMPUTATION.match(line):
                current = match[2]
                computations[current] = []
                entry = current if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            computations[current].append(_instruction(match[2], match[3], bool(match[1])))
    return computations, entry


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    shape, rest = _shape(rest)
    opcode, _, rest = rest.partition("(")
    end = _closing(rest)
    operands = re.findall(r"%([\w.\-]+)", rest[:end]) or re.findall(r"(?:^|, )([A-Za-z_][\w.\-]*)(?=,|$)", rest[:end])
    attributes = rest[end:]
    called = _CALLED.findall(attributes)
    for branches in _BRANCHES.findall(attributes):
        called += [one.strip().lstrip("%") for one in branches.split(",")]
    source = re.search(r'op_name="([^"]*)"', attributes)
    frame = re.search(r"stack_frame_id=(\d+)", attributes)
    kernel = re.search(r'custom_call_target="([^"]*)"', attributes)
    return Instruction(
        name=name,
        opcode=opcode.strip(),
        made=_size(shape),
        operands=tuple(operands),
        called=tuple(called),
        source=source[1] if source else "",
        kernel=kernel[1] if kernel else "",
        frame=frame[1] if frame else "",
        root=root,
    )


def _shape(text: str) -> tuple[str, str]:
    """The shape that a text starts with, and what comes after it."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    end = _closing(text[1:]) + 2
    return text[:end], text[end:].lstrip()


def _closing(text: str) -> int:
    """Where the parenthesis that is open at the start closes."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    return len(text)


def _size(shape: str) -> int:
    return sum(
        math.ceil(math.prod(map(int, filter(None, dims.split(",")))) * _bits(kind) / 8)
        for kind, dims in _ARRAY.findall(shape)
    )


def _bits(kind: str) -> int:
    if kind == "pred":
        return 8
    digits = re.search(r"\d+", kind)
    return 0 if digits is None else int(digits[0])


def _follow(computations: dict[str, list[Instruction]], name: str, donated: frozenset[int] | None) -> list[LiveAt]:
    """`donated`: results of the entry that lie in arguments; None for another computation than the entry."""
    body, entry = computations[name], donated is not None
    aliases: dict[str, frozenset[str]] = {}
    made: dict[str, int] = {}
    for one in body:
        known = frozenset().union(*(aliases.get(operand, ()) for operand in one.operands))
        if one.opcode in _NAMES:
            aliases[one.name] = known
        else:
            aliases[one.name] = frozenset({one.name})
            made[one.name] = 0 if one.opcode == "parameter" and not entry else one.made
        if one.root:  # those of a loop lie in what it carries, those of a call are counted around it
            results = one.operands if one.opcode == "tuple" else (one.name,)
            elsewhere = [r for place, r in enumerate(results) if donated is None or place in donated]
            made.update((value, 0) for r in elsewhere for value in aliases[r] if value in made)
    last: dict[str, int] = {}
    for place, one in enumerate(body):
        for value in (*(v for operand in one.operands for v in aliases.get(operand, ())), *aliases[one.name]):
            last[value] = max(place, last.get(value, 0))
        if one.opcode == "parameter" or one.root:
            for value in aliases[one.name]:
                last[value] = len(body)
    arguments = [one.name for one in body if one.opcode == "parameter"]
    alive = {value: made[value] for value in arguments}
    found = []
    for place, one in enumerate(body):
        if one.opcode in ("parameter", "constant"):
            if one.opcode == "constant":
                alive[one.name] = made[one.name]
            continue
        alive.update({value: made[value] for value in aliases[one.name] if value in made})
        inside = 0
        if one.opcode in _INSIDE:
            inside = max((_peak(computations, called) for called in one.called if called in computations), default=0)
        if one.opcode not in _NAMES or one.opcode == "while":
            found.append(LiveAt(one.name, one.opcode, one.source, sum(alive.values()) + inside, one.made))
        alive = {value: size for value, size in alive.items() if last.get(value, place) > place}
    return found


def _peak(computations: dict[str, list[Instruction]], name: str) -> int:
    return max((one.live for one in _follow(computations, name, None)), default=0)
