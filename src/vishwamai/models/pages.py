"""What one serving step is about: which tokens belong to which sequence, and the pools of pages it reads and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models.periods import segments

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int

    from vishwamai.models.config import ModelConfig
    from vishwamai.models.layers.layer import LayerKind


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedBatch:
    """The sequences of one step, as `vishwamai.ragged_paged_attention` counts them; a pytree.

    Attributes:
      kv_lens: `[sequences]` int32, tokens of each sequence, the new ones included; 0 for an unused row.
      page_table: `[sequences, pages_per_sequence]` int32, the pages of each sequence in order.
      cu_q_lens: `[sequences + 1]` int32 from 0 on, where each sequence's new tokens start.
      max_q_len: bound of the new tokens of a sequence; 1 in a step that only decodes. Static.
      lengths: `[sequences]` int32, the lengths by which scalings that depend on them (LongRoPE) rotate; None:
        `kv_lens`. All tokens of a sequence must be computed on the same side of the scaling's switch.
      windows: page tables, such as `ring_table`, of layers with that window, which have pools of their own; layers of
        other windows, and all of them where it is None, go by `page_table`.
      states: `[2, sequences]` int32, for layers with a state: the slots that hold the states before the step,
        and those that get them after it; None for a model without such layers.
    """

    kv_lens: Int[Array, " sequences"]
    page_table: Int[Array, "sequences pages"]
    cu_q_lens: Int[Array, " sequences+1"]
    max_q_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    lengths: Int[Array, " sequences"] | None = None
    windows: Mapping[int, Int[Array, "sequences pages"]] | None = None
    states: Int[Array, "2 sequences"] | None = None

    def table(self, window: int | None) -> Int[Array, "sequences pages"]:
        """The page table of layers with that window."""
        return self.page_table if window is None else (self.windows or {}).get(window, self.page_table)

    def positions(self, tokens: int) -> Int[Array, " tokens"]:
        """The position of each of `tokens` new tokens in its sequence; 0 past the last sequence's end."""
        index = jnp.arange(tokens, dtype=jnp.int32)
        sequence = self.sequences(tokens)
        return jnp.maximum((self.kv_lens - self.cu_q_lens[1:])[sequence] + index, 0)

    def sequences(self, tokens: int) -> Int[Array, " tokens"]:
        """The sequence of each new token; the last one's past its end."""
        index = jnp.arange(tokens, dtype=jnp.int32)
        sequence = jnp.searchsorted(self.cu_q_lens[1:], index, side="right").astype(jnp.int32)
        return jnp.minimum(sequence, self.kv_lens.shape[0] - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedPages:
    """A pool of 8-bit keys and values, with what they are multiplied by; a pytree.

    Attributes:
      pool: array of a shape of `page_shapes`.
      k_scale, v_scale: float32, one for each layer and head: `[layers of the pool, kv_heads]`; or one for each token
        and head, which are written with the token: `scale_shape`. Latent pages have one head, and twice the same, or
        None for `v_scale` of tokens.
    """

    pool: PyTree
    k_scale: Float[Array, ...]
    v_scale: Float[Array, ...] | None

    @property
    def by_token(self) -> bool:
        """Whether each token has scales of its own."""
        return self.k_scale.ndim > 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedPool:
    """The pool of layers with pages and a state; a pytree.

    Attributes:
      pages: the pool of pages, an array or `QuantizedPages`.
      states: arrays `[slots, ...]` by the names of `Mixer.state`.
    """

    pages: PyTree
    states: PyTree


def pages_of(pool: PyTree) -> PyTree:
    """The pages of a layer's pool; None where it has states alone."""
    if isinstance(pool, MixedPool):
        return pool.pages
    return None if isinstance(pool, dict) else pool


def states_of(pool: PyTree) -> dict[str, Array] | None:
    """The states of a layer's pool; None where it has pages alone."""
    if isinstance(pool, MixedPool):
        return pool.states
    return pool if isinstance(pool, dict) else None


def with_pages(pool: PyTree, pages: PyTree) -> PyTree:
    """A layer's pool with `pages` in place of its own; one of states alone as it is."""
    if isinstance(pool, MixedPool):
        return dataclasses.replace(pool, pages=pages)
    return pool if isinstance(pool, dict) else pages


def first_entry(pool: PyTree, index: int | Array, layers: int) -> PyTree:
    """The first entry of layer `index` in a pool of so many layers: `first` of `Mixer.step`, for a `MixedPool` that of
    its pages and that of its states.
    """
    if isinstance(pool, MixedPool):
        return MixedPool(first_entry(pool.pages, index, layers), first_entry(pool.states, index, layers))
    return index * (jax.tree.leaves(pool)[0].shape[0] // layers)


def window_rings(config: ModelConfig, *, page_size: int, length: int, tokens: int) -> dict[int, int]:
    """The windows whose layers may keep a ring of pages for each sequence, and the pages of the ring.

    Page p of the sequence lies at place p modulo the ring's length, over pages that no later token sees. A ring that is
    longer than half of a sequence is not worth it and is left out.

    Args:
      page_size: tokens of a page.
      length: most tokens of a sequence.
      tokens: most new tokens of a sequence in one step, all of which see their windows.

    >>> from vishwamai.models import ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "mistral", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    ...     "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 64,
    ...     "max_position_embeddings": 512})
    >>> window_rings(config, page_size=16, length=512, tokens=32)
    {64: 7}
    """
    windows = sorted({kind.mixer.window for kind in config.layers if kind.mixer.window is not None})
    # The first new token sees `window - 1` tokens before it, the last one writes `tokens - 1` after it.
    rings = {window: -(-(window + tokens - 2) // page_size) + 1 for window in windows}
    return {window: ring for window, ring in rings.items() if 2 * ring <= -(-length // page_size)}


def ring_table(slots: Int[Array, " sequences"], ring: int, pages: int) -> Int[Array, "sequences pages"]:
    """The page table of sequences in rings of `ring` pages: ring number `slots[i]` is that of sequence i.

    >>> import numpy as np
    >>> ring_table(np.array([1, 0]), ring=3, pages=5).tolist()
    [[3, 4, 5, 3, 4], [0, 1, 2, 0, 1]]
    """
    return slots[:, None] * ring + jnp.arange(pages, dtype=jnp.int32) % ring


@checked
def page_shapes(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
    stacked: bool | None = None,
    window_pages: Mapping[int, int] | None = None,
    num_states: int = 0,
) -> tuple[PyTree, ...]:
    """Shapes of the pools that `Decoder.step` takes, one for each layer, or for each group of stacked layers.

    A group's pool holds `num_pages` of each of its layers; page tables count the pages of one layer. Layers with a
    state have a dict of float32 arrays of `num_states` slots in place of pages (`Mixer.state`), and layers with
    both a `MixedPool`.

    Args:
      num_pages: pages of one layer.
      page_size: tokens of a page.
      dtype: dtype of the stored keys and values.
      stacked: flag of the decoder; None for the platform's default.
      window_pages: pages of one layer with that window, in place of `num_pages`.
      num_states: slots of one layer with a state.

    Raises:
      UnsupportedError: layers have a state, and there are no slots for it.

    >>> import jax.numpy as jnp
    >>> from vishwamai.models import ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    ...     "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...     "max_position_embeddings": 512})
    >>> [x.shape for x in page_shapes(config, num_pages=8, page_size=16, dtype=jnp.float32, stacked=True)]
    [(24, 16, 4, 16)]
    """
    try:
        stored = jnp.dtype(dtype) if dtype is not None else None
    except (TypeError, ValueError):
        stored = None
    if stored is None:
        raise ShapeError(f"page_shapes: `dtype` is {described(dtype)}; pass a dtype, such as jnp.bfloat16 or 'int8'.")
    counts: Mapping[Any, int] = window_pages or {}

    def pool(kind: LayerKind, layers: int) -> PyTree:
        states = None
        if arrays := kind.mixer.state(config):
            if num_states < 1:
                raise UnsupportedError(
                    f"{config.family}: layers of type '{kind.mixer.layer_type}' have a state of one size for each "
                    f"sequence, but `num_states` is {num_states}; pass the number of its slots."
                )
            slots = layers * num_states
            states = {name: jax.ShapeDtypeStruct((slots, *shape), jnp.float32) for name, shape in arrays.items()}
            if not kind.mixer.has_pages(config):
                return states
        count = layers * counts.get(kind.mixer.window, num_pages)
        pages = jax.ShapeDtypeStruct((count, page_size, *kind.mixer.page_row(config)), stored)
        return pages if states is None else MixedPool(pages, states)

    return tuple(pool(kind, segment.repeats) for segment in segments(config, stacked) for kind in segment.kinds)


def has_states(config: ModelConfig) -> bool:
    """Whether any layer has a state, in place of pages or next to them."""
    return any(kind.mixer.state(config) for kind in dict.fromkeys(config.layers))


def scale_heads(row: tuple[int, ...]) -> int:
    """Heads that have scales of their own in 8-bit pages, by the shape of a token's row (`Mixer.page_row`)."""
    return row[0] // 2 if len(row) > 1 else 1


def scale_shape(pages: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of the keys, or of the values, of each token in pages of shape `pages`: that of a pool of
    one column, which `update_pages` writes.

    >>> scale_shape((24, 16, 4, 64)), scale_shape((24, 16, 576))
    ((24, 16, 2, 1), (24, 16, 1))
    """
    return (*pages[:2], *((scale_heads(pages[2:]),) if len(pages) > 3 else ()), 1)
