"""A whole program rewritten: every level simplified, operations put in, bodies of loops, branches and jit as well."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from vishwamai.core.config import ambient_target, kernel_config
from vishwamai.core.errors import VishwamaiError
from vishwamai.core.explain import CallExplanation, explain
from vishwamai.core.jax_private import source_of
from vishwamai.rewrite import attention, norm
from vishwamai.rewrite.graph import JIT, Graph
from vishwamai.rewrite.inline import inlined, is_placed
from vishwamai.rewrite.match import Match, Near
from vishwamai.rewrite.names import JaxprEqn
from vishwamai.rewrite.report import Finding
from vishwamai.rewrite.simplify import Counts, donated, simplified, without_dead

_BODIES = {
    **dict.fromkeys((*JIT, "scan"), ("jaxpr",)),
    "closed_call": ("call_jaxpr",),
    "core_closed_call": ("call_jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
"""The inner programs that are rewritten, by primitive. Rules of gradients, kernels and shard_map are left alone."""


def bodies(eqn: JaxprEqn) -> Iterator[ClosedJaxpr]:
    """The inner programs of an equation that are rewritten."""
    for name in _BODIES.get(eqn.primitive.name, ()):
        value = eqn.params[name]
        yield from value if isinstance(value, (tuple, list)) else (value,)


def size(jaxpr: Jaxpr, but: Container[int] = ()) -> int:
    """Equations of a program and of its inner programs, except for those of the ids `but`."""
    return sum(1 + sum(size(b.jaxpr, but) for b in bodies(eqn) if id(b) not in but) for eqn in jaxpr.eqns)


class Rewriter:
    """The passes over one program for one target.

    Attributes:
      findings: recognised operations. counts: equations removed, by pass. calls: bodies of the calls put in, by id.
    """

    def __init__(self, target: str | None):
        self.target = target
        self.counts: Counts = Counts()
        self.findings: list[Finding] = []
        self._done: dict[int, tuple[ClosedJaxpr, ClosedJaxpr]] = {}
        self.calls: dict[int, ClosedJaxpr] = {}
        self._seen: set[object] = set()
        self._split = False

    def rewrite(self, program: ClosedJaxpr) -> ClosedJaxpr:
        self._split = _is_split(program.jaxpr)
        return self._level(program, ())

    def _level(self, program: ClosedJaxpr, path: tuple[str, ...]) -> ClosedJaxpr:
        program = simplified(program, self.counts)
        program = self._with_operations(program, path)
        eqns = [self._with_bodies(eqn, path) for eqn in program.jaxpr.eqns]
        return without_dead(ClosedJaxpr(program.jaxpr.replace(eqns=eqns), program.consts), self.counts)

    def _with_bodies(self, eqn: JaxprEqn, path: tuple[str, ...]) -> JaxprEqn:
        names = _BODIES.get(eqn.primitive.name, ())
        if not names:
            return eqn
        path = (*path, str(eqn.params.get("name") or eqn.primitive.name))
        changed: dict[str, object] = {}
        for name in names:
            value = eqn.params[name]
            many = isinstance(value, (tuple, list))
            new = [self._body(body, path) for body in (value if many else (value,))]
            changed[name] = type(value)(new) if many else new[0]
        return eqn.replace(params={**eqn.params, **changed})

    def _body(self, body: ClosedJaxpr, path: tuple[str, ...]) -> ClosedJaxpr:
        if id(body) in self.calls:
            return body
        if id(body) not in self._done:
            self._done[id(body)] = (body, self._level(body, path))
        return self._done[id(body)][1]

    def _with_operations(self, program: ClosedJaxpr, path: tuple[str, ...]) -> ClosedJaxpr:
        flat = simplified(inlined(program, set(self.calls)), Counts())
        graph = Graph(flat)
        given_away = donated(flat.jaxpr)
        calls: dict[JaxprEqn, JaxprEqn] = {}
        for match in (*attention.find(graph), *norm.find(graph)):
            if isinstance(match, Near):
                self._report(match.operation, match.eqn, path, match.reason)
                continue
            reason = self._hinders(graph, match, given_away)
            if reason is None:
                call, plan = self._call(match)
                if isinstance(call, str):
                    reason = call
                else:
                    calls[match.last] = call
                    self._report(match.operation, match.last, path, match.words, plan)
                    continue
            self._report(match.operation, match.last, path, f"{reason} ({match.words})")
        if not calls:
            return program
        eqns = [calls.get(eqn, eqn) for eqn in flat.jaxpr.eqns]
        replaced = ClosedJaxpr(flat.jaxpr.replace(eqns=eqns), flat.consts)
        return without_dead(replaced, self.counts, "recognised")

    def _hinders(self, graph: Graph, match: Match, given_away: set[object]) -> str | None:
        """Why a match is not taken, whatever its target."""
        if graph.escaping(match.region, match.last):
            return "a value inside of it is used elsewhere, too"
        if any(eqn.effects for eqn in match.region):
            return "an effect is inside of it"
        if given_away.intersection(match.operands):
            return "an operand is donated to another program"
        avals = [v.aval for v in (*match.operands, *match.last.outvars)]
        if any(_is_placed(aval) for aval in avals):
            return "its arrays are on explicit or manual mesh axes; call the operation there yourself"
        if any(getattr(aval, "weak_type", False) for aval in avals):
            return "its dtype is weak"
        if self._split and ("tpu" in (self._platform(), jax.default_backend())):
            return (
                "the program is split over devices by the compiler, which cannot split a TPU kernel; call the "
                "operation in shard_map"
            )
        return None

    def _targeted(self) -> AbstractContextManager[object]:
        """A block that plans for the target."""
        return kernel_config() if self.target is None else kernel_config(target=self.target)

    def _platform(self) -> str:
        with self._targeted():
            return ambient_target().platform

    def _call(self, match: Match) -> tuple[JaxprEqn | str, CallExplanation | None]:
        """The equation that calls the operation, and which implementation runs; or the reason why there is none."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in match.operands]
        try:
            plan = explain(match.call, *shapes, target=self.target).calls[0]
            if plan.runs == "xla":
                others = "; ".join(
                    f"{v.implementation}: {v.reason}" for v in plan.verdicts if v.implementation != "xla"
                )
                return f"no kernel of ours runs here, and XLA has the program already: {others}", None
            with self._targeted():
                traced = jax.make_jaxpr(jax.jit(match.call))(*shapes)
        except VishwamaiError as error:
            return str(error), None
        (call,) = traced.jaxpr.eqns
        assert not traced.consts and [v.aval for v in call.outvars] == [v.aval for v in match.last.outvars]
        self.calls[id(call.params["jaxpr"])] = call.params["jaxpr"]
        names = dict(zip(traced.jaxpr.invars, match.operands))
        invars = [names[v] for v in call.invars]
        return call.replace(invars=invars, outvars=match.last.outvars, source_info=match.last.source_info), plan

    def _report(
        self, operation: str, eqn: JaxprEqn, path: tuple[str, ...], words: str, plan: CallExplanation | None = None
    ) -> None:
        key = (operation, id(eqn.source_info))
        if key in self._seen:
            return
        self._seen.add(key)
        where = " in ".join((source_of(eqn), *reversed(path)))
        self.findings.append(Finding(operation, where, plan is not None, words, plan))


def _is_placed(aval: Any) -> bool:
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    varies = getattr(aval, "vma", None) or getattr(aval, "mat", None) and getattr(aval.mat, "varying", None)
    return (mesh is not None and not mesh.empty) or bool(varies)


def _is_split(jaxpr: Jaxpr) -> bool:
    """Whether a program says how the compiler is to split its arrays."""
    return any(
        eqn.primitive.name == "sharding_constraint"
        or (eqn.primitive.name in JIT and is_placed(eqn))
        or any(_is_split(body.jaxpr) for body in bodies(eqn))
        for eqn in jaxpr.eqns
    )


def rewritten(program: ClosedJaxpr, target: str | None) -> tuple[ClosedJaxpr, Rewriter]:
    """The program after all passes, and what they did."""
    rewriter = Rewriter(target)
    return rewriter.rewrite(program), rewriter
