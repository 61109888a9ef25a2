"""What the instructions of the scalar unit compute: 32-bit integers, addresses relative to a symbol, predicates, and
None for the unknown.
"""

from __future__ import annotations

from collections.abc import Callable

from vishwamai.aot.schedule.machine import MASK32, POINTER

Value = int | bool | None


def signed(value: int) -> int:
    """A 32-bit pattern as a signed number; larger values are addresses and stay."""
    return value - (1 << 32) if value < 1 << 32 and value & 0x80000000 else value


def add(a: Value, b: Value) -> Value:
    """a + b, modulo 2**32 unless one of them is an address."""
    if a is None or b is None:
        return None
    if a >= POINTER or b >= POINTER:
        return (a if a >= POINTER else signed(a)) + (b if b >= POINTER else signed(b))
    return (a + b) & MASK32


def _subtract(a: int, b: int) -> Value:
    if a >= POINTER or b >= POINTER:
        return a - b if a >= b else None
    return (a - b) & MASK32


ARITHMETIC: dict[str, Callable[[int, int], Value]] = {
    "ssub": _subtract,
    "smul": lambda a, b: (a * b) & MASK32,
    "sshll": lambda a, b: a << b if a >= POINTER else (a << b) & MASK32,
    "sshrl": lambda a, b: a >> b,
    "sshra": lambda a, b: (signed(a) >> b) & MASK32 if a < POINTER else a >> b,
    "sand": lambda a, b: a & b,
    "sor": lambda a, b: a | b,
    "sxor": lambda a, b: a ^ b,
    "sc": lambda a, b: (a + b) >> 32 != 0 if a < POINTER and b < POINTER else None,  # carry of an unsigned sum
}


def divide(a: Value, b: Value, kind: str) -> tuple[Value, ...]:
    """What a division of unsigned numbers leaves to be popped, in order: `kind` is "kDiv", "kRem" or "kDivAndRem".

    Example:
        >>> divide(17, 5, "kDivAndRem"), divide(17, 5, "kRem"), divide(None, 5, "kDiv")
        ((3, 2), (2,), (None,))
    """
    results: tuple[Value, Value] = (None, None) if a is None or not b else divmod(a, b)
    return {"kDiv": results[:1], "kRem": results[1:], "kDivAndRem": results}[kind]


COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def logic(op: str, a: Value, b: Value) -> Value:
    """Predicate logic, where one known input may decide."""
    decided = {"por": True, "pnor": True, "pand": False, "pnand": False}[op]
    either = op in ("por", "pnor")
    negate = op in ("pnor", "pnand")
    if (a is not None and bool(a) == decided) or (b is not None and bool(b) == decided):
        return decided != negate
    if a is None or b is None:
        return None
    return (bool(a) or bool(b) if either else bool(a) and bool(b)) != negate
