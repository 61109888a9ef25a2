"""The public loss: `linear_cross_entropy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.config import current_config, narrowed
from vishwamai.core.op import Op
from vishwamai.core.precision import PrecisionConfig, accumulator_dtype, resolve_precision
from vishwamai.core.sharding import Axes, follow_explicit_axes
from vishwamai.core.spec import array_spec, as_array
from vishwamai.ops.loss.chunked import XLA_CHUNKED
from vishwamai.ops.loss.cpu import NATIVE
from vishwamai.ops.loss.gpu import TRITON
from vishwamai.ops.loss.reference import XLA
from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs, check, loss_axes
from vishwamai.ops.loss.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

LOSS: Op[LossSpec] = Op("loss", (PALLAS_TPU, TRITON, NATIVE, XLA_CHUNKED, XLA), loss_axes, shareable=("weight", "bias"))


def linear_cross_entropy(
    x: Float[Array, "*tokens features"],
    weight: Float[Array, "words features"],
    labels: Int[Array, "*tokens"],
    *,
    bias: Float[Array, " words"] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_logsumexp: bool = False,
    vocab_axis: str | tuple[str, ...] | None = None,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> Any:
    """Cross entropy of the logits `x @ weight.T + bias`, which are never held, neither forward nor backward.

    With logits z (capped as `softcap * tanh(z / softcap)`), V words, a label y and `lse = log(sum(exp(z)))`, the loss of a token is

        lse - (1 - label_smoothing) * z[y] - label_smoothing / V * sum(z) + z_loss * lse^2

    Szegedy et al., "Rethinking the Inception Architecture" (2016) for the smoothing; Chowdhery et al., "PaLM" (2022) for the z-loss; the algorithm is
    that of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2025).

    Args:
      x: `[..., features]`, bfloat16, float16, float32 or float64: the last hidden states.
      weight: `[words, features]`; beside an `x` of another dtype, both are promoted as in JAX.
      labels: `[...]`, integers from 0 to words-1, or `ignore_index`. Any other label makes its loss NaN.
      bias: `[words]`, or None.
      softcap: bound of the logits, or None.
      label_smoothing: share of the target that is spread evenly over all words.
      z_loss: weight of the squared logsumexp.
      ignore_index: label of tokens whose loss is 0 and that no gradient reaches.
      reduction: "none" gives the loss of each token, "sum" their sum, "mean" the sum divided by the number of tokens that are not ignored (0 if all are).
      return_logsumexp: return the logsumexp of every token too, the ignored ones included; it is differentiable.
      vocab_axis: inside a `shard_map`, the mesh axis (or axes) over which `weight` and `bias` are split by words, in order: each device passes its
        part, labels count over all parts, and every device gets the same loss. Arrays on explicit mesh axes need no such word: the vocabulary may be
        split there, unless the same axis splits the tokens.
      precision: of float32 products: "highest" (the default) or "high"; None takes the ambient one.
      config: tiles (a `LossConfig` or `ChunkedLossConfig`), a block size in words, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      The loss, float32 (float64 for float64 operands): a scalar, or `[...]` for "none"; with `return_logsumexp` the pair (loss, logsumexp `[...]`).
      Gradients exist for `x`, `weight` and `bias`.

    Raises:
      ShapeError: the arguments contradict one another.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp
    >>> x, weight = jnp.zeros((2, 4)), jnp.ones((8, 4))
    >>> print(f"{linear_cross_entropy(x, weight, jnp.array([3, -100])):.4f}")  # log(8)
    2.0794
    >>> linear_cross_entropy(x, weight, jnp.array([3, -100]), reduction="none").round(4).tolist()[1]
    0.0
    """
    named = (("x", x), ("weight", weight), ("labels", labels))
    x, weight, labels = (as_array("linear_cross_entropy", name, a) for name, a in named)
    bias = None if bias is None else jnp.asarray(bias)
    check(x, weight, labels, bias, softcap, label_smoothing, z_loss, ignore_index, reduction)
    x, weight = narrowed(x, weight)
    common = jnp.promote_types(x.dtype, weight.dtype)
    acc = accumulator_dtype(common)
    products = resolve_precision(precision, current_config().precision, common)
    labels = labels.astype(jnp.int32)
    first = 0 if vocab_axis is None else lax.axis_index(vocab_axis) * weight.shape[0]

    def run(x: Any, weight: Any, bias: Any, labels: Any, words: Any) -> Any:
        operands = Operands(
            x.reshape(1, -1, x.shape[-1]).astype(common),
            weight[None].astype(common),
            None if bias is None else bias[None].astype(acc),
            (labels - words[0]).reshape(1, -1),
        )
        shapes = Operands(*(None if o is None else array_spec(o) for o in operands))
        spec = LossSpec(shapes, None if softcap is None else float(softcap), products, label_smoothing > 0)
        outputs = LOSS(spec, operands, config=config, implementation=implementation)
        return Outputs(*(None if y is None else y.reshape(*labels.shape, 1) for y in outputs))

    tokens = tuple(f"t{i}" for i in range(labels.ndim))
    row = (*tokens, "v")
    dims = ((*tokens, "d"), ("v", "d"), None if bias is None else ("v",), tokens, ("v",))
    axes = Axes(dims, Outputs(row, row, row if label_smoothing > 0 else None), frozenset((*tokens, "v")))
    # The words' own numbers tell a part of the vocabulary which part it is.
    words = jnp.arange(weight.shape[0], dtype=jnp.int32)
    parts = follow_explicit_axes(run, axes, x, weight, bias, labels - first, words)
    logsumexp, at_label, total = _combined(parts, vocab_axis)

    size = weight.shape[0] * (1 if vocab_axis is None else lax.axis_size(vocab_axis))
    loss = logsumexp - (1.0 - label_smoothing) * at_label
    if total is not None:
        loss = loss - label_smoothing / size * total
    if z_loss:
        loss = loss + z_loss * jnp.square(logsumexp)
    counted = labels != ignore_index
    unknown = (labels < 0) | (labels >= size)
    loss = jnp.where(counted, loss + jnp.where(unknown, jnp.nan, 0.0), 0.0)
    if reduction != "none":
        loss = jnp.sum(loss)
    if reduction == "mean":
        loss = loss / jnp.maximum(jnp.sum(counted), 1)
    return (loss, logsumexp) if return_logsumexp else loss


def _combined(parts: Outputs, vocab_axis: Any) -> Outputs:
    """The outputs `[...]` of the whole vocabulary from those of its parts: along the last axis, and over the devices of `vocab_axis`."""
    if parts.logsumexp.shape[-1] == 1 and vocab_axis is None:
        return Outputs(*(None if y is None else y[..., 0] for y in parts))

    def total(y: Any) -> Any:
        y = jnp.sum(y, axis=-1)
        return y if vocab_axis is None else lax.psum(y, vocab_axis)

    top = jnp.max(lax.stop_gradient(parts.logsumexp), axis=-1)
    top = top if vocab_axis is None else lax.pmax(top, vocab_axis)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    logsumexp = top + jnp.log(total(jnp.exp(parts.logsumexp - top[..., None])))
    return Outputs(logsumexp, total(parts.label_logit), None if parts.logit_sum is None else total(parts.logit_sum))
