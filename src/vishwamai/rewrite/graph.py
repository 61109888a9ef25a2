"""One level of a program as a graph: who computes a value, who reads it, which values are constants.

Axes carry labels here. Reading backward through transposes, broadcasts and axes of size 1, a value keeps the label of
each of its axes, so that two ways of writing one layout compare equal.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from vishwamai.rewrite.names import Atom, JaxprEqn, Literal, Var

Labels = tuple[Hashable, ...]
JIT = ("jit", "pjit")
LAYOUT = frozenset(("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"))
_COMPUTED = LAYOUT | frozenset(
    "iota convert_element_type add sub mul div neg max min rem sign abs sqrt rsqrt square integer_pow pow exp floor "
    "ceil eq ne lt le gt ge and or not xor select_n concatenate slice pad stop_gradient copy copy_p".split()
)
_LARGEST = 1 << 26
"""Elements of the largest constant that is computed to be looked at."""


class Graph:
    """A level of a program.

    Attributes:
      eqns: its equations. results: the variables that it returns.
      made: the equation that computes a variable. readers: the equations that read it.
    """

    def __init__(self, program: ClosedJaxpr):
        jaxpr = program.jaxpr
        self.eqns: list[JaxprEqn] = list(jaxpr.eqns)
        self.results = {v for v in jaxpr.outvars if isinstance(v, Var)}
        self.producer: dict[Var, JaxprEqn] = {v: eqn for eqn in self.eqns for v in eqn.outvars}
        self.readers: dict[Var, list[JaxprEqn]] = {}
        for eqn in self.eqns:
            for v in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)):
                self.readers.setdefault(v, []).append(eqn)
        values = zip(jaxpr.constvars, program.consts)
        self._constants = {v: c for v, c in values if not isinstance(c, jax.core.Tracer)}
        self._values: dict[Var, np.ndarray | None] = {}
        self._is_known = set(self._constants)
        for eqn in self.eqns:
            if _is_plain(eqn) and all(isinstance(a, Literal) or a in self._is_known for a in eqn.invars):
                self._is_known.update(eqn.outvars)

    def constant(self, atom: Atom) -> np.ndarray | None:
        """The value of a constant of the program, computed; None for what depends on its arguments."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom not in self._is_known or math.prod(atom.aval.shape) > _LARGEST:
            return None
        if atom not in self._values:
            self._values[atom] = self._computed(atom)
        return self._values[atom]

    def number(self, atom: Atom) -> float | None:
        """The value of a constant of which all elements are one number."""
        atom = self.peel(atom, _places(atom))[0]
        value = self.constant(atom)
        if value is None or value.size != 1 or not jnp.issubdtype(value.dtype, jnp.number):
            return None
        return None if jnp.issubdtype(value.dtype, jnp.complexfloating) else float(value.reshape(()))

    def _computed(self, atom: Var) -> np.ndarray:
        variables, needed = {atom}, []
        for eqn in reversed(self.eqns):
            if variables.intersection(eqn.outvars):
                needed.append(eqn)
                variables.update(a for a in eqn.invars if isinstance(a, Var))
        constants = [v for v in self._constants if v in variables]
        jaxpr = Jaxpr(constants, [], [atom], needed[::-1], debug_info=jax.make_jaxpr(lambda: ())().jaxpr.debug_info)
        with jax.ensure_compile_time_eval():
            return np.asarray(jax.core.eval_jaxpr(jaxpr, [self._constants[v] for v in constants])[0])

    def peel(self, atom: Atom, labels: Labels, casts: bool = False, also: Sequence[str] = ()) -> tuple[Atom, Labels]:
        """The value before its layout was changed, with its axes' labels; with `casts`, before its dtype was, too."""
        skipped = (*(("convert_element_type",) if casts else ()), *also)
        while isinstance(atom, Var) and atom in self.producer:
            eqn = self.producer[atom]
            name = eqn.primitive.name
            if name in LAYOUT:
                before = labels_before(eqn, labels)
                if before is None:
                    break
                labels = before
            elif name not in skipped:
                break
            atom = eqn.invars[0]
        return atom, labels

    def widened(self, atom: Atom) -> Atom:
        """The value before casts that lose nothing."""
        while isinstance(atom, Var) and atom in self.producer:
            eqn = self.producer[atom]
            if eqn.primitive.name != "convert_element_type" or not lossless(eqn.invars[0].aval.dtype, atom.aval.dtype):
                break
            atom = eqn.invars[0]
        return atom

    def name(self, atom: Atom) -> str | None:
        """The primitive that computes a value."""
        return self.producer[atom].primitive.name if isinstance(atom, Var) and atom in self.producer else None

    def only_reader(self, var: Var) -> JaxprEqn | None:
        """The equation that reads a variable, if one does and the level does not return it."""
        readers = self.readers.get(var, [])
        return readers[0] if len(readers) == 1 and var not in self.results else None

    def escaping(self, region: Iterable[JaxprEqn], last: JaxprEqn) -> bool:
        """Whether what the equations compute is read otherwise than on the way to `last`."""
        waiting = [v for eqn in region if eqn is not last for v in eqn.outvars]
        seen = set(waiting)
        while waiting:
            var = waiting.pop()
            if var in self.results:
                return True
            for reader in self.readers.get(var, []):
                if reader is last:
                    continue
                if reader.effects:
                    return True
                new = [v for v in reader.outvars if v not in seen]
                seen.update(new)
                waiting += new
        return False


