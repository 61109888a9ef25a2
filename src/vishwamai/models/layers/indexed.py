"""Latent attention over the tokens that an indexer chooses. DeepSeek-AI, "DeepSeek-V3.2" (2025); GLM-5.

Rows and contexts of at most `Latent.index_keys` tokens see all of them: there it is latent attention. Beyond that the
latent vectors of the chosen tokens are gathered, and queries absorb the expansion of keys, in training and serving
alike. Pages hold the indexer's key next to the latent vector. A layer of GLM-5.2 may take the choice of the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models.attend import attend_pages
from vishwamai.models.attend_index import attend_chosen_pages, chosen_keys
from vishwamai.models.blocks import linear
from vishwamai.models.layers.latent import LatentAttention, absorbed_queries, expanded_output, sizes, turned, vectors
from vishwamai.models.layers.mixer import Arrays, Mixer, Rows, Step
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix
from vishwamai.models.rotation import rotated

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

_NORM_EPS = 1e-6  # of the norm of the indexer's keys, whatever `rms_norm_eps` says: as the authors' code has it
_LANES = 128
INDEX = "index"
"""Entry of a layer's memory: the tokens that the layer before chose."""


@dataclasses.dataclass(frozen=True)
class SharedIndexAttention(LatentAttention):
    """A layer that attends to the tokens which the layer before it attended to."""

    @property
    def layer_type(self) -> str:
        return "shared"

    def __call__(self, config: ModelConfig, arrays: Arrays, x: jax.Array, rows: Rows) -> jax.Array:
        return self.mixed(config, arrays, x, rows, None, 0, None)[0]

    def step(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, step: Step, pool: PyTree, first: int | jax.Array
    ) -> tuple[jax.Array, PyTree]:
        return self.mixed(config, arrays, x, step, pool, first, None)[:2]

    def mixed(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        tokens: Rows | Step,
        pool: PyTree,
        first: int | jax.Array,
        index: object,
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """The output, the pool, and the tokens chosen.

        Args:
          config, arrays, x: arguments of a layer's call.
          tokens: whole sequences, or the new tokens of a step.
          pool, first: arguments of a step.
          index: int32 `[batch, seq, index_keys]`, what the layer before chose: positions in the row, or in the
            sequence of a step; None where all tokens are seen, or where there is no layer before.
        """
        if isinstance(tokens, Rows):
            return self._rows(config, arrays, x, tokens, index)
        return self._step(config, arrays, x, tokens, pool, first, index)

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        latent = sizes(config)
        return 2.0 * LatentAttention.ring_features(self, config) * min(length, latent.index_keys)

    def ring_features(self, config: ModelConfig) -> int:
        return Mixer.ring_features(self, config)

    def _rows(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, rows: Rows, index: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        latent = sizes(config)
        if rows.axes.sequence is not None:
            raise UnsupportedError(
                f"{config.family}: rows are split over the mesh axis {rows.axes.sequence!r}, and layers that choose "
                "tokens by an index need whole rows; set mesh.sequence=1."
            )
        if isinstance(x.shape[1], int) and x.shape[1] <= latent.index_keys:
            return LatentAttention.__call__(self, config, arrays, x, rows), None, index
        plain, turning, key, vector, low = vectors(latent, arrays, x)
        turning, key = turned(config, self.rope, turning, key, rows.positions)
        index = self._index_of_rows(config, arrays, x, low, rows, index)
        query = absorbed_queries(latent, arrays, plain, turning)
        keys = jnp.concatenate([vector, key[..., 0, :]], axis=-1)[:, None]
        out = vishwamai.indexed_attention(
            jnp.swapaxes(query, 1, 2), keys, None, index, scale=config.attention_scale, value_dim=latent.kv_rank
        )
        return expanded_output(latent, arrays, jnp.swapaxes(out, 1, 2), rows.axes), None, index

    def _step(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        step: Step,
        pool: PyTree,
        first: int | jax.Array,
        index: PyTree,
    ) -> tuple[jax.Array, PyTree, PyTree]:
        latent = sizes(config)
        plain, turning, key, vector, low = vectors(latent, arrays, x)
        turning, key = turned(config, self.rope, turning, key, step.positions, step.lengths)
        query = absorbed_queries(latent, arrays, plain, turning)
        row = jnp.concatenate([vector[..., None, :], key], axis=-1)
        row = self._row(config, arrays, x, step, row)
        if step.batch.page_table.shape[1] * jax.tree.leaves(pool)[0].shape[1] <= latent.index_keys:
            out, pool = attend_pages(
                config, None, query, row, None, None, step.batch, pool, first, latent_dim=latent.kv_rank
            )
        else:
            select = self._index_of_pages(config, arrays, x, low, step, first, index)
            out, pool, index = attend_chosen_pages(config, query, row, select, step.batch, pool, first, latent.kv_rank)
        return expanded_output(latent, arrays, out), pool, index

    def _row(self, config: ModelConfig, arrays: Arrays, x: jax.Array, step: Step, row: jax.Array) -> jax.Array:
        """What a page holds of the new tokens."""
        return row

    def _index_of_rows(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, low: jax.Array, rows: Rows, index: PyTree
    ) -> jax.Array:
        """The tokens chosen in rows of `x`."""
        if index is None:
            raise UnsupportedError(
                f"{config.family}: a layer of type 'shared' has no layer before it in its part of the pipeline; set "
                "mesh.pipeline=1."
            )
        return index

    def _index_of_pages(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        low: jax.Array,
        step: Step,
        first: int | jax.Array,
        index: PyTree,
    ) -> Callable[[PyTree], jax.Array]:
        """A function of the pool, with the new tokens written, that gives the tokens chosen."""
        assert index is not None, "the first layer chooses"
        return lambda pool: index


@dataclasses.dataclass(frozen=True)
class IndexedAttention(SharedIndexAttention):
    """A layer that chooses its tokens.

    Attributes:
      index_interleaved: the indexer rotates features by neighbours, as attention does; False: by halves.
    """

    index_interleaved: ClassVar[bool] = False

    tensors: ClassVar[Mapping[str, Tensor]] = {
        **LatentAttention.tensors,
        "index_query": Tensor(PREFIX + "self_attn.indexer.wq_b.weight", True),
        "index_key": Tensor(PREFIX + "self_attn.indexer.wk.weight", True),
        "index_key_norm": Tensor(PREFIX + "self_attn.indexer.k_norm.weight"),
        "index_key_norm_bias": Tensor(PREFIX + "self_attn.indexer.k_norm.bias"),
        "index_weights": Tensor(PREFIX + "self_attn.indexer.weights_proj.weight", True),
    }

    @property
    def layer_type(self) -> str:
        return "full_attention"

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        latent = sizes(config)
        heads, dim, hidden = latent.index_heads, latent.index_dim, config.hidden_size
        assert latent.query_rank is not None, "the family declines files without it"
        return {
            **super().parameters(config),
            "index_query": matrix(latent.query_rank, heads * dim, (None, None)),
            "index_key": matrix(hidden, dim, ("embed", None)),
            "index_key_norm": Parameter((dim,), (None,), "ones"),
            "index_key_norm_bias": Parameter((dim,), (None,), "zeros"),
            # The checkpoints of the authors keep it in more bits than the other matrices, so it is not quantized.
            "index_weights": Parameter((hidden, heads), ("embed", None)),
        }

    def page_row(self, config: ModelConfig) -> tuple[int, ...]:
        latent = sizes(config)
        return (-(-(latent.kv_rank + latent.rope_dim + latent.index_dim) // _LANES) * _LANES,)

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        latent = sizes(config)
        return super().mixing_flops(config, length) + 2.0 * latent.index_heads * (latent.index_dim + 1) * length

    def _row(self, config: ModelConfig, arrays: Arrays, x: jax.Array, step: Step, row: jax.Array) -> jax.Array:
        key = self._turned(config, self._key(config, arrays, x), step.positions, step.lengths)
        return jnp.concatenate([row, key], axis=-1)

    def _index_of_rows(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, low: jax.Array, rows: Rows, index: PyTree
    ) -> jax.Array:
        query, weights = self._queries(config, arrays, x, low)
        query = self._turned(config, query, rows.positions)
        key = self._turned(config, self._key(config, arrays, x), rows.positions)
        return vishwamai.lightning_index(
            jnp.swapaxes(query, 1, 2),
            key[..., 0, :],
            weights,
            top_k=sizes(config).index_keys,
            segment_ids=None if rows.segment_ids is None else (rows.segment_ids, rows.segment_ids),
        )

    def _index_of_pages(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        low: jax.Array,
        step: Step,
        first: int | jax.Array,
        index: PyTree,
    ) -> Callable[[PyTree], jax.Array]:
        latent = sizes(config)
        query, weights = self._queries(config, arrays, x, low)
        query = self._turned(config, query, step.positions, step.lengths)
        start = latent.kv_rank + latent.rope_dim
        columns = slice(start, start + latent.index_dim)
        return lambda pool: chosen_keys(query[0], weights[0], step.batch, pool, first, columns, latent.index_keys)

    def _key(self, config: ModelConfig, arrays: Arrays, x: jax.Array) -> jax.Array:
        """The indexer's keys before their rotation, `[batch, seq, 1, index_dim]`."""
        key = linear(x, arrays["index_key"])
        scale, bias = arrays["index_key_norm"], arrays["index_key_norm_bias"]
        return vishwamai.layer_norm(key, scale, bias, eps=_NORM_EPS)[..., None, :]

    def _queries(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, low: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The indexer's queries before their rotation `[batch, seq, index_heads, index_dim]`, and weights."""
        latent = sizes(config)
        query = linear(low, arrays["index_query"]).reshape(*x.shape[:-1], latent.index_heads, latent.index_dim)
        return query, linear(x, arrays["index_weights"], out_dtype=jnp.promote_types(x.dtype, jnp.float32))

    def _turned(self, config: ModelConfig, x: jax.Array, *positions: jax.Array | None) -> jax.Array:
        """Queries or keys `[batch, seq, heads, index_dim]`, the first `rope_dim` features of which turn."""
        config = dataclasses.replace(config, rope_interleaved=self.index_interleaved)
        width = sizes(config).rope_dim
        start, _ = rotated(config, self.rope, x[..., :width], None, *positions)
        return jnp.concatenate([start, x[..., width:]], axis=-1)


@dataclasses.dataclass(frozen=True)
class FullIndexAttention(IndexedAttention):
    """A layer of GLM-5 that chooses its tokens, also for the "shared" ones after it."""

    index_interleaved: ClassVar[bool] = True

    @property
    def layer_type(self) -> str:
        return "full"


def first_index(config: ModelConfig, shape: tuple[int, ...], tokens: Rows | Step, pool: PyTree) -> dict[str, jax.Array]:
    """What the layers of a model with "shared" ones pass on, before the first of them: an index at `INDEX`, or nothing
    where all tokens are seen or no layer shares.

    Args:
      config: the model.
      shape: `(batch, seq)` of the tokens.
      tokens: whole sequences, or the new tokens of a step.
      pool: a pool of pages of a step; None for whole sequences.
    """
    if not any(kind.mixer.layer_type == "shared" for kind in config.layers):
        return {}
    if isinstance(tokens, Rows):
        length = shape[1]
    else:
        length = tokens.batch.page_table.shape[1] * jax.tree.leaves(pool)[0].shape[1]
    keys = sizes(config).index_keys
    if isinstance(length, int) and length <= keys:
        return {}
    return {INDEX: jnp.full((*shape, keys), -1, jnp.int32)}
