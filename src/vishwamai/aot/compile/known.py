"""What a Pallas kernel's scalar operands hold, as far as it is known before the program runs.

Grid bounds and scalar-prefetch tables steer a kernel's control flow. Where they come from constants (a mask turned into
block tables) or from arguments whose values were given (page tables, group sizes), walking the jaxpr and folding what
is known gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

LARGEST = 1 << 22
"""Elements beyond which a value is not folded."""


class _Unknown:
    """A value that only the device will know."""


UNKNOWN = _Unknown()
_LOOPS = frozenset(("scan", "while", "while_loop", "cond"))
_NOT_CALLS = _LOOPS | {"reduce", "scatter", "sort", "reduce_window"}
_NO_CPU = ("triton_call",)
"""What cannot be computed here: a GPU's branch of a program, whose operands may all be known."""


def scalar_operands(
    closed: jex.ClosedJaxpr, constants: Mapping[int, np.ndarray]
) -> dict[str, list[dict[int, np.ndarray]]]:
    """The integer operands of every pallas_call that can be worked out.

    Args:
        closed: the traced function.
        constants: values of its flat arguments, by position.

    Returns:
        by kernel name ("*" for a kernel without one), one dictionary for each call in the order of the program: values
        by operand position.
    """
    tables: dict[str, list[dict[int, np.ndarray]]] = {}
    if not _steered(closed.jaxpr):  # folding runs every operation that it can, so not without need
        return tables
    arguments = [constants.get(i, UNKNOWN) for i in range(len(closed.jaxpr.invars))]
    for name, values in _walk(closed.jaxpr, closed.consts, arguments, []):
        integers = {i: v for i, v in values.items() if np.issubdtype(v.dtype, np.integer) or v.dtype == bool}
        tables.setdefault(name, []).append(integers)
    return tables if any(values for calls in tables.values() for values in calls) else {}


def _steered(jaxpr: Any) -> bool:
    """Whether any pallas_call takes an integer operand."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            if any(np.issubdtype(v.aval.dtype, np.integer) for v in equation.invars if hasattr(v.aval, "dtype")):
                return True
        elif any(_steered(body) for _, body, _ in _inner(equation)):
            return True
    return False


def _inner(equation: jex.JaxprEqn) -> Iterator[tuple[str, jex.Jaxpr, Sequence[object]]]:
    for key, value in equation.params.items():
        for part in value if isinstance(value, tuple) else (value,):  # a cond has a tuple of branches
            if hasattr(part, "jaxpr") and hasattr(part, "consts"):
                yield key, part.jaxpr, part.consts
            elif isinstance(part, jex.Jaxpr):
                yield key, part, ()


def _inside(equation: Any, key: str, body: Any, values: Sequence[object]) -> list[object]:
    """What is known inside a loop or a branch: what is the same in every turn, and all operands of a branch."""
    arguments: list[object] = [UNKNOWN] * len(body.invars)
    if equation.primitive.name == "cond":
        arguments[:] = values[1:]
    elif key == "jaxpr":  # scan: constants, carry, slices
        # Told by the ranks, since jax 0.11 dropped the parameters that counted: the body sees slices of one axis less,
        # and gives them.
        matching = sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(equation.invars, body.invars))
        carry = sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(equation.outvars, body.outvars))
        constants = matching - carry
        arguments[:constants] = values[:constants]
    elif key in ("cond_jaxpr", "body_jaxpr"):  # while: constants of the condition, of the body, carry
        first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        arguments[: first if key == "cond_jaxpr" else second] = (
            values[:first] if key == "cond_jaxpr" else values[first : first + second]
        )
    return arguments


def _size(equation: Any) -> int:
    return sum(int(np.prod(v.aval.shape)) for v in equation.outvars if hasattr(v.aval, "shape"))


def _walk(
    jaxpr: jex.Jaxpr, consts: Sequence[object], inputs: Sequence[object], outputs: list[object]
) -> list[tuple[str, dict[int, np.ndarray]]]:
    """Folds one jaxpr; fills `outputs` with what its results are and returns the kernels met."""
    environment: dict[jex.Var, Any] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, inputs))
    kernels: list[tuple[str, dict[int, np.ndarray]]] = []

    def read(variable: jex.Var | jex.Literal) -> Any:
        return variable.val if isinstance(variable, jex.Literal) else environment.get(variable, UNKNOWN)

    for equation in jaxpr.eqns:
        values = [read(variable) for variable in equation.invars]
        name = equation.primitive.name
        results: list[object] = [UNKNOWN] * len(equation.outvars)
        inner = list(_inner(equation))
        complete = all(value is not UNKNOWN for value in values)
        if name == "pallas_call":
            info = equation.params.get("name_and_src_info") or equation.params.get("name")
            operands = {
                i: np.asarray(v) for i, v in enumerate(values) if v is not UNKNOWN and np.size(v) < LARGEST // 4
            }
            kernels.append((info if isinstance(info, str) else getattr(info, "name", None) or "*", operands))
        elif name in _LOOPS and not complete:
            for key, body, constants in inner:
                kernels += _walk(body, constants, _inside(equation, key, body, values), [])
        elif inner and name not in _NOT_CALLS and len(inner[0][1].invars) == len(values):
            results = []
            kernels += _walk(inner[0][1], inner[0][2], values, results)
        elif complete and name not in _NO_CPU and _size(equation) < LARGEST and not equation.effects:
            bound = equation.primitive.bind(*values, **equation.params)
            results = list(bound) if equation.primitive.multiple_results else [bound]
        elif name == "select_n" and values[0] is not UNKNOWN and np.size(values[0]) == 1:
            results = [values[1 + int(np.asarray(values[0]).reshape(()))]]
        environment.update(zip(equation.outvars, results))
    outputs.extend(read(variable) for variable in jaxpr.outvars)
    return kernels
