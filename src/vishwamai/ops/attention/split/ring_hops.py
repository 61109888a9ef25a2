"""The hops of ring attention: what each adds, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.config import current_config
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.promotion import by_default
from vishwamai.core.sharding import match_varying
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.chunked import XLA_CHUNKED
from vishwamai.ops.attention.merge import merged
from vishwamai.ops.attention.op import ATTENTION
from vishwamai.ops.attention.reference import XLA
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.ops.attention.split.ring_plan import TRAVEL, Part, Ring
from vishwamai.ops.attention.split.ring_segments import reach_of


def ring(
    axes: tuple[str, ...],
    size: int,
    spec: AttentionSpec,
    operands: Operands,
    *,
    zigzag: bool = False,
    config: object = None,
    implementation: str | None = None,
) -> Outputs:
    """Output and logsumexp of this device's queries over the keys of all devices of `axes`; inside `shard_map`.

    Args:
      spec: the options, for which `why_not_ring` has nothing to say.
      operands: a device's part of the queries and the keys. Of `bias` and `mask` its rows, with the keys of all.
    """
    spec = dataclasses.replace(spec.localize(operands), return_lse=True)
    static = Ring(axes, size, spec, zigzag, config, implementation)
    return _one_program(static, match_varying(operands))


# Traced and lowered once for all hops that are alike.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _hop(ring: Ring, part: Part, operands: Operands) -> Outputs:
    return ATTENTION(_hop_spec(ring, part, operands), operands, config=ring.config, implementation=ring.implementation)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _hop_gradients(ring: Ring, part: Part, operands: Operands, rest: PyTree) -> Operands:
    """The gradients of one hop: the kernels' own backward pass, with the output and the logsumexp of all hops."""
    out, logsumexp, dout, dlse = rest
    named = ring.implementation or current_config().implementation
    if named == XLA.name:
        named = XLA_CHUNKED.name  # the reference reads no residuals
    return ATTENTION.gradients(
        _hop_spec(ring, part, operands),
        operands,
        Outputs(out, logsumexp),
        logsumexp,
        Outputs(dout, dlse),
        config=ring.config if named == ring.implementation else None,
        implementation=named,
    )


def _hop_spec(ring: Ring, part: Part, operands: Operands) -> AttentionSpec:
    mask = {"causal": part.causal, "causal_offset": part.causal_offset, "window": part.window, "blocks": part.blocks}
    return dataclasses.replace(ring.spec.localize(operands), **mask)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _one_program(ring: Ring, operands: Operands) -> Outputs:
    return _attend(ring, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, operands: Operands) -> Outputs:
    return _forward(ring, operands)[0]


def _forward(ring: Ring, operands: Operands) -> tuple[Outputs, Any]:
    keys = tuple(getattr(operands, name) for name in TRAVEL)
    reach = reach_of(ring, operands)
    total: PyTree = None
    for i, step in enumerate(ring.steps):

        def add(part: Part, total: PyTree, operands: Operands, keys: object, step: int = step) -> PyTree:
            for piece in ring.pieces(part):
                partial = _hop(ring, piece, ring.operands(operands, keys, step, piece))
                if total is None and piece.rows is None:
                    total = (partial.out.astype(partial.logsumexp.dtype), partial.logsumexp)
                else:
                    total = _merge(
                        total or _nothing(ring, operands, partial), (partial.out, partial.logsumexp), piece.rows
                    )
            return total

        def hop(total: object, keys: object, i: int = i, step: int = step, add: Any = add) -> PyTree:
            following = ring.next_keys(keys, i)  # asked for before the products that hide it
            return reach.seen(i, functools.partial(ring.by_place, step, add), total, operands, keys), following

        total, keys = reach.hop(i, hop, total, keys)
    result = Outputs(total[0].astype(operands.query.dtype), total[1])
    return result, (operands, result)


def _nothing(ring: Ring, operands: Operands, partial: Outputs) -> tuple[PyTree, PyTree]:
    """The attention over no keys, of all rows; `partial` is of some."""
    assert partial.logsumexp is not None
    shape, wide = operands.query.shape[:3], partial.logsumexp.dtype
    nothing = (jnp.zeros((*shape, ring.spec.v_dim), wide), jnp.full(shape, -math.inf, wide))
    return match_varying((nothing, partial))[0]


