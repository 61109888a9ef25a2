"""ALiBi: a bias of `-slope * |p - j|` for the query that stands at key p and key j, with a slope for each head.

Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation" (2022). The
plain JAX implementations compute it block by block, the TPU and Triton kernels tile by tile, the CPU kernels vector by
vector. No matrix of distances is held.
"""

from __future__ import annotations

from typing import NoReturn

import jax
import jax.numpy as jnp

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.masks import grouped
from vishwamai.ops.attention.spec import AttentionSpec, Operands


@jax.custom_vjp
def constant_slopes(slopes: AnyArray) -> AnyArray:
    """The slopes as they are; whoever asks for their gradient gets an error."""
    return slopes


def _no_gradient(saved: PyTree, cotangent: AnyArray) -> NoReturn:
    raise UnsupportedError(
        "flash_attention: `alibi_slopes` has no gradient; differentiate with respect to the other arguments, or pass "
        "the distances times the slopes as `bias`, which has one."
    )


constant_slopes.defvjp(lambda slopes: (slopes, None), _no_gradient)


def places(spec: AttentionSpec, operands: Operands, rows: jax.Array) -> jax.Array:
    """The key that each of `rows [Tq]` stands at, `[Tq]` or `[B or 1, Tq]`; all of them where they are operands."""
    return rows + spec.causal_offset if operands.q_positions is None else operands.q_positions


def bias(spec: AttentionSpec, slopes: jax.Array, where: jax.Array, columns: jax.Array) -> jax.Array:
    """What is added to the logits, after the soft-cap, in the accumulation dtype.

    Args:
      slopes: broadcast with `where` and `columns`, as which they are.
      where: the key that a query stands at.
    """
    return -slopes.astype(spec.accumulator) * jnp.abs(where - columns).astype(spec.accumulator)


def of_all(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """`bias` of the whole score matrix, `[B or 1, Hkv, G, Tq, Tk]`."""
    assert operands.slopes is not None
    where = places(spec, operands, jnp.arange(spec.q_len))
    where = where.reshape(-1, 1, 1, spec.q_len, 1)
    slopes = grouped(operands.slopes, spec.kv_heads)[..., None, None]
    return bias(spec, slopes, where, jnp.arange(spec.kv_len))
