"""The public attention of few queries over keys that are split over devices: `decode_attention`, `merge_shards`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from vishwamai.core.arguments import checked, checks_its_own
from vishwamai.core.config import cast_for_matmul, current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import resolve_precision
from vishwamai.core.shape_checks import check_float
from vishwamai.core.sharding import mesh_axis_size
from vishwamai.core.signature import array_specs, as_arrays
from vishwamai.core.types import PyTree
from vishwamai.ops.attention.checks import Options, make_spec, segment_pair
from vishwamai.ops.attention.places import existing_keys, lengths, row_positions, static_offset
from vishwamai.ops.attention.spec import SIGNATURE, Operands
from vishwamai.ops.attention.split.keys import attend_keys, merged_over

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int

_NAME = "decode_attention"


@checks_its_own("softcap", "scale", "window", "segment_ids")
def decode_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"],
    bias: Float[Array, "#batch #heads #q_len #kv_len"] | None = None,
    mask: Bool[Array, "#batch #heads #q_len #kv_len"] | None = None,
    *,
    axis: str,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Int[Array, ...] | None = None,
    kv_lens: Int[Array, ...] | None = None,
    segment_ids: tuple[Int[Array, "#batch q_len"], Int[Array, "#batch kv_len"]] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    config: object = None,
    implementation: str | None = None,
) -> PyTree:
    """`flash_attention` of queries that every device has, over keys and values that are split along the sequence over
    the mesh axis `axis`; for use inside `shard_map`.

    It is for decoding: each device reads its part of the keys, and what travels is as large as the output. Dao et al.,
    "Flash-Decoding for long-context inference" (2023). Forward and backward.

    Args:
      query: the same on every device, as in `flash_attention`.
      key: this device's part, as many keys on every device; the parts lie on the devices in order.
      value: array like `key`.
      bias: argument of `flash_attention`, of this device's keys.
      mask: array like `bias`.
      axis: the mesh axis over which the keys are split.
      causal: argument of `flash_attention`, for the keys of all devices.
      window: argument of `flash_attention`, for the keys of all devices.
      q_offset: argument of `flash_attention`, among the keys of all devices. None: the last query stands at the last
        key, of those that `kv_lens` leaves.
      kv_lens: integers `[]` or `[batch]`: how many of the keys of all devices exist.
      segment_ids: (q_ids, kv_ids), as in `flash_attention`; kv_ids of this device's keys.
      softcap: argument of `flash_attention`.
      sinks: argument of `flash_attention`, the same on every device.
      scale: argument of `flash_attention`.
      return_lse: return the logsumexp over the keys of all devices too.
      config: argument of `flash_attention`, of the attention of one device.
      implementation: argument of `flash_attention`.

    Returns:
      As `flash_attention`, the same on every device.

    Raises:
      ShapeError: an argument is not legal, or the call is not inside a `shard_map` over `axis`.
      UnsupportedError: what `flash_attention` raises.

    >>> import functools, numpy as np, vishwamai
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("keys",))
    >>> attend = jax.shard_map(
    ...     functools.partial(decode_attention, axis="keys"),
    ...     mesh=mesh,
    ...     in_specs=(jax.P(), jax.P(None, None, "keys"), jax.P(None, None, "keys")),
    ...     out_specs=jax.P(),
    ... )
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 64, 32))
    >>> bool(jnp.allclose(attend(q[:, :, :1], k, v), vishwamai.flash_attention(q[:, :, :1], k, v), atol=1e-5))
    True
    """
    size = mesh_axis_size(_NAME, "axis", (axis,))
    arrays = as_arrays(
        _NAME, Operands(query, key, value, bias, mask, *segment_pair(segment_ids), sinks), SIGNATURE.labels
    )
    out_dtype = arrays.query.dtype
    query, key, value = cast_for_matmul(*arrays[:3])
    arrays = arrays._replace(query=query, key=key, value=value)
    static = static_offset(_NAME, q_offset)
    if query.ndim == key.ndim == 4:  # others are errors of the spec
        batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
        lens = None if kv_lens is None else lengths(_NAME, "kv_lens", kv_lens, batch, size * kv_len)
        if lens is not None:
            local_lens = jnp.clip(lens - jax.lax.axis_index(axis) * kv_len, 0, kv_len)
            q_ids, kv_ids = existing_keys(_NAME, arrays[5:7], local_lens, None, batch, q_len, kv_len)
            arrays = arrays._replace(q_segment_ids=q_ids, kv_segment_ids=kv_ids)
        if q_offset is None:
            if lens is None or (q_len == 1 and window is None):
                static = size * kv_len - q_len  # one query at the last key that exists sees them all
            else:
                q_offset = lens - q_len
        if static is None:
            arrays = arrays._replace(q_positions=row_positions(_NAME, q_offset, batch, q_len))
    spec = make_spec(
        array_specs(arrays),
        resolve_precision(None, current_config().precision, query.dtype),
        *Options(causal=causal, window=window, softcap=softcap, scale=scale, layout="bhsd", q_offset=static),
    )
    ids = {name: getattr(arrays, name) for name in ("q_segment_ids", "kv_segment_ids")}
    arrays = arrays._replace(**{name: None if x is None else x.astype(jnp.int32) for name, x in ids.items()})
    if spec.operands.q_positions is None:
        arrays = arrays._replace(q_positions=None)
    outputs = attend_keys(axis, spec, SIGNATURE.pack(arrays, spec), config=config, implementation=implementation)
    out = outputs.out.astype(out_dtype)
    return (out, outputs.logsumexp) if return_lse else out


@checked
def merge_shards(
    out: Float[Array, "... rows v_dim"], lse: Float[Array, "... rows"], *, axis: str
) -> tuple[Float[Array, "... rows v_dim"], Float[Array, "... rows"]]:
    """`merge_attention` of the parts that the devices of the mesh axis `axis` have; for use inside `shard_map`.

    For keys that are split over devices in a way of your own: pages of a cache, for instance, of which each device has
    some. `ragged_paged_attention(..., return_lse=True)` gives both arguments.

    Args:
      out: this device's attention over its own keys, `[..., rows, v_dim]`.
      lse: its logsumexp, `[..., rows]`; -inf where a row sees no key of the device. Sinks enter every logsumexp, so
        leave them out.
      axis: the mesh axis over which the keys are split.

    Returns:
      (out, logsumexp) over the keys of all devices, the same on each.

    Raises:
      ShapeError: the shapes do not fit, or the call is not inside a `shard_map` over `axis`.

    >>> import functools, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("keys",))
    >>> merge = jax.shard_map(
    ...     functools.partial(merge_shards, axis="keys"), mesh=mesh, in_specs=jax.P(), out_specs=jax.P()
    ... )
    >>> merge(jnp.ones((3, 2)), jnp.zeros(3))[0].shape
    (3, 2)
    """
    mesh_axis_size("merge_shards", "axis", (axis,))
    check_float("merge_shards", "out", out.dtype)
    check_float("merge_shards", "lse", lse.dtype)
    if lse.shape != out.shape[:-1]:
        raise ShapeError(
            f"merge_shards: `lse` has shape {lse.shape}, but `out` has {out.shape}; pass a logsumexp for each row, of "
            f"shape {out.shape[:-1]}."
        )
    return merged_over(axis, out, lse)
