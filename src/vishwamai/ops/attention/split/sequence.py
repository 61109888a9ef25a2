"""Attention of arrays whose sequence is split over explicit mesh axes: around a ring, by an exchange of heads, by parts
of the keys, or gathered, and which of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax

from vishwamai.core import dims, jax_errors, observe
from vishwamai.core.config import current_config
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.links import AxisLinks, links_known
from vishwamai.core.sharding import Axes, assigned, explicit_mesh, follow_explicit_axes, match_varying, mesh_axes
from vishwamai.core.signature import Signature
from vishwamai.core.spec import ArraySpec
from vishwamai.core.types import PyTree
from vishwamai.ops.attention.op import ATTENTION
from vishwamai.ops.attention.reference import XLA
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.ops.attention.split.keys import attend_keys
from vishwamai.ops.attention.split.ring_hops import ring
from vishwamai.ops.attention.split.ring_plan import why_not_ring, why_not_zigzag
from vishwamai.ops.attention.split.times import of_part, split_times, why_not_hybrid
from vishwamai.ops.attention.split.ulysses_exchange import exchange, gathered, own_rows, restored, why_not_ulysses

_SPLIT = "sequence"
"""The factor of queries and keys together, or of keys alone."""


def attend_split(
    spec: AttentionSpec, signature: Signature, arrays: Operands, *, config: object, implementation: str | None
) -> Outputs | None:
    """The op's outputs in the caller's layout, of arrays whose sequences stay split; None where key and value are not
    split along theirs by the same mesh axes, the query is split by others, or they have to be gathered.

    Raises:
      UnsupportedError: the ambient `split_sequence` names a way that cannot serve the call; or forward-mode
        differentiation.
    """
    decision = _decided(spec, signature, arrays, implementation)
    if decision.way is None:
        if (
            current_config().split_sequence == "zigzag"
            and (spec.causal or spec.window is not None)
            and decision.size != 1
        ):
            raise UnsupportedError(
                "flash_attention: `split_sequence` is 'zigzag', by which the sequence lies in zig-zag order, but "
                f"{decision.why} Split query, key and value along it over the same explicit mesh axes, or pass another "
                "way."
            )
        return None
    over, size, axes = decision.over, decision.size, decision.axes
    assert axes is not None, "there is a way"

    def local(shards: Operands) -> Outputs:
        operands = signature.pack(shards, spec)
        run = functools.partial(ring, spec=spec, config=config, implementation=implementation)
        if decision.way in ("ring", "zigzag"):
            outputs = run(over, size, operands=operands, zigzag=decision.way == "zigzag")
        elif decision.way == "keys":
            outputs = attend_keys(over, spec, operands, config=config, implementation=implementation)
        elif decision.way == "gather":
            complete = gathered(over, match_varying(operands))
            outputs = ATTENTION(spec.localize(complete), complete, config=config, implementation=implementation)
            outputs = jax.tree.map(lambda y: own_rows(over, y), outputs)
        else:
            exchanged = over if decision.way == "ulysses" else over[-1:]
            complete = exchange(exchanged, match_varying(operands))
            if decision.way == "hybrid":
                around = over[:-1]
                outputs = run(around, size // jax.lax.axis_size(exchanged), operands=complete)
            else:
                outputs = ATTENTION(spec.localize(complete), complete, config=config, implementation=implementation)
            outputs = jax.tree.map(lambda y: restored(exchanged, y), outputs)
        if not spec.return_lse:
            outputs = Outputs(outputs.out)
        return signature.unpack(spec.localize(operands), outputs, shards)

    try:
        return follow_explicit_axes(local, axes, arrays)
    except TypeError as error:
        if not jax_errors.lacks_forward_mode(error):
            raise
        raise UnsupportedError(
            "attention: over a split sequence it has a gradient (jax.grad, jax.vjp) but no forward mode (jax.jvp, "
            f"jax.jacfwd, jax.hessian); for that pass implementation={XLA.name!r}, which gathers the sequence."
        ) from error


class _Decision(NamedTuple):
    """How a call is spread.

    Attributes:
      way: "ring", "zigzag", "ulysses", "hybrid", "gather", "keys", or None for none of them.
      why: a sentence.
      over, size: the mesh axes over which the sequence is split, and their devices.
      axes: the factors of the arrays.
    """

    way: str | None
    why: str
    over: tuple[str, ...] = ()
    size: int = 0
    axes: Axes | None = None


def _decided(spec: AttentionSpec, signature: Signature, arrays: Operands, implementation: str | None) -> _Decision:
    mesh = explicit_mesh(arrays[:3])
    if mesh is None:
        return _Decision(None, "it is not on explicit mesh axes.")
    of_query, of_keys = _over(signature, arrays)
    over = of_keys or ()
    if not over or (of_query and of_query != over):
        return _Decision(None, "query, key and value are not split along it in the same way.")
    axes = _axes(signature, spec, arrays, with_query=bool(of_query))
    assignment = assigned(mesh, axes, arrays)
    size = math.prod(mesh.shape[axis] for axis in over)
    if assignment.get(_SPLIT) != over or size == 1:
        return _Decision(None, "the devices do not divide it.", size=size)
    local_spec = _of_device(
        spec, {name: math.prod(mesh.shape[axis] for axis in split) for name, split in assignment.items()}
    )
    named = implementation or current_config().implementation
    if of_query:
        way, why = _way(local_spec, mesh, over, named)
    else:
        way, why = _way_of_keys(spec, named)
    arrays_text = "query, key and value" if of_query else "key and value"
    observe.note(f"attention: {arrays_text} are split along the sequence over {', '.join(over)} ({size}): {why}")
    return _Decision(way, why, over, size, axes)


_SAID = {
    "ring": "keys and values travel around a ring (ring attention)",
    "zigzag": "keys and values travel around a ring, the sequence in zig-zag order (ring attention)",
    "ulysses": "the devices exchange sequence for heads (Ulysses)",
    "gather": "every device gathers the whole sequence and keeps its own rows of the result",
    "hybrid": "the last axis exchanges sequence for heads, the others are a ring (Ulysses and ring attention)",
}


def _of_device(spec: AttentionSpec, shares: dict[str, int]) -> AttentionSpec:
    """The spec of a device's batch elements and heads, with the whole sequence."""

    def part(x: ArraySpec | None, text: str) -> ArraySpec | None:
        if x is None:
            return None
        names = [dim.name for dim in dims.parse(text)]
        wide = zip(x.shape, names, strict=True)
        shape = tuple(n // shares.get(name, 1) if n > 1 and name in ("batch", "heads") else n for n, name in wide)
        return ArraySpec(shape, x.dtype)

    texts = dims.declared(Operands)
    return dataclasses.replace(spec, operands=Operands(*map(part, spec.operands, texts)))


def _way(spec: AttentionSpec, mesh: Any, over: tuple[str, ...], implementation: str | None) -> tuple[str | None, str]:
    """One of `_SAID` or None, with the reason in words.

    Args:
      spec: spec of a device's batch elements and heads, with the global sequence.
      mesh: the arrays'. over: its axes over which the sequence is split.
    """
    setting = current_config().split_sequence
    if implementation == XLA.name:
        return None, f"it is gathered, because {XLA.name!r} is the definition of whole sequences."
    if setting == "gather":
        return None, 'it is gathered, because `split_sequence` is "gather".'
    sizes = [mesh.shape[axis] for axis in over]
    reasons = _reasons(spec, sizes)
    if setting is not None:
        reason = reasons[setting]
        if reason is not None:
            raise UnsupportedError(
                f"flash_attention: `split_sequence` is {setting!r}, which cannot serve this call: {reason} Pass "
                "another way, or None to let the library choose."
            )
        return setting, f"{_SAID[setting]}, as `split_sequence` says."
    if reasons["ring"] is not None and reasons["ulysses"] is not None:
        return None, f"it is gathered; a ring declines: {reasons['ring']} Ulysses declines: {reasons['ulysses']}"
    links = links_known(mesh, over)
    if links is not None:
        estimate = split_times(spec, links, math.prod(sizes), _of_two(mesh, over))
        way = min(estimate.seconds.keys() - {"zigzag"}, key=lambda way: (estimate.seconds[way], way != "ring"))
        times = str(estimate).rstrip(".")  # a reason ends with one
        return way, f"{_SAID[way]}, which takes least time by the links ({links}): {times}."
    if reasons["ring"] is None:
        return "ring", f"{_SAID['ring']}, which serves any number of heads and keeps memory linear in a device's part."
    return "ulysses", f"{_SAID['ulysses']}, because a ring declines: {reasons['ring']}"


def _of_two(mesh: object, over: tuple[str, ...]) -> tuple[AxisLinks, AxisLinks] | None:
    """The links of the axes of a ring and of the last axis, which exchanges heads; None for one axis, or where they are
    not known.
    """
    if len(over) == 1:
        return None
    around, exchanged = links_known(mesh, over[:-1]), links_known(mesh, over[-1:])
    return None if around is None or exchanged is None else (around, exchanged)


def _reasons(spec: AttentionSpec, sizes: list[int]) -> dict[str, str | None]:
    """Why each way cannot serve a call; None where it can."""
    size = math.prod(sizes)
    local_spec = of_part(spec, size)
    around = why_not_ring(local_spec, size)
    hybrid = "it needs two mesh axes, and the sequence is split over one."
    if len(sizes) > 1:
        hybrid = why_not_hybrid(spec, size // sizes[-1], sizes[-1])
    return {
        "ring": around,
        "zigzag": around or why_not_zigzag(local_spec),
        "ulysses": why_not_ulysses(spec, spec.q_heads, size),
        "hybrid": hybrid,
    }


def _way_of_keys(spec: AttentionSpec, implementation: str | None) -> tuple[str | None, str]:
    """ "keys" or None, with the reason in words, where the queries are not split."""
    if implementation == XLA.name:
        return None, f"they are gathered, because {XLA.name!r} is the definition of whole sequences."
    if current_config().split_sequence == "gather":
        return None, 'they are gathered, because `split_sequence` is "gather".'
    if spec.blocks is not None:
        return None, "they are gathered, because a block mask is of the whole score matrix."
    if current_config().split_sequence == "zigzag" and (spec.causal or spec.window is not None):
        return None, "the queries are whole, and the keys are not in order."
    return "keys", "each device attends to its own keys, and the parts are merged by their logsumexps."


def _over(signature: Signature, arrays: Operands) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The mesh axes over which the queries, and keys and values, are split along their sequence; None where those of
    keys and values differ.
    """
    axes_of_arrays = []
    for x, text, word in zip(arrays[:3], signature.operands[:3], ("q_len", "kv_len", "kv_len"), strict=True):
        axis = [dim.name for dim in dims.parse(text)].index(word)
        axes_of_arrays.append(mesh_axes([*jax.typeof(x).sharding.spec, *[None] * 4][axis]))
    query, key, value = axes_of_arrays
    return query, key if key == value else None


def _axes(signature: Signature, spec: AttentionSpec, arrays: Operands, with_query: bool) -> Axes:
    """The factors of the caller's arrays, where the sequence is a factor that may be split.

    With the queries it is one factor of both, and `bias` and `mask` have the keys of all devices. Without them it is
    the keys', over whose parts the function merges.
    """
    axes = signature.axes(spec, arrays, ATTENTION.split(spec, False))

    def renamed(name: str, factors: Any) -> PyTree:
        if factors is None:
            return None
        if not with_query:
            return tuple(_SPLIT if factor == "kv_len" else factor for factor in factors)
        split = {"q_len", "kv_len"} if name in ("key", "value", "kv_segment_ids") else {"q_len"}
        return tuple(_SPLIT if factor in split else None if factor == "kv_len" else factor for factor in factors)

    def all_of(tree: PyTree) -> PyTree:
        return type(tree)(*(renamed(name, factors) for name, factors in tree._asdict().items()))

    merged = frozenset() if with_query else frozenset({_SPLIT})
    return Axes((all_of(axes.arguments[0]),), all_of(axes.results), axes.splittable | {_SPLIT}, merged)
