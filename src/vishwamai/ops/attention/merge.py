"""`merge_attention`: attention over all keys from attentions over parts of them, by their logsumexps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

from jax import lax

from vishwamai.core.arguments import checks_its_own
from vishwamai.core.arrays import cast, namespace
from vishwamai.core.errors import ShapeError
from vishwamai.core.gpu import framework
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.shape_checks import check_float
from vishwamai.core.spec import array_spec, as_array
from vishwamai.core.types import AnyArray, PyTree

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

_NAME = "merge_attention"


@checks_its_own("outputs", "lses")
def merge_attention(
    outputs: Sequence[Float[Array, "... rows v_dim"]],
    lses: Sequence[Float[Array, "... rows"]],
    *,
    layout: Literal["bhsd", "bshd"] = "bhsd",
) -> tuple[Float[Array, "... rows v_dim"], Float[Array, "... rows"]]:
    """Attention over the union of disjoint sets of keys, from the attention over each: out = sum_p exp(L_p - L) out_p,
    with L = log(sum_p exp(L_p)).

    It serves keys that are split over devices or steps (ring attention), and a prefix that many sequences share, whose
    attention is computed once (cascades). Rabe and Staats, "Self-attention does not need O(n^2) memory" (2021); Ye et
    al., "Cascade inference" (2024). Differentiable by JAX, to any order.

    Args:
      outputs: outputs of each part `[..., rows, v_dim]`: the arrays that `flash_attention`, `flash_attention_varlen` or
        `ragged_paged_attention` return with `return_lse=True`.
      lses: natural logsumexp of each part. A part of which a row sees no key has -inf there, and counts for
        nothing. Sinks enter every logsumexp, so pass them in one part only.
      layout: how the logsumexps lie. "bhsd": `[..., rows]`, as the outputs without their last axis (`flash_attention`,
        `ragged_paged_attention`). "bshd": `[..., heads, seq]` of outputs `[..., seq, heads, v_dim]` (`flash_attention`
        with `layout="bshd"`, `flash_attention_varlen`).

    Returns:
      (out, logsumexp), shaped as each part's: `out` in the outputs' dtype, `logsumexp` float32 (float64 for float64).
      Merged pairs can be merged again.

    Raises:
      ShapeError: there are no parts, not as many logsumexps as outputs, or their shapes or dtypes differ.

    >>> import jax, jax.numpy as jnp, vishwamai
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 64, 16))
    >>> halves = [slice(0, 20), slice(20, 64)]
    >>> parts = [vishwamai.flash_attention(q, k[:, :, h], v[:, :, h], return_lse=True) for h in halves]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> bool(jnp.allclose(out, vishwamai.flash_attention(q, k, v), atol=1e-5))
    True
    """
    check_parts(outputs, lses)
    outs = [as_array(_NAME, f"outputs[{i}]", x) for i, x in enumerate(outputs)]
    return merged(outs, [as_array(_NAME, f"lses[{i}]", x) for i, x in enumerate(lses)], layout)


def check_parts(outputs: PyTree, lses: object) -> None:
    """Raises ShapeError where there are no parts, or not as many logsumexps as outputs."""
    if not isinstance(outputs, (tuple, list)) or not isinstance(lses, (tuple, list)) or not outputs:
        _fail("`outputs` and `lses` must be tuples or lists with an array for each part, one at least.")
    if len(outputs) != len(lses):
        _fail(f"there are {len(outputs)} `outputs` and {len(lses)} `lses`; pass one logsumexp for each output.")


def merged(outs: Sequence[PyTree], lses: Sequence[PyTree], layout: str) -> tuple[AnyArray, AnyArray]:
    """What `merge_attention` returns, of arrays of JAX or of torch."""
    first, dtype = outs[0], array_spec(outs[0]).dtype
    if first.ndim < 2 or (layout == "bshd" and first.ndim < 3):
        _fail(f"`outputs[0]` has shape {tuple(first.shape)}; pass [..., rows, v_dim].")
    shape = tuple(first.shape[:-1])
    if layout == "bshd":
        shape = (*shape[:-2], shape[-1], shape[-2])
    for i, (out, lse) in enumerate(zip(map(array_spec, outs), map(array_spec, lses), strict=True)):
        check_float(_NAME, f"outputs[{i}]", out.dtype)
        check_float(_NAME, f"lses[{i}]", lse.dtype)
        if out.shape != tuple(first.shape) or out.dtype != dtype:
            _fail(
                f"`outputs[{i}]` is {out.dtype.name} {out.shape}, but `outputs[0]` is {dtype.name} "
                f"{tuple(first.shape)}; pass parts of one shape and dtype."
            )
        if lse.shape != shape:
            swapped = shape[:-2] + shape[-2:][::-1]
            alternative = {"bhsd": "bshd", "bshd": "bhsd"}[layout]
            fix = f"; pass layout={alternative!r}" if lse.shape == swapped else f"; pass {shape}"
            _fail(f"`lses[{i}]` has shape {lse.shape}, but the outputs {tuple(first.shape)} have one {shape}{fix}.")
    xp, wide = namespace(first), accumulator_dtype(dtype)
    lse = xp.stack([cast(x, wide) for x in lses])  # [parts, ...]
    top = xp.amax(lse, 0)
    top = xp.where(top == -math.inf, 0.0, top)
    top = top.detach() if framework(first) == "torch" else lax.stop_gradient(top)
    seen = lse > -math.inf
    # Zero twice, so that the derivative of what is not seen is 0 too.
    weights = xp.where(seen, xp.exp(xp.where(seen, lse, top) - top), 0.0)
    total = weights.sum(0)
    alive = total > 0
    safe = xp.where(alive, total, 1.0)
    shares = weights / safe
    if layout == "bshd":
        shares = xp.swapaxes(shares, -1, -2)
    out = sum(share[..., None] * cast(x, wide) for share, x in zip(shares, outs, strict=True))
    return cast(out, dtype), xp.where(alive, top + xp.log(safe), -math.inf)


def _fail(text: str) -> NoReturn:
    raise ShapeError(f"{_NAME}: {text}")
