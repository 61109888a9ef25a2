"""What is alive while each operation of a compiled program runs: bytes, from the text of its scheduled HLO.

Each result lives from its operation to its last use. Tuples, bitcasts and elements of tuples are names of other
results, and a loop works in its operand's memory. What a loop, a branch or a call needs inside is added to what is
alive around it. Arguments live from the start to the end, as the caller holds them. The compiler shares and pads memory
in ways that the text does not say, so its own total differs.
"""

from __future__ import annotations

import dataclasses
import re

from vishwamai.core.hlo import Module, parse_module

_ALIAS = re.compile(r"\{([0-9, ]*)\}: \(([0-9]+), \{\}")
_NAMES = ("tuple", "get-tuple-element", "bitcast", "while", "opt-barrier", "after-all", "copy-done")
_INSIDE = ("while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class LiveAt:
    """One operation of the program's entry.

    Attributes:
      name: the instruction's name in traces. opcode: for example "fusion".
      source: the scopes and the operation of JAX that it comes from; "" where the text does not say.
      live: bytes alive while it runs. nbytes: bytes of its own result.
    """

    name: str
    opcode: str
    source: str
    live: int
    nbytes: int


def live_bytes(text: str) -> tuple[LiveAt, ...]:
    """The operations of a scheduled program in order, with the bytes alive at each.

    Args:
      text: HLO of the compiled program, `jax.stages.Compiled.as_text`.

    >>> text = '''HloModule f, is_scheduled=true
    ... ENTRY %main (x: f32[256]) -> f32[256] {
    ...   %x = f32[256]{0} parameter(0)
    ...   %a = f32[256]{0} exponential(%x), metadata={op_name="jit(f)/exp"}
    ...   ROOT %b = f32[256]{0} add(%a, %x)
    ... }'''
    >>> [(one.name, one.live, one.source) for one in live_bytes(text)]
    [('a', 2048, 'jit(f)/exp'), ('b', 3072, '')]
    """
    module = parse_module(text)
    if not module.entry:
        return ()
    header = text[text.find("input_output_alias=") :].partition("\n")[0] if "input_output_alias=" in text else ""
    donated = frozenset(int(place or 0) for place, _ in _ALIAS.findall(header.partition("entry_computation")[0]))
    return tuple(_follow(module, module.entry, donated))


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an instruction comes from.

    Attributes:
      source: field of `LiveAt`. kernel: the target of a custom call, such as "vishwamai_matmul"; "" for other
        operations.
      contains: its time is that of the operations in it, as a loop's.
    """

    source: str
    kernel: str
    contains: bool


def origins(text: str) -> dict[str, Origin]:
    """Where every instruction of a compiled program comes from, by its name."""
    instructions = parse_module(text).by_name
    return {
        name: Origin(instruction.source, instruction.target, instruction.opcode in _INSIDE)
        for name, instruction in instructions.items()
    }


def _follow(module: Module, name: str, donated: frozenset[int] | None) -> list[LiveAt]:
    """`donated`: results of the entry that lie in arguments; None for another computation than the entry."""
    body, entry = module.computations[name], donated is not None
    aliases: dict[str, frozenset[str]] = {}
    sizes: dict[str, int] = {}
    for instruction in body:
        referents = frozenset().union(*(aliases.get(operand, ()) for operand in instruction.operands))
        if instruction.opcode in _NAMES:
            aliases[instruction.name] = referents
        else:
            aliases[instruction.name] = frozenset({instruction.name})
            sizes[instruction.name] = 0 if instruction.opcode == "parameter" and not entry else instruction.nbytes
        if instruction.root:  # those of a loop lie in what it carries, those of a call are counted around it
            results = instruction.operands if instruction.opcode == "tuple" else (instruction.name,)
            elsewhere = [r for place, r in enumerate(results) if donated is None or place in donated]
            sizes.update((value, 0) for r in elsewhere for value in aliases[r] if value in sizes)
    last: dict[str, int] = {}
    for place, instruction in enumerate(body):
        for value in (
            *(v for operand in instruction.operands for v in aliases.get(operand, ())),
            *aliases[instruction.name],
        ):
            last[value] = max(place, last.get(value, 0))
        if instruction.opcode == "parameter" or instruction.root:
            for value in aliases[instruction.name]:
                last[value] = len(body)
    arguments = [instruction.name for instruction in body if instruction.opcode == "parameter"]
    alive = {value: sizes[value] for value in arguments}
    points = []
    for place, instruction in enumerate(body):
        if instruction.opcode in ("parameter", "constant"):
            if instruction.opcode == "constant":
                alive[instruction.name] = sizes[instruction.name]
            continue
        alive.update({value: sizes[value] for value in aliases[instruction.name] if value in sizes})
        inside = 0
        if instruction.opcode in _INSIDE:
            called = (name for _, name in instruction.computations if name in module.computations)
            inside = max((_peak(module, name) for name in called), default=0)
        if instruction.opcode not in _NAMES or instruction.opcode == "while":
            points.append(
                LiveAt(
                    instruction.name,
                    instruction.opcode,
                    instruction.source,
                    sum(alive.values()) + inside,
                    instruction.nbytes,
                )
            )
        alive = {value: size for value, size in alive.items() if last.get(value, place) > place}
    return points


def _peak(module: Module, name: str) -> int:
    return max((point.live for point in _follow(module, name, None)), default=0)
