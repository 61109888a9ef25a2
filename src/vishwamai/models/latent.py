"""Latent attention (MLA) of one layer, as a function of its parameters. DeepSeek-AI, "DeepSeek-V2" (2024).

Whole sequences: keys and values of all heads are expanded from the latent vectors. Pages hold the latent vectors alone:
there the expansion of keys is absorbed into the queries, and that of values follows attention (appendix of the paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

import vishwamai
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.config import Latent, ModelConfig
from vishwamai.models.layer_kinds import LayerKind

if TYPE_CHECKING:
    from vishwamai.models.blocks import Attend, Rotate

_NORM_EPS = 1e-6  # of the norms of the latent vectors, whatever `rms_norm_eps` says: as the authors' code has it


def latent_attention(
    config: ModelConfig,
    latent: Latent,
    kind: LayerKind,
    arrays: Mapping[str, Any],
    x: Any,
    linear: Any,
    rotate: Rotate,
    attend: Attend,
    pages: Any,
    axes: MeshAxes = ONE_DEVICE,
) -> tuple[Any, Any]:
    """Attention's output `[batch, seq, hidden]`, and the pages. Over the axis `tensor`, the output is that of the
    device's heads: a part of a sum.

    Args:
      linear: the product with a weight, `blocks.linear`.
    """
    shape, width = x.shape[:-1], latent.nope_dim + latent.rope_dim
    if latent.query_rank is None:
        query = linear(x, arrays["query"])
    else:
        low = linear(x, arrays["query_down"], arrays.get("query_down_bias"))
        query = linear(vishwamai.rms_norm(low, arrays["query_down_norm"], eps=_NORM_EPS), arrays["query_up"])
    query = query.reshape(*shape, query.shape[-1] // width, width)
    low = linear(x, arrays["latent_down"], arrays.get("latent_down_bias"))
    vector = vishwamai.rms_norm(low[..., : latent.kv_rank], arrays["latent_norm"], eps=_NORM_EPS)
    plain, turning = query[..., : latent.nope_dim], query[..., latent.nope_dim :]
    turned, key = rotate((turning, low[..., None, latent.kv_rank :]), kind.rope)  # key: [batch, seq, 1, rope_dim]
    if pages is None:
        mixed = _expanded(config, latent, kind, arrays, plain, turned, key, vector, linear, attend)
    else:
        mixed, pages = _absorbed(config, latent, kind, arrays, plain, turned, key, vector, attend, pages)
    flat = mixed.reshape(*shape, mixed.shape[-2] * latent.value_dim)
    return linear(flat, arrays["output"], axes.once(arrays.get("output_bias"))), pages


def _expanded(
    config: ModelConfig, latent: Latent, kind: LayerKind, arrays: Any, plain: Any, turned: Any, key: Any, vector: Any,
    linear: Any, attend: Attend,
) -> Any:  # fmt: skip
    both = linear(vector, arrays["latent_up"])
    both = both.reshape(*plain.shape[:-1], latent.nope_dim + latent.value_dim)
    keys = jnp.broadcast_to(key, (*both.shape[:-1], latent.rope_dim))
    keys = jnp.concatenate([both[..., : latent.nope_dim], keys], axis=-1)
    query = jnp.concatenate([plain, turned], axis=-1)
    return attend(kind, query, keys, both[..., latent.nope_dim :], None, None)[0]


def _absorbed(
    config: ModelConfig, latent: Latent, kind: LayerKind, arrays: Any, plain: Any, turned: Any, key: Any, vector: Any,
    attend: Attend, pages: Any,
) -> tuple[Any, Any]:  # fmt: skip
    up = arrays["latent_up"].astype(plain.dtype)
    up = up.reshape(latent.kv_rank, config.num_heads, latent.nope_dim + latent.value_dim)
    absorbed = vishwamai.einsum("bshn,rhn->bshr", plain, up[..., : latent.nope_dim])
    query = jnp.concatenate([absorbed, turned], axis=-1)  # [batch, seq, heads, kv_rank + rope_dim]
    row = jnp.concatenate([vector[..., None, :], key], axis=-1)
    mixed, pages = attend(kind, query, row, None, None, pages)  # [batch, seq, heads, kv_rank]
    return vishwamai.einsum("bshr,rhv->bshv", mixed, up[..., latent.nope_dim :]), pages