def _merge(total: tuple[Any, Any], partial: tuple[Any, Any], rows: int | None) -> tuple[PyTree, PyTree]:
    """The attention over two sets of keys; the sum so far has the dtype to sum in. `rows` is the half of its rows that
    the second one has.
    """
    out, lse = total
    if rows is None:
        return merged([out, partial[0].astype(out.dtype)], [lse, partial[1]], "bhsd")
    half = out.shape[2] // 2
    halves = [(out[:, :, :half], lse[:, :, :half]), (out[:, :, half:], lse[:, :, half:])]
    halves[rows] = _merge(halves[rows], partial, None)
    return jnp.concatenate([out for out, _ in halves], 2), jnp.concatenate([lse for _, lse in halves], 2)


def _backward(ring: Ring, saved: PyTree, cotangents: PyTree) -> tuple[Operands]:
    operands, (out, logsumexp) = saved
    dout, dlse = cotangents
    return (_gradients(ring, operands, (out, logsumexp, dout.astype(out.dtype), dlse.astype(logsumexp.dtype))),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(ring: Ring, operands: Operands, rest: PyTree) -> Operands:
    """The gradients of a device's operands. Those of keys and values travel with them."""
    length, wide = ring.spec.kv_len, rest[1].dtype
    keys = tuple(getattr(operands, name) for name in TRAVEL)
    zeros = {
        name: jnp.zeros(x.shape, wide)
        for name, x in zip(operands._fields, operands, strict=True)
        if x is not None and jnp.issubdtype(x.dtype, jnp.floating)
    }
    zeros = match_varying((zeros, operands, rest))[0]
    nothing = {name: zeros.pop(name) for name in ("key", "value")}
    reach, stay, travel = reach_of(ring, operands), zeros, nothing
    for i, step in enumerate(ring.steps):

        def add(part: Part, sums: Any, operands: Operands, rest: PyTree, keys: object, step: int = step) -> PyTree:
            source = (jax.lax.axis_index(ring.axes) - step) % ring.size * length
            for piece in ring.pieces(part):
                rows = piece.rows
                of_rows = rest if rows is None else tuple(jnp.split(x, 2, 2)[rows] for x in rest)
                gradients = _hop_gradients(ring, piece, ring.operands(operands, keys, step, piece), of_rows)

                def placed(name: str, x: AnyArray, gradients: PyTree = gradients, piece: Part = piece) -> PyTree:
                    y = getattr(gradients, name)
                    return x if y is None else ring.place(name, x, y, piece, source if name == "bias" else 0)

                sums = tuple({name: placed(name, x) for name, x in xs.items()} for xs in sums)
            return sums

        def hop(stay: Any, travel: Any, keys: object, i: int = i, step: int = step, add: Any = add) -> PyTree:
            # What travels, with the keys, arrives while the hop is computed, and is added to after it.
            travel = ring.shift(travel, step - ring.steps[i - 1]) if i else travel
            following = ring.next_keys(keys, i)
            compute = functools.partial(ring.by_place, step, add)
            stay, more = reach.seen(i, compute, (stay, nothing), operands, rest, keys)
            return stay, more if i == 0 else {name: x + more[name] for name, x in travel.items()}, following

        stay, travel, keys = reach.hop(i, hop, stay, travel, keys)
    home = [functools.partial(ring.shift, way=ring.size - step) for step in ring.steps]
    travel = reach.at_last(home, travel)
    sums = stay | travel
    return Operands(
        *(None if name not in sums else sums[name].astype(x.dtype) for name, x in operands._asdict().items())
    )


def _once(ring: Ring, operands: Operands, rest: object) -> PyTree:
    return _gradients(ring, operands, rest), None


def _twice(ring: Ring, saved: PyTree, cotangents: PyTree) -> PyTree:
    raise UnsupportedError(
        "attention over a split sequence is differentiable once, because a hop's gradients are of the logsumexp of all "
        "hops; for a second derivative gather the sequence: jax.sharding.reshard(x, jax.P()) on explicit axes, "
        "jax.lax.all_gather inside shard_map."
    )


_gradients.defvjp(by_default(_once), _twice)
_attend.defvjp(by_default(_forward), by_default(_backward))
