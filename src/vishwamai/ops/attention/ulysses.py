"""Attention over a sequence that is split over devices: the devices exchange sequence for heads.

Jacobs et al., "DeepSpeed Ulysses" (2023). An all-to-all gives every device the whole sequence of a share of the heads;
after the attention another takes the output back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from vishwamai.core.arguments import checks_its_own
from vishwamai.core.errors import ShapeError
from vishwamai.core.sharding import mesh_axis_size
from vishwamai.core.signature import array_specs, as_arrays
from vishwamai.core.types import PyTree
from vishwamai.ops.attention.api import flash_attention
from vishwamai.ops.attention.checks import check_arrays, segment_pair
from vishwamai.ops.attention.spec import SIGNATURE, Operands
from vishwamai.ops.attention.split.ulysses_exchange import exchange, restored

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


@checks_its_own("softcap", "scale", "window", "segment_ids")
def ulysses_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"],
    *,
    axis: str,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    sinks: Float[Array, " heads"] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    config: object = None,
    implementation: str | None = None,
) -> PyTree:
    """`flash_attention` of a sequence that is split over the mesh axis `axis`; for use inside `shard_map`.

    It moves less than a ring where there are few kv heads, but needs as many query heads as devices. The sequence lies
    on the devices in order.

    Args:
      query: this device's part, as in `flash_attention`; `heads` is a multiple of the devices.
      key: this device's part. Where the devices do not divide `kv_heads`, heads are repeated until they do.
      value: array like `key`.
      axis: the mesh axis over which the sequence is split.
      causal: argument of `flash_attention`, for the whole sequence.
      window: argument of `flash_attention`.
      segment_ids: this device's part of both, as in `flash_attention`.
      sinks: argument of `flash_attention`, of all heads on every device.
      softcap: argument of `flash_attention`.
      scale: argument of `flash_attention`.
      config: argument of `flash_attention`.
      implementation: argument of `flash_attention`.

    Returns:
      The output for this device's queries, `[batch, heads, q_len, v_dim]`.

    Raises:
      ShapeError: an argument is not legal, the devices do not divide the heads, or the call is not inside a `shard_map`
        over `axis`.

    >>> import functools, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("sequence",))
    >>> split = jax.P(None, None, "sequence")
    >>> attend = jax.shard_map(
    ...     functools.partial(ulysses_attention, axis="sequence"), mesh=mesh, in_specs=split, out_specs=split
    ... )
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 64, 32))
    >>> bool(jnp.allclose(attend(q, k, v), flash_attention(q, k, v), atol=1e-5))
    True
    """
    size = mesh_axis_size("ulysses_attention", "axis", (axis,))
    arrays = as_arrays("ulysses_attention", Operands(query, key, value, sinks=sinks), SIGNATURE.labels)
    check_arrays(array_specs(arrays), "bhsd")
    heads = arrays.query.shape[1]
    if heads % size:
        raise ShapeError(
            f"ulysses_attention: {heads} query heads do not divide over the {size} devices of {axis!r}; take a smaller "
            "axis, or ring_attention."
        )
    if segment_ids is not None:
        segment_ids = tuple(jnp.asarray(ids) for ids in segment_ids)
    q_ids, kv_ids = segment_pair(segment_ids)
    of_heads = None if sinks is None else arrays.sinks[None]  # as the op has it
    exchanged = exchange(axis, arrays._replace(q_segment_ids=q_ids, kv_segment_ids=kv_ids, sinks=of_heads))
    out = flash_attention(
        *exchanged[:3],
        causal=causal,
        window=window,
        segment_ids=None if segment_ids is None else exchanged[5:7],
        sinks=None if sinks is None else exchanged.sinks[0],
        softcap=softcap,
        scale=scale,
        config=config,
        implementation=implementation,
        layout="bhsd",
    )
    return restored(axis, out)
