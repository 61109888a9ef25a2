"""The public loss: `linear_cross_entropy`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core import observe
from vishwamai.core.arguments import checked
from vishwamai.core.call_plan import CallPlan
from vishwamai.core.config import cast_for_matmul, current_config
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.op import Op
from vishwamai.core.precision import PrecisionConfig, accumulator_dtype, resolve_precision
from vishwamai.core.sharding import explicit_mesh, mesh_axis_size
from vishwamai.core.signature import array_specs, public_call
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray
from vishwamai.core.value_checks import check_values
from vishwamai.ops.loss import at_once, gathered
from vishwamai.ops.loss.chunked import XLA_CHUNKED
from vishwamai.ops.loss.compose import compose, reduced
from vishwamai.ops.loss.cpu import NATIVE
from vishwamai.ops.loss.gathered import piece_count
from vishwamai.ops.loss.gpu import TRITON
from vishwamai.ops.loss.reference import XLA
from vishwamai.ops.loss.spec import (
    PARTS,
    SIGNATURE,
    LossSpec,
    Operands,
    Outputs,
    Parts,
    check_arrays,
    check_class_weights,
    check_labels,
    check_options,
    describe,
    probabilities,
)
from vishwamai.ops.loss.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

LOSS: Op[LossSpec] = Op("linear_cross_entropy", (PALLAS_TPU, TRITON, NATIVE, XLA_CHUNKED, XLA), split="groups tokens")


@overload
def linear_cross_entropy(
    x: Float[Array, "*tokens features"],
    weight: Float[Array, "vocab features"],
    labels: Int[Array, "*tokens"] | Float[Array, "*tokens vocab"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    class_weights: Float[Array, " vocab"] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_logsumexp: Literal[False] = False,
    vocab_axis: str | tuple[str, ...] | None = None,
    gather_axis: str | None = None,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*loss"]: ...


@overload
def linear_cross_entropy(
    x: Float[Array, "*tokens features"],
    weight: Float[Array, "vocab features"],
    labels: Int[Array, "*tokens"] | Float[Array, "*tokens vocab"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    class_weights: Float[Array, " vocab"] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_logsumexp: Literal[True],
    vocab_axis: str | tuple[str, ...] | None = None,
    gather_axis: str | None = None,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    config: object = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*loss"], Float[Array, "*tokens"]]: ...


@overload
def linear_cross_entropy(
    x: Float[Array, "*tokens features"],
    weight: Float[Array, "vocab features"],
    labels: Int[Array, "*tokens"] | Float[Array, "*tokens vocab"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    class_weights: Float[Array, " vocab"] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_logsumexp: bool,
    vocab_axis: str | tuple[str, ...] | None = None,
    gather_axis: str | None = None,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Any: ...


@checked
def linear_cross_entropy(
    x: Float[Array, "*tokens features"],
    weight: Float[Array, "vocab features"],
    labels: Int[Array, "*tokens"] | Float[Array, "*tokens vocab"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    class_weights: Float[Array, " vocab"] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_logsumexp: bool = False,
    vocab_axis: str | tuple[str, ...] | None = None,
    gather_axis: str | None = None,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Any:
    """Cross entropy of the logits `x @ weight.T + bias`, which are never held as a whole, neither forward nor backward.

    With logits z (capped as `softcap * tanh(z / softcap)`), a vocab of V, a label y and `lse = log(sum(exp(z)))`, the
    loss of a token is

        lse - (1 - label_smoothing) * z[y] - label_smoothing / V * sum(z) + z_loss * lse^2

    Labels may be probabilities q of all entries, as a teacher's or mixed ones. With their sum Q and s for
    label_smoothing, the loss of a token is that of the target (1 - s) q + s / V, as in torch:

        ((1 - s) * Q + s) * lse - (1 - s) * sum(q * z) - s / V * sum(z) + z_loss * lse^2

    Szegedy et al., "Rethinking the Inception Architecture" (2016) for the smoothing; Chowdhery et al., "PaLM" (2022)
    for the z-loss; the algorithm is that of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models"
    (2025).

    Args:
      x: `[..., features]`, bfloat16, float16, float32 or float64: the last hidden states.
      weight: `[vocab, features]`; beside an `x` of another dtype, both are promoted as in JAX.
      labels: `[...]`, integers from 0 to vocab-1, or `ignore_index`. Any other label is an error where its value is
        known. Where labels are traced, it makes the loss NaN and every gradient that its token reaches;
        `KernelConfig(checks=True)` makes it an error there too. Or `[..., vocab]`, floating: probabilities, which are
        not checked; every token counts, and `ignore_index` means nothing. With `vocab_axis`, this device's part.
      bias: `[vocab]`, or None.
      class_weights: `[vocab]`, whole also with `vocab_axis`: the loss of a token, z-loss included, is multiplied by its
        label's, and "mean" divides by their sum, as in torch. Neither with label smoothing nor with probabilities.
      softcap: bound of the logits, or None.
      label_smoothing: share of the target that is spread evenly over all entries.
      z_loss: weight of the squared logsumexp.
      ignore_index: label of tokens whose loss is 0 and that no gradient reaches.
      reduction: "none" gives the loss of each token, "sum" their sum, "mean" the sum divided by the number of tokens
        that are not ignored, or of their class weights (0 if there are none).
      return_logsumexp: return the logsumexp of every token too, the ignored ones included; it is differentiable.
      vocab_axis: inside a `shard_map`, the mesh axis (or axes) over which `weight` and `bias` are split by entries, in
        order: each device passes its part, labels count over all parts, and every device gets the same loss. Arrays on
        explicit mesh axes need no such option: the vocabulary may be split there, unless the same axis splits the
        tokens.
      gather_axis: inside a `shard_map`, the mesh axis over which the features of `weight` are split, as fully sharded
        parameters are, while `x` has all features of this device's own tokens. The weight is gathered some entries at a
        time, in the dtype of `x` whatever its own is. Its gradient is added up over the devices in the accumulation
        dtype, and leaves split: no device holds the whole of either. Not with probabilities.
      precision: mode of float32 products: "highest" (the default) or "high"; None takes the ambient one.
      config: tiles (a `LossConfig` or `ChunkedLossConfig`), a block size in entries, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      The loss, float32 (float64 for float64 operands): a scalar, or `[...]` for "none"; with `return_logsumexp` the
      pair (loss, logsumexp `[...]`). Gradients exist for `x`, `weight` and `bias`, and for labels that
      are probabilities.

    Raises:
      ShapeError: the arguments contradict one another, or a label is outside the vocab.
      UnsupportedError: the implementation asked for cannot serve the call; or class weights with label smoothing, or
        probabilities with `gather_axis`.

    >>> import jax.numpy as jnp
    >>> x, weight = jnp.zeros((2, 4)), jnp.ones((8, 4))
    >>> print(f"{linear_cross_entropy(x, weight, jnp.array([3, -100])):.4f}")  # log(8)
    2.0794
    >>> linear_cross_entropy(x, weight, jnp.array([3, -100]), reduction="none").round(4).tolist()[1]
    0.0
    >>> smooth = jnp.full((2, 8), 1 / 8)  # as probabilities
    >>> print(f"{linear_cross_entropy(x, weight, smooth):.4f}")
    2.0794
    """
    named = (("x", x), ("weight", weight), ("labels", labels))
    x, weight, labels = (as_array("linear_cross_entropy", name, a) for name, a in named)
    bias = None if bias is None else jnp.asarray(bias)
    targets, mass = None, None
    if probabilities(labels, x, jnp.issubdtype(labels.dtype, jnp.floating)):
        targets, mass = labels, jnp.sum(labels, axis=-1, dtype=accumulator_dtype(labels.dtype))
        labels = jnp.full_like(mass, -1, jnp.int32)
    over = 1 if gather_axis is None else mesh_axis_size("linear_cross_entropy", "gather_axis", (gather_axis,))
    operands = array_specs(Operands(x, weight, bias, labels, targets))
    check_arrays(_with_features(operands, over))  # errors tell the caller's own dtypes
    check_options(softcap, label_smoothing, z_loss, ignore_index, reduction)
    if class_weights is not None:
        class_weights = as_array("linear_cross_entropy", "class_weights", class_weights)
    x, weight = cast_for_matmul(x, weight)
    common = x.dtype if gather_axis is not None else jnp.promote_types(x.dtype, weight.dtype)
    acc = accumulator_dtype(common)
    products = resolve_precision(precision, current_config().precision, common)
    first, size = 0, weight.shape[0]
    if vocab_axis is not None:
        axes = (vocab_axis,) if isinstance(vocab_axis, str) else tuple(vocab_axis)
        size *= mesh_axis_size("linear_cross_entropy", "vocab_axis", axes)
        first = lax.axis_index(vocab_axis) * weight.shape[0]
        if mass is not None:
            mass = lax.psum(mass, vocab_axis)
            labels = jnp.full_like(mass, -1, jnp.int32)
    if class_weights is not None:
        floats = jnp.issubdtype(class_weights.dtype, jnp.floating)
        check_class_weights(class_weights, floats, size, label_smoothing, targets is not None)
    inside = (labels >= 0) & (labels < size)
    if targets is None:
        check_values(functools.partial(check_labels, vocab=size, ignore_index=ignore_index), labels)
        active = labels != ignore_index
        unknown = active & ~inside
    else:
        active, unknown = ~inside, inside  # every token counts, and has no label
    labelled = active & inside
    shares = active if class_weights is None else _of_labels(class_weights.astype(acc), labels, labelled)
    labels = jnp.where(labelled, labels, -1).astype(jnp.int32)  # one of 64 bits may not fit otherwise

    entries = jnp.arange(weight.shape[0], dtype=jnp.int32)
    bias = None if bias is None else bias.astype(acc)
    arrays = Operands(x.astype(common), weight.astype(common), bias, labels - first, targets)
    options = (None if softcap is None else float(softcap), products, label_smoothing > 0)
    if gather_axis is not None:
        if targets is not None:
            raise UnsupportedError(
                "linear_cross_entropy: `gather_axis` with labels that are probabilities; pass the whole `weight`, "
                "by jax.lax.all_gather(weight, axis, axis=1, tiled=True), without `gather_axis`."
            )
        count = piece_count(weight.shape[0], x.shape[-1], jnp.dtype(acc).itemsize)
        piece = describe(_with_features(array_specs(arrays), over, count), *options)
        plan = LOSS.plan(piece, config=config, implementation=implementation)
        # Each piece is converted where it is gathered.
        parts = _pieces(plan, gather_axis, count, arrays._replace(weight=weight))
    else:
        spec = describe(array_specs(arrays), *options)
        plain = targets is None and shares is active and vocab_axis is None
        if plain and reduction != "none" and not return_logsumexp and at_once.expected(arrays):
            plan = LOSS.plan(spec, config=config, implementation=implementation)
            if at_once.serves(plan):
                weights = jnp.where(active, jnp.where(unknown, jnp.nan, 1.0), 0.0).astype(acc)
                total = _sum(plan, at_once.Tokens(*arrays[:4], weights), label_smoothing, z_loss)
                return reduced(jnp, total, shares, reduction)

        operands = Parts(*arrays, entries)
        parts = public_call(LOSS, PARTS, spec, operands, config=config, implementation=implementation, pack=_part)
    numbers = _combined(parts, vocab_axis)
    loss = compose(jnp, numbers, size, active, unknown, shares, label_smoothing, z_loss, reduction, mass)
    return (loss, numbers.logsumexp) if return_logsumexp else loss


def _part(parts: Parts) -> Operands:
    """The op's operands of a part of the vocabulary."""
    *arrays, entries = parts
    operands = Operands(*arrays)
    return SIGNATURE.pack(operands._replace(labels=operands.labels - entries[0]))


