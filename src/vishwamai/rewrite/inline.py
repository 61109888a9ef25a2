"""Small jitted helpers (`jnp.where`, `jnp.tril`, `jnp.var`) written out in the program that calls them."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, gensym

from vishwamai.rewrite.graph import JIT
from vishwamai.rewrite.names import Atom, JaxprEqn, Var

_SMALL = 32
"""Equations of the largest helper that is written out."""


def inlined(program: ClosedJaxpr, keep: set[int]) -> ClosedJaxpr:
    """The program with small helpers written out, but for those whose bodies' ids are in `keep`."""
    jaxpr = program.jaxpr
    if not any(_may_inline(eqn, keep) for eqn in jaxpr.eqns):
        return program
    new = gensym()
    eqns: list[JaxprEqn] = []
    constants = list(zip(jaxpr.constvars, program.consts))

    def write(inner: Jaxpr, names: dict[Var, Atom], top: bool) -> None:
        def named(atom: Atom) -> Any:
            return names.get(atom, atom) if isinstance(atom, Var) else atom

        for eqn in inner.eqns:
            invars = [named(a) for a in eqn.invars]
            if not _may_inline(eqn, keep):
                outvars = eqn.outvars if top else [new(v.aval) for v in eqn.outvars]
                names.update(zip(eqn.outvars, outvars))
                eqns.append(eqn.replace(invars=invars, outvars=outvars))
                continue
            body = eqn.params["jaxpr"]
            renaming: dict[Var, object] = dict(zip(body.jaxpr.invars, invars))
            for var, value in zip(body.jaxpr.constvars, body.consts):
                renaming[var] = new(var.aval)
                constants.append((renaming[var], value))
            write(body.jaxpr, renaming, top=False)
            outs = [renaming.get(v, v) if isinstance(v, Var) else v for v in body.jaxpr.outvars]
            names.update(zip(eqn.outvars, outs))

    names: dict[Var, Atom] = {}
    write(jaxpr, names, top=True)
    outvars = [names.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]
    flat = jaxpr.replace(eqns=eqns, outvars=outvars, constvars=[v for v, _ in constants])
    return ClosedJaxpr(flat, [c for _, c in constants])


def _may_inline(eqn: JaxprEqn, keep: set[int]) -> bool:
    if eqn.primitive.name not in JIT or eqn.effects or id(eqn.params["jaxpr"]) in keep:
        return False
    p = eqn.params
    plain = not any(p["donated_invars"]) and not p.get("compiler_options_kvs") and not is_placed(eqn)
    layouts = any(x is not None for name in ("in_layouts", "out_layouts") for x in p.get(name, ()))
    return plain and not layouts and _size(p["jaxpr"].jaxpr) <= _SMALL


def is_placed(eqn: JaxprEqn) -> bool:
    """Whether a jitted program states where its arrays are."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    mesh = eqn.params.get("ctx_mesh")
    return any(type(s).__name__ != "UnspecifiedValue" for s in shardings) or (mesh is not None and not mesh.empty)


def _size(jaxpr: Jaxpr) -> int:
    return sum(_size(eqn.params["jaxpr"].jaxpr) if eqn.primitive.name in JIT else 1 for eqn in jaxpr.eqns)
