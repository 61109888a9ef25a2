"""Attention over a sequence that is split over devices: the keys and values travel around a ring.

Liu et al., "Ring Attention with Blockwise Transformers" (2023). Every device keeps its queries. In each hop it attends
to the keys that are with it and merges the result by logsumexp, while the next keys are on their way. The backward pass
goes around once more, and the gradients of keys and values travel with them.

With a causal mask, sequences laid out in order leave the first devices idle. Zig-zag placement cuts the sequence into
twice as many pieces as devices and gives a device one from each end, so that every hop is the same work everywhere:
Brandon et al., "Striped Attention" (2023), with the placement of Llama 3's training (2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp

from vishwamai.core import dropout
from vishwamai.core.arguments import checked, checks_its_own
from vishwamai.core.config import cast_for_matmul, current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import resolve_precision
from vishwamai.core.sharding import mesh_axis_size
from vishwamai.core.signature import array_specs, as_arrays
from vishwamai.core.spec import ArraySpec
from vishwamai.core.types import PyTree
from vishwamai.ops.attention.checks import Options, check_dropout_key, make_spec, segment_pair
from vishwamai.ops.attention.reference import XLA
from vishwamai.ops.attention.spec import SIGNATURE, Operands
from vishwamai.ops.attention.split.ring_hops import ring
from vishwamai.ops.attention.split.ring_plan import why_not_ring

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, Key, Shaped

PLACEMENTS = ("contiguous", "zigzag")


@checks_its_own("softcap", "scale", "window", "segment_ids")
def ring_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"],
    bias: Float[Array, "#batch #heads #q_len #all_keys"] | None = None,
    mask: Bool[Array, "#batch #heads #q_len #all_keys"] | None = None,
    *,
    axis: str,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: tuple[Int[Array, "#batch q_len"], Int[Array, "#batch kv_len"]] | None = None,
    placement: Literal["contiguous", "zigzag"] = "contiguous",
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    config: object = None,
    implementation: str | None = None,
) -> PyTree:
    """`flash_attention` of a sequence that is split over the mesh axis `axis`; for use inside `shard_map`.

    Memory and transfers of a device are linear in its own part of the sequence. Differentiable once.

    Args:
      query: this device's part, as in `flash_attention`.
      key: this device's part; as many on every device. With `causal` or `window`, as many as queries.
      value: array like `key`.
      bias: argument of `flash_attention`, of this device's queries and of the keys of all devices, in the order in
        which they lie on the devices. Padded keys are forbidden by a `mask` of shape `[batch, 1, 1, all_keys]`.
      mask: array like `bias`.
      axis: the mesh axis over which the sequence is split.
      causal: query i of the whole sequence sees no key after it. What a device cannot see is not computed.
      window: (left, right), as in `flash_attention`, for the whole sequence. Keys go as far as it reaches. It needs
        the placement "contiguous".
      segment_ids: this device's part of both, as in `flash_attention`. Keys go as far as some device needs them, and
        one device further.
      placement: how the sequence lies on the devices: "contiguous", or "zigzag" as `to_zigzag` puts it. With `causal`,
        "zigzag" is the same work for every device, and "contiguous" takes as long as without `causal`.
      softcap: argument of `flash_attention`.
      sinks: argument of `flash_attention`.
      dropout_rate: argument of `flash_attention`.
      dropout_key: argument of `flash_attention`, the same on every device: the ring drops what `flash_attention` drops
        of the whole sequence in order.
      scale: argument of `flash_attention`.
      return_lse: return the logsumexp over the whole sequence too.
      config: argument of `flash_attention`, of the attention of one hop.
      implementation: argument of `flash_attention`. For "xla" the backward pass is that of "xla_chunked".

    Returns:
      As `flash_attention`, for this device's queries.

    Raises:
      ShapeError: an argument is not legal, or the call is not inside a `shard_map` over `axis`.
      UnsupportedError: a second derivative; or what `flash_attention` raises.

    >>> import functools, jax, numpy as np, vishwamai
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("sequence",))
    >>> split = jax.P(None, None, "sequence")
    >>> attend = jax.shard_map(
    ...     functools.partial(ring_attention, axis="sequence", causal=True), mesh=mesh, in_specs=split, out_specs=split
    ... )
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 64, 32))
    >>> bool(jnp.allclose(attend(q, k, v), vishwamai.flash_attention(q, k, v, causal=True), atol=1e-5))
    True
    """
    if placement not in PLACEMENTS:
        raise ShapeError(f"ring_attention: `placement` is {placement!r}; pass 'contiguous' or 'zigzag'.")
    size = mesh_axis_size("ring_attention", "axis", (axis,))
    arrays = as_arrays(
        "ring_attention", Operands(query, key, value, bias, mask, *segment_pair(segment_ids), sinks), SIGNATURE.labels
    )
    out_dtype = arrays.query.dtype
    query, key, value = cast_for_matmul(*arrays[:3])
    arrays = arrays._replace(query=query, key=key, value=value)
    spec = make_spec(  # the checks of shapes, dtypes and options
        _of_one_hop(array_specs(arrays), size),
        resolve_precision(None, current_config().precision, query.dtype),
        *Options(
            causal=causal,
            window=window,
            softcap=softcap,
            dropout_rate=dropout_rate,
            scale=scale,
            return_lse=True,
            layout="bhsd",
        ),
    )
    dropout_key = None if dropout_key is None else jnp.asarray(dropout_key)
    check_dropout_key(spec.dropout_rate, dropout_key)
    reason = why_not_ring(spec, size)
    if reason is not None:
        raise ShapeError(f"ring_attention: {reason} Split queries and keys in the same way.")
    zigzag = placement == "zigzag" and (causal or spec.dropout_rate > 0)
    if placement == "zigzag" and window is not None:
        raise ShapeError(
            f"ring_attention: `window` is {window}, and `placement` is 'zigzag', in which neighbours are not on one "
            "device; pass placement='contiguous', which a window balances."
        )
    if zigzag and spec.q_len % 2:
        raise ShapeError(
            f"ring_attention: zig-zag placement cuts the {spec.q_len} rows of a device into two; pad the sequence to a "
            f"multiple of {2 * size}."
        )
    if implementation is None and not current_config().use_flash:
        implementation = XLA.name
    ids = {name: getattr(arrays, name) for name in ("q_segment_ids", "kv_segment_ids")}
    arrays = arrays._replace(**{name: None if x is None else x.astype(jnp.int32) for name, x in ids.items()})
    if spec.dropout_rate and dropout_key is not None:
        arrays = arrays._replace(dropout_seed=dropout.seeds(dropout_key, spec.batch, spec.q_heads))
    outputs = ring(
        (axis,), size, spec, SIGNATURE.pack(arrays, spec), zigzag=zigzag, config=config, implementation=implementation
    )
    out = outputs.out.astype(out_dtype)
    return (out, outputs.logsumexp) if return_lse else out


def _of_one_hop(arrays: Any, size: int) -> PyTree:
    """The arrays' specs, where `bias` and `mask` have the keys of one device."""
    for name in ("bias", "mask"):
        x = getattr(arrays, name)
        if x is None or not x.shape or x.shape[-1] == 1:
            continue
        keys = x.shape[-1]
        if keys % size:
            raise ShapeError(
                f"ring_attention: `{name}` has shape {x.shape}; pass it with the keys of all {size} devices, or 1, in "
                "the last axis."
            )
        arrays = arrays._replace(**{name: ArraySpec((*x.shape[:-1], keys // size), x.dtype)})
    return arrays


@checked
def to_zigzag(x: Shaped[Array, ...], devices: int, axis: int = 2) -> Array:
    """Puts a whole sequence in zig-zag order: of `2 * devices` pieces, device i gets the pieces i and 2 * devices-1-i.

    Do it once, with the tokens and their positions, before they are split; the model then works in this order.

    Args:
      x: an array with the whole sequence along `axis`. devices: over which it will be split.

    Raises:
      ShapeError: the sequence is not a multiple of `2 * devices`.

    >>> to_zigzag(jnp.arange(8), 2, axis=0).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _placed("to_zigzag", x, devices, axis, False)


@checked
def from_zigzag(x: Shaped[Array, ...], devices: int, axis: int = 2) -> Array:
    """The inverse of `to_zigzag`.

    Args:
      x: an array in zig-zag order along `axis`. devices: over which it was split.

    Raises:
      ShapeError: the sequence is not a multiple of `2 * devices`.

    >>> from_zigzag(to_zigzag(jnp.arange(8), 2, axis=0), 2, axis=0).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _placed("from_zigzag", x, devices, axis, True)


def _placed(function: str, x: Array, devices: int, axis: int, inverse: bool) -> Array:
    x = jnp.asarray(x)
    if devices < 1 or not -x.ndim <= axis < x.ndim or x.shape[axis] % (2 * devices):
        raise ShapeError(
            f"{function}: `x` of shape {x.shape} has no axis {axis} that divides into 2 * {devices} pieces; pad it."
        )
    order = [piece for i in range(devices) for piece in (i, 2 * devices - 1 - i)]
    if inverse:
        order = [order.index(piece) for piece in range(2 * devices)]
    pieces = jnp.split(x, 2 * devices, axis)
    return jnp.concatenate([pieces[piece] for piece in order], axis)