def _places(atom: Atom) -> Labels:
    return tuple(range(len(atom.aval.shape)))


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether a constant may be computed through this equation."""
    if eqn.effects:
        return False
    if eqn.primitive.name in JIT:
        return all(_is_plain(inner) for inner in eqn.params["jaxpr"].jaxpr.eqns)
    return eqn.primitive.name in _COMPUTED


def lossless(narrow: object, wide: object) -> bool:
    """Whether every value of one dtype is a value of the other.

    >>> lossless(jnp.bfloat16, jnp.float32), lossless(jnp.float16, jnp.bfloat16), lossless(jnp.int8, jnp.bfloat16)
    (True, False, True)
    """
    if not isinstance(narrow, (type, np.dtype)) or not isinstance(wide, (type, np.dtype)):
        return False  # a key
    a, b = jnp.dtype(narrow), jnp.dtype(wide)
    if a == b:
        return True
    if a == np.bool_:
        return jnp.issubdtype(b, jnp.integer) or jnp.issubdtype(b, jnp.floating)
    if jnp.issubdtype(a, jnp.integer) and jnp.issubdtype(b, jnp.integer):
        return int(jnp.iinfo(b).min) <= int(jnp.iinfo(a).min) and int(jnp.iinfo(a).max) <= int(jnp.iinfo(b).max)
    plain = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))
    if b not in plain:
        return False
    if jnp.issubdtype(a, jnp.integer):
        digits = int(jnp.iinfo(a).max).bit_length()
        return digits <= int(jnp.finfo(b).nmant) + 1 and digits < int(jnp.finfo(b).maxexp)
    if a not in plain:
        return False
    x, y = jnp.finfo(a), jnp.finfo(b)
    return x.nmant <= y.nmant and x.maxexp <= y.maxexp and x.minexp - x.nmant >= y.minexp - y.nmant


class Fresh:
    """The label of an axis of size 1 that a layout adds."""


def labels_before(eqn: JaxprEqn, labels: Labels) -> Labels | None:
    """The labels of the operand of a layout equation, from those of its result; None if axes are joined or split."""
    operand, shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    name = eqn.primitive.name
    if name == "transpose":
        before: list[Any] = [None] * len(labels)
        for place, origin in enumerate(eqn.params["permutation"]):
            before[origin] = labels[place]
        return tuple(before)
    if name == "broadcast_in_dim":
        places = eqn.params["broadcast_dimensions"]
        return tuple(labels[p] if operand[i] == shape[p] else Fresh() for i, p in enumerate(places))
    return _reshaped(shape, labels, operand)


def labels_after(eqn: JaxprEqn, labels: Labels) -> Labels | None:
    """The labels of the result of a layout equation, from those of its operand."""
    operand, shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "transpose":
        return tuple(labels[origin] for origin in eqn.params["permutation"])
    if eqn.primitive.name == "broadcast_in_dim":
        after: list[Hashable] = [Fresh() for _ in shape]
        for i, place in enumerate(eqn.params["broadcast_dimensions"]):
            if operand[i] != shape[place]:
                return None
            after[place] = labels[i]
        return tuple(after) if all(n == 1 for n, a in zip(shape, after) if isinstance(a, Fresh)) else None
    return _reshaped(operand, labels, shape)


def _reshaped(shape: Sequence[int], labels: Labels, to: Sequence[int]) -> Labels | None:
    """The labels after axes of size 1 have come or gone."""
    proper = [(n, label) for n, label in zip(shape, labels) if n != 1]
    if [n for n, _ in proper] != [n for n in to if n != 1]:
        return None
    left = iter(proper)
    return tuple(Fresh() if n == 1 else next(left)[1] for n in to)


def operand_labels(operand: Atom, shape: Sequence[int], labels: Labels) -> Labels:
    """The labels of an operand of an elementwise equation with this result, along which it may have size 1."""
    operand_shape = operand.aval.shape
    if len(operand_shape) != len(shape):
        return ()
    return tuple(label if n == m else Fresh() for n, m, label in zip(operand_shape, shape, labels))


def same(shape: Sequence[int], a: Labels, b: Labels) -> bool:
    """Whether two labellings agree, axes of size 1 aside."""
    return len(a) == len(b) and all(n == 1 or x == y for n, x, y in zip(shape, a, b))