def _with_features(operands: Operands, over: int, pieces: int = 1) -> Operands:
    """Specs of the caller's arrays with all features of the weight, of which each device has one of `over` parts, and
    one of so many pieces of its entries.
    """
    weight, bias = operands.weight, operands.bias
    if len(weight.shape) == 2:  # `check_arrays` tells other shapes
        weight = dataclasses.replace(weight, shape=(weight.shape[0] // pieces, weight.shape[1] * over))
    if bias is not None and pieces > 1:
        bias = dataclasses.replace(bias, shape=(bias.shape[0] // pieces,))
    return operands._replace(weight=weight, bias=bias)


def _pieces(plan: CallPlan, axis: str, count: int, arrays: Operands) -> Outputs:
    """The outputs of each piece, `[..., count]`."""
    x, weight, bias, labels, _ = arrays
    bias = None if bias is None else bias[None]
    operands = Operands(x.reshape(1, -1, x.shape[-1]), weight[None], bias, labels.reshape(1, -1), None)
    with _telling(plan, arrays):
        pieces = gathered.numbers(plan, axis, count, operands)
    return Outputs(*(None if y is None else jnp.moveaxis(y, 0, -1).reshape(*labels.shape, count) for y in pieces))


def _sum(plan: CallPlan, tokens: at_once.Tokens, label_smoothing: float, z_loss: float) -> AnyArray:
    """The sum of the losses, whose gradients are computed with it."""
    x, weight, bias, labels, shares = tokens
    flat = at_once.Tokens(x.reshape(-1, x.shape[-1]), weight, bias, labels.reshape(-1), shares.reshape(-1))
    with _telling(plan, tokens):
        return at_once.total(at_once.Sum(plan, float(label_smoothing), float(z_loss)), flat)


@contextlib.contextmanager
def _telling(plan: CallPlan, arrays: object) -> Iterator[None]:
    """Tells observers of a plan that runs inside, and what JAX says there in our words, as a call of the op does."""
    observe.report(plan)
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        translated = LOSS.translated_error(error, plan, arrays)
        if translated is None:
            raise
        raise translated from error


def _of_labels(class_weights: jax.Array, labels: AnyArray, labelled: jax.Array) -> AnyArray:
    """The class weight of each token's label, `[...]`; 0 where the label is ignored or unknown."""
    mesh, sharding = explicit_mesh((class_weights, labels)), None
    if mesh is not None:
        sharding = jax.typeof(labels).sharding
        class_weights = jax.sharding.reshard(class_weights, jax.NamedSharding(mesh, jax.P(None)))
    weights = class_weights.at[jnp.where(labelled, labels, 0)].get(mode="clip", out_sharding=sharding)
    return jnp.where(labelled, weights, 0)


def _combined(parts: Outputs, vocab_axis: object) -> Outputs:
    """The outputs `[...]` of the whole vocabulary from those of its parts: along the last axis, and over the devices of
    `vocab_axis`.
    """
    if parts.logsumexp.shape[-1] == 1 and vocab_axis is None:
        # A sum, since the axis may be split over a mesh axis of size 1, where JAX cannot transpose an index.
        return Outputs(*(None if y is None else jnp.sum(y, axis=-1) for y in parts))

    def total(y: jax.Array) -> AnyArray:
        y = jnp.sum(y, axis=-1)
        return y if vocab_axis is None else lax.psum(y, vocab_axis)

    top = jnp.max(lax.stop_gradient(parts.logsumexp), axis=-1)
    top = top if vocab_axis is None else lax.pmax(top, vocab_axis)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    logsumexp = top + jnp.log(total(jnp.exp(parts.logsumexp - top[..., None])))
    return Outputs(logsumexp, total(parts.label_logit), None if parts.logit_sum is None else total(parts.logit_sum))
