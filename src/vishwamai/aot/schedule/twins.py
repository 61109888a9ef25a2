"""Which instructions of a program share their code.

libtpu emits the code of equal instructions (the transposes of K and V, the layers of a model) once, under the name of
one of them, and calls it for all. The dump has it under that name only; the optimised HLO tells which others it stands
for: those of equal opcode, shapes, layouts, body and configuration.
"""

from __future__ import annotations

import hashlib
import re

from vishwamai.core.hlo import NAME, Module

_WITHOUT_CODE = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast"))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def twins(module: Module) -> dict[str, str]:
    """A fingerprint for each instruction of an optimised HLO module; instructions with the same one share their code.

    Example:
        >>> from vishwamai.core.hlo import parse_module
        >>> a, b, c = twins(parse_module('''
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %x = f32[8]{0} parameter(0)
        ...   %copy.1 = f32[8]{0} copy(%x), metadata={op_name="a"}
        ...   %copy.2 = f32[8]{0} copy(%copy.1), metadata={op_name="b"}
        ...   %copy.3 = f32[8]{0:T(8)} copy(%copy.2)
        ... }''')).values()
        >>> a == b, a == c
        (True, False)
    """
    digests: dict[str, str] = {}

    def with_bodies(attributes: str) -> str:
        """The attributes with what they call in place of its name."""

        def body(match: re.Match[str]) -> str:
            name = match[0][1:]
            return computation(name) if name in module.computations else match[0]

        return NAME.sub(body, attributes)

    def computation(name: str) -> str:
        if name not in digests:
            digests[name] = ""  # recursion does not occur in HLO
            numbers: dict[str, str] = {}
            lines = []
            for instruction in module.computations[name]:
                call = f"{instruction.opcode}({instruction.text}){with_bodies(instruction.attributes)}"
                text = f"%{instruction.name} = {instruction.shape} {call}"
                lines.append(NAME.sub(lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), text))
            digests[name] = _digest(*lines)
        return digests[name]

    fingerprints = {}
    for name, instruction in module.by_name.items():
        if instruction.opcode not in _WITHOUT_CODE:
            inputs = [module.by_name[o].shape if o in module.by_name else "?" for o in instruction.operands]
            fingerprints[name] = _digest(
                instruction.shape, instruction.opcode, *inputs, with_bodies(instruction.attributes)
            )
    return fingerprints
