"""The op's numbers where a mesh axis splits the features of the weight, which is gathered some entries at a time.

Fully sharded parameters lie like this: every device has tokens of its own, and needs the whole weight for them. Here no
device has the whole weight, nor its whole gradient: a piece is gathered for the forward pass and again for the backward
pass, and its gradient leaves split. Rajbhandari et al., "ZeRO" (2020) gather each layer in the same way.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core import execute, sharding
from vishwamai.core.call_plan import CallPlan
from vishwamai.core.numbers import divisors
from vishwamai.core.promotion import by_default
from vishwamai.core.types import PyTree
from vishwamai.ops.loss.spec import Operands, Outputs

PIECE_BYTES = 1 << 28
"""Of the gradient of a piece, in the accumulation dtype, at most: what a device holds of a whole weight."""


def piece_count(vocab: int, features: int, itemsize: int) -> int:
    """Into how many equal pieces of entries a weight is cut, of so many features and bytes of a number.

    >>> piece_count(128256, 4096, 4), piece_count(32000, 512, 4)
    (8, 1)
    """
    return next(n for n in divisors(vocab) if vocab // n * features * itemsize <= PIECE_BYTES or n == vocab)


def numbers(plan: CallPlan, axis: str, count: int, operands: Operands) -> Outputs:
    """The outputs of each piece, `[count, groups, tokens]`, differentiable.

    Args:
      plan: plan of one piece, with all its features.
      axis: the mesh axis, inside a `shard_map`.
      operands: the op's, of all entries; the features of `weight` are this device's, in any dtype. No targets.
    """
    x, weight, bias, labels, _ = sharding.match_varying(operands)
    groups, vocab, features = weight.shape
    size = vocab // count
    pieces = weight.reshape(groups, count, size, features).swapaxes(0, 1)
    biases = None if bias is None else bias.reshape(bias.shape[0], count, size).swapaxes(0, 1)
    wide = x.astype(plan.spec.accumulator)  # in which the gradients of pieces are added up

    def piece_outputs(_: None, piece: tuple[object, object, object]) -> tuple[None, Outputs]:
        weight, bias, first = piece
        return None, _of_piece(plan, axis, Operands(wide.astype(x.dtype), weight, bias, labels - first, None))

    return lax.scan(piece_outputs, None, (pieces, biases, jnp.arange(0, vocab, size, dtype=labels.dtype)))[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_piece(plan: CallPlan, axis: str, operands: Operands) -> Outputs:
    return execute.run(plan, _gathered(axis, operands))


def _of_piece_fwd(plan: CallPlan, axis: str, operands: Operands) -> tuple[Outputs, tuple[Operands, Outputs]]:
    outputs: PyTree = _of_piece(plan, axis, operands)
    return outputs, (operands, outputs)


def _of_piece_bwd(plan: CallPlan, axis: str, saved: tuple[Operands, Outputs], cotangents: Outputs) -> tuple[Operands]:
    operands, outputs = saved
    gradients = execute.backward(plan, (_gathered(axis, operands), outputs, None, cotangents))
    wide = gradients.weight.astype(plan.spec.accumulator)
    weight = lax.psum_scatter(wide, axis, scatter_dimension=2, tiled=True)
    return (gradients._replace(weight=weight.astype(operands.weight.dtype), labels=None, targets=None),)


_of_piece.defvjp(by_default(_of_piece_fwd), by_default(_of_piece_bwd))


def _gathered(axis: str, operands: Operands) -> Operands:
    part = operands.weight.astype(operands.x.dtype)
    return operands._replace(weight=lax.all_gather(part, axis, axis=2, tiled=True))
