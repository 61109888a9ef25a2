"""Passes that keep every value: dead equations, common subexpressions, casts that undo each other.

An equation with an effect stays where it is. Variables that an inner program takes as donated are left alone, for
another name of one would be read after it is gone.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr

from vishwamai.rewrite.graph import lossless
from vishwamai.rewrite.names import Atom, JaxprEqn, Literal, Var

Counts = collections.Counter[str]
_NEVER_SHARED = frozenset(
    "rng_uniform optimization_barrier copy copy_p device_put empty empty2 create_token after_all checkpoint remat "
    "remat2 pallas_call ffi_call custom_call pure_callback io_callback debug_callback".split()
)


def simplified(program: ClosedJaxpr, counts: Counts) -> ClosedJaxpr:
    """The level with one equation for each value, without casts there and back, and without what nothing reads."""
    return without_dead(_shared(program, counts), counts)


def without_dead(program: ClosedJaxpr, counts: Counts, label: str = "dead") -> ClosedJaxpr:
    """The level without equations, and constants, that nothing reads."""
    jaxpr = program.jaxpr
    read = {v for v in jaxpr.outvars if isinstance(v, Var)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if not _has_effect(eqn) and not read.intersection(eqn.outvars):
            counts[label] += 1
            continue
        live.append(eqn)
        read.update(a for a in eqn.invars if isinstance(a, Var))
    if jaxpr.effects:  # an effect may name an argument by its place, constants included
        return ClosedJaxpr(jaxpr.replace(eqns=live[::-1]), program.consts)
    constants = [(v, c) for v, c in zip(jaxpr.constvars, program.consts) if v in read]
    reduced = jaxpr.replace(eqns=live[::-1], constvars=[v for v, _ in constants])
    return ClosedJaxpr(reduced, [c for _, c in constants])


def _has_effect(eqn: JaxprEqn) -> bool:
    return bool(eqn.effects) or bool(getattr(eqn.params.get("compiler_params"), "has_side_effects", False))


def _shared(program: ClosedJaxpr, counts: Counts) -> ClosedJaxpr:
    jaxpr = program.jaxpr
    given_away = donated(jaxpr)
    instead: dict[Var, Atom] = {}
    first: dict[Hashable, JaxprEqn] = {}
    widened: dict[Var, Atom] = {}  # what a lossless cast was made of
    unique = []
    for eqn in jaxpr.eqns:
        invars = [instead.get(a, a) if isinstance(a, Var) else a for a in eqn.invars]
        if any(a is not b for a, b in zip(invars, eqn.invars)):
            eqn = eqn.replace(invars=invars)
        if eqn.primitive.name == "convert_element_type":
            out, origin = eqn.outvars[0], invars[0]
            for source in (origin, widened.get(origin) if isinstance(origin, Var) else None):
                if source is not None and _may_stand_for(source, out, given_away):
                    instead[out] = source
                    counts["casts"] += 1
                    break
            else:
                if lossless(origin.aval.dtype, out.aval.dtype):
                    widened[out] = origin
            if out in instead:
                continue
        key = _key(eqn)
        if key is not None:
            earlier = first.setdefault(key, eqn)
            pairs = list(zip(eqn.outvars, earlier.outvars))
            if earlier is not eqn and all(_may_stand_for(old, new, given_away) for new, old in pairs):
                instead.update(pairs)
                counts["repeated"] += 1
                continue
        unique.append(eqn)
    outvars = [instead.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]
    return ClosedJaxpr(jaxpr.replace(eqns=unique, outvars=outvars), program.consts)


def donated(jaxpr: Jaxpr) -> set[Var]:
    """The variables that an inner program of this level may overwrite."""
    variables: set[Var] = set()
    for eqn in jaxpr.eqns:
        flags = eqn.params.get("donated_invars", ())
        variables.update(a for a, flag in zip(eqn.invars, flags) if flag and isinstance(a, Var))
    return variables


def _may_stand_for(atom: Atom, var: Var, given_away: set[Var]) -> bool:
    if isinstance(atom, Literal) or isinstance(atom, DropVar) or atom in given_away or var in given_away:
        return False
    return isinstance(var.aval, ShapedArray) and atom.aval == var.aval


def _key(eqn: JaxprEqn) -> Hashable:
    """What two equations of one value have in common; None for one that must stay."""
    shaped = all(isinstance(v.aval, ShapedArray) for v in (*eqn.invars, *eqn.outvars))
    if (
        _has_effect(eqn)
        or not shaped
        or eqn.primitive.name in _NEVER_SHARED
        or any(eqn.params.get("donated_invars", ()))
    ):
        return None
    inputs = tuple(_of_literal(a) if isinstance(a, Literal) else a for a in eqn.invars)
    parameters = tuple((name, _of_value(eqn.params[name])) for name in sorted(eqn.params))
    key = (eqn.primitive, inputs, parameters, eqn.ctx)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _of_literal(literal: Literal) -> Hashable:
    value = np.asarray(literal.val)
    return str(literal.aval), value.dtype, value.shape, value.tobytes()


def _of_value(value: object) -> Hashable:
    """A parameter for comparison: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_of_value, value))
    if isinstance(value, dict):
        return dict, tuple((_of_value(k), _of_value(v)) for k, v in value.items())
    if isinstance(value, np.integer):
        return int, int(value)
    if isinstance(value, float):
        return float, repr(value)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        return type(value), array.dtype, array.shape, array.tobytes()
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        return ClosedJaxpr, id(value)
    return type(value), value
