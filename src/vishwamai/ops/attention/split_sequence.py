"""Attention of arrays whose sequence is split over explicit mesh axes: around a ring, by an exchange of heads, by parts
of the keys, or gathered, and which of them.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from vishwamai.core import dims, jax_errors, observe
from vishwamai.core.config import current_config
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.sharding import Axes, assigned, explicit_mesh, follow_explicit_axes, match_varying, mesh_axes
from vishwamai.core.signature import Signature
from vishwamai.ops.attention.op import ATTENTION
from vishwamai.ops.attention.reference import XLA
from vishwamai.ops.attention.ring_hops import ring, why_not_ring
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.ops.attention.split_keys import attend_keys
from vishwamai.ops.attention.ulysses_exchange import exchange, restored, why_not_ulysses

_SPLIT = "sequence"
"""The factor of queries and keys together, or of keys alone."""


def attend_split(
    spec: AttentionSpec, signature: Signature, arrays: Operands, *, config: Any, implementation: str | None
) -> Outputs | None:
    """The op's outputs in the caller's layout, of arrays whose sequences stay split; None where key and value are not
    split along theirs by the same mesh axes, the query is split by others, or they have to be gathered.

    Raises:
      UnsupportedError: the ambient `split_sequence` names a way that cannot serve the call; or forward-mode
        differentiation.
    """
    mesh = explicit_mesh(arrays[:3])
    if mesh is None:
        return None
    of_query, of_keys = _over(signature, arrays)
    over = of_keys or ()
    if not over or (of_query and of_query != over):
        return None
    axes = _axes(signature, spec, arrays, with_query=bool(of_query))
    found = assigned(mesh, axes, arrays)
    size = math.prod(mesh.shape[axis] for axis in over)
    if found.get(_SPLIT) != over or size == 1:
        return None
    heads = spec.q_heads // math.prod(mesh.shape[axis] for axis in found.get("heads", ()))
    named = implementation or current_config().implementation
    if of_query:
        way, why = _way(spec, size, heads, named)
    else:
        way, why = _way_of_keys(spec, named)
    what = "query, key and value" if of_query else "key and value"
    observe.note(f"attention: {what} are split along the sequence over {', '.join(over)} ({size}): {why}")
    if way is None:
        return None

    def local(shards: Operands) -> Outputs:
        operands = signature.pack(shards, spec)
        if way == "ring":
            outputs = ring(over, size, spec, operands, config=config, implementation=implementation)
        elif way == "keys":
            outputs = attend_keys(over, spec, operands, config=config, implementation=implementation)
        else:
            whole = exchange(over, match_varying(operands))
            outputs = ATTENTION(spec.localize(whole), whole, config=config, implementation=implementation)
            outputs = jax.tree.map(lambda y: restored(over, y), outputs)
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


def _way(spec: AttentionSpec, size: int, heads: int, implementation: str | None) -> tuple[str | None, str]:
    """ "ring", "ulysses" or None, with the reason in words; `heads` are the query heads of a device."""
    wanted = current_config().split_sequence
    if implementation == XLA.name:
        return None, f"it is gathered, because {XLA.name!r} is the definition of whole sequences."
    reasons = {"ring": why_not_ring(spec), "ulysses": why_not_ulysses(spec, heads, size)}
    said = {
        "ring": "keys and values travel around a ring (ring attention)",
        "ulysses": "the devices exchange sequence for heads (Ulysses)",
    }
    if wanted == "gather":
        return None, 'it is gathered, because `split_sequence` is "gather".'
    if wanted is not None:
        reason = reasons[wanted]
        if reason is not None:
            raise UnsupportedError(
                f"flash_attention: `split_sequence` is {wanted!r}, which cannot serve this call: {reason} Pass another "
                "way, or None to let the library choose."
            )
        return wanted, f"{said[wanted]}, as `split_sequence` says."
    if reasons["ring"] is None:
        return "ring", f"{said['ring']}, which serves any number of heads and keeps memory linear in a device's part."
    if reasons["ulysses"] is None:
        return "ulysses", f"{said['ulysses']}, because a ring declines: {reasons['ring']}"
    return None, f"it is gathered; a ring declines: {reasons['ring']} Ulysses declines: {reasons['ulysses']}"


def _way_of_keys(spec: AttentionSpec, implementation: str | None) -> tuple[str | None, str]:
    """ "keys" or None, with the reason in words, where the queries are not split."""
    if implementation == XLA.name:
        return None, f"they are gathered, because {XLA.name!r} is the definition of whole sequences."
    if current_config().split_sequence == "gather":
        return None, 'they are gathered, because `split_sequence` is "gather".'
    if spec.blocks is not None:
        return None, "they are gathered, because a block mask is of the whole score matrix."
    return "keys", "each device attends to its own keys, and the parts are merged by their logsumexps."


def _over(signature: Signature, arrays: Operands) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The mesh axes over which the queries, and keys and values, are split along their sequence; None where those of
    keys and values differ.
    """
    found = []
    for x, text, word in zip(arrays[:3], signature.operands[:3], ("q_len", "kv_len", "kv_len"), strict=True):
        axis = [dim.name for dim in dims.parse(text)].index(word)
        found.append(mesh_axes([*jax.typeof(x).sharding.spec, *[None] * 4][axis]))
    query, key, value = found
    return query, key if key == value else None


def _axes(signature: Signature, spec: AttentionSpec, arrays: Operands, with_query: bool) -> Axes:
    """The factors of the caller's arrays, where the sequence is a factor that may be split.

    With the queries it is one factor of both, and `bias` and `mask` have the keys of all devices. Without them it is
    the keys', over whose parts the function merges.
    """
    found = signature.axes(spec, arrays, ATTENTION.split(spec, False))

    def renamed(name: str, factors: Any) -> Any:
        if factors is None:
            return None
        if not with_query:
            return tuple(_SPLIT if factor == "kv_len" else factor for factor in factors)
        split = {"q_len", "kv_len"} if name in ("key", "value", "kv_segment_ids") else {"q_len"}
        return tuple(_SPLIT if factor in split else None if factor == "kv_len" else factor for factor in factors)

    def all_of(tree: Any) -> Any:
        return type(tree)(*(renamed(name, factors) for name, factors in tree._asdict().items()))

    merged = frozenset() if with_query else frozenset({_SPLIT})
    return Axes((all_of(found.arguments[0]),), all_of(found.results), found.splittable | {_SPLIT}, merged)
