"""ALiBi: a bias of `-slope * |p - j|` for the query that stands at key p and key j, with a slope for each head.

Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation" (2022). The
plain JAX implementations compute it block by block, the TPU and Triton kernels tile by tile. The CPU kernels add one
number for each key instead: a causal query sees keys up to p only, where `-slope * (p - j)` is `slope * (j - c)` less a
constant of the row, which the softmax does not see.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.op import Implementation
from vishwamai.core.spec import ArraySpec
from vishwamai.core.target import Target
from vishwamai.ops.attention.masks import grouped
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs


@jax.custom_vjp
def constant_slopes(slopes: Any) -> Any:
    """The slopes as they are; whoever asks for their gradient gets an error."""
    return slopes


def _no_gradient(saved: Any, cotangent: Any) -> Any:
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


def why_not(spec: AttentionSpec) -> str | None:
    """The reason why one number for each key cannot stand for the slopes of `spec`, or None."""
    o = spec.operands
    if o.slopes is None:
        return None
    odd = (
        ("without `causal`", not spec.causal),
        ("with `softcap`", spec.softcap is not None),
        ("with `bias`", o.bias is not None),
        ("with `sinks`", o.sinks is not None),
        ("where rows have positions of their own", o.q_positions is not None),  # far from where the numbers are 0
    )
    found = next((words for words, given in odd if given), None)
    return None if found is None else f"`alibi_slopes` {found}; the kernel adds one number for each key."


def _center(spec: AttentionSpec) -> int:
    """Where the numbers of the keys are 0: in the middle, so that they are small."""
    return spec.causal_offset + spec.q_len // 2


def _by_key(spec: AttentionSpec) -> AttentionSpec:
    slopes = spec.operands.slopes
    numbers = ArraySpec((*slopes.shape, 1, spec.kv_len), spec.accumulator)
    return dataclasses.replace(spec, operands=spec.operands._replace(slopes=None, bias=numbers))


def _operands(spec: AttentionSpec, operands: Operands) -> Operands:
    slopes = operands.slopes[..., None, None].astype(spec.accumulator)
    numbers = slopes * (jnp.arange(spec.kv_len) - _center(spec)).astype(spec.accumulator)
    return operands._replace(slopes=None, bias=numbers)


def _constants(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """What the kernel's logits have too much, `[B or 1, Hq, Tq]`."""
    where = places(spec, operands, jnp.arange(spec.q_len)).reshape(-1, 1, spec.q_len) - _center(spec)
    return operands.slopes[..., None].astype(spec.accumulator) * where.astype(spec.accumulator)


def by_key(kernel: Implementation[AttentionSpec]) -> Implementation[AttentionSpec]:
    """The kernel, which knows no slopes, for calls with slopes as well."""

    def declined(spec: AttentionSpec, target: Target) -> str | None:
        if spec.operands.slopes is None:
            return kernel.why_not(spec, target)
        return why_not(spec) or kernel.why_not(_by_key(spec), target)

    def heuristic(spec: AttentionSpec, target: Target) -> Any:
        assert kernel.heuristic is not None
        return kernel.heuristic(spec if spec.operands.slopes is None else _by_key(spec), target)

    def notes(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
        if spec.operands.slopes is None:
            return tuple(kernel.notes(spec, target))
        return (*kernel.notes(_by_key(spec), target), "`alibi_slopes` are one number for each key")

    def forward(spec: AttentionSpec, config: Any, operands: Operands, residuals: bool) -> tuple[Outputs, Any]:
        if operands.slopes is None:
            return kernel.forward(spec, config, operands, residuals)
        outputs, kept = kernel.forward(_by_key(spec), config, _operands(spec, operands), residuals)
        more = _constants(spec, operands)
        logsumexp = None if outputs.logsumexp is None else outputs.logsumexp - more
        return outputs._replace(logsumexp=logsumexp), None if kept is None else kept - more

    def backward(
        spec: AttentionSpec, config: Any, operands: Operands, outputs: Outputs, residuals: Any, cotangents: Outputs
    ) -> Operands:
        if operands.slopes is None:
            return kernel.backward(spec, config, operands, outputs, residuals, cotangents)
        more = residuals + _constants(spec, operands)
        found = kernel.backward(_by_key(spec), config, _operands(spec, operands), outputs, more, cotangents)
        return found._replace(bias=None, slopes=jnp.zeros_like(operands.slopes))

    return dataclasses.replace(
        kernel,
        forward=forward,
        backward=backward,
        why_not=declined,
        heuristic=None if kernel.heuristic is None else heuristic,
        notes=notes,
    )
