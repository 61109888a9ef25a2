"""Which instructions of a program share their code.

libtpu emits the code of equal instructions (the transposes of K and V, the layers of a model) once, under the name of
one of them, and calls it for all. The dump has it under that name only; the optimised HLO tells which others it stands
for: those of equal opcode, shapes, layouts, body and configuration.
"""

from __future__ import annotations

import hashlib

from vishwamai.aot.schedule.hlo import CALLED, COMPUTATION, INSTRUCTION, NAME, split

_EMITTED = frozenset(
    ("fusion", "copy", "custom-call", "convert", "transpose", "reduce", "broadcast", "reduce-window", "pad", "slice")
    + ("reshape", "dynamic-update-slice")
)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def twins(hlo: str) -> dict[str, str]:
    """A fingerprint for each instruction of an optimised HLO module; instructions with the same one share their code.

    Example:
        >>> a, b, c = twins('''
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %x = f32[8]{0} parameter(0)
        ...   %copy.1 = f32[8]{0} copy(%x), metadata={op_name="a"}
        ...   %copy.2 = f32[8]{0} copy(%copy.1), metadata={op_name="b"}
        ...   %copy.3 = f32[8]{0:T(8)} copy(%copy.2)
        ... }''').values()
        >>> a == b, a == c
        (True, False)
    """
    bodies: dict[str, list[str]] = {}
    body: list[str] = []
    for line in hlo.splitlines():
        head = COMPUTATION.match(line)
        if head:
            body = bodies.setdefault(head[1], [])
        elif INSTRUCTION.match(line):
            body.append(line)
    shapes: dict[str, str] = {}
    parsed: dict[str, tuple[str, str, str, str]] = {}
    for lines in bodies.values():
        for line in lines:
            match = INSTRUCTION.match(line)
            if match:
                parsed[match[1]] = split(match[2])
                shapes[match[1]] = parsed[match[1]][0]
    digests: dict[str, str] = {}

    def computation(name: str) -> str:
        if name not in digests:
            digests[name] = ""  # recursion does not occur in HLO
            numbers: dict[str, str] = {}
            lines = []
            for line in bodies.get(name, ()):
                match = INSTRUCTION.match(line)
                assert match
                shape, opcode, operands, attributes = parsed[match[1]]
                attributes = CALLED.sub(lambda m: f"{m[1]}={computation(m[2])}", attributes)
                text = f"%{match[1]} = {shape} {opcode}({operands}){attributes}"
                lines.append(NAME.sub(lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), text))
            digests[name] = _digest(*lines)
        return digests[name]

    found = {}
    for name, (shape, opcode, operands, attributes) in parsed.items():
        if opcode in _EMITTED:
            inputs = [shapes.get(operand[1:], "?") for operand in NAME.findall(operands)]
            attributes = CALLED.sub(lambda m: f"{m[1]}={computation(m[2])}", attributes)
            found[name] = _digest(shape, opcode, *inputs, attributes)
    return found
