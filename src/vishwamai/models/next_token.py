"""Heads that predict the token after the next one ("multi-token prediction"), as drafters of their model.

    x_i = join([norm(embedding of token i + 1), norm(hidden state of token i)]) -> one layer -> norm -> the model's head

The hidden state is the model's after its last norm, or the head's of the guess before. The layer attends to the pairs
before it, so that it has pages of its own: the pair of token i is at position i. DeepSeek-AI, "DeepSeek-V3 Technical
Report" (2024), section 2.2. A checkpoint with several such layers is used by its first, again and again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models.blocks import final_norm, linear, norm
from vishwamai.models.config import ModelConfig
from vishwamai.models.decoder import Decoder, run_segment
from vishwamai.models.families import FAMILIES
from vishwamai.models.inputs import embedded
from vishwamai.models.layers.mixer import Step
from vishwamai.models.pages import PagedBatch
from vishwamai.models.parameters import NextToken
from vishwamai.models.periods import segments
from vishwamai.models.shards import read_index
from vishwamai.models.text_part import text_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jaxtyping import Float, Int

Entry = TypeVar("Entry")


class NextTokenHead(Decoder):
    """The decoder of one layer that a head is, of a configuration of `head_config`.

    Its embedding and its head are those of a model: `share` comes before `predict` and `logits`.
    """

    def share(self, model: Decoder) -> None:
        """Takes the embedding and the head of a model."""
        self.embed = model.embed
        if not self.config.tie_embeddings:
            self.head = model.head

    def predict(
        self,
        tokens: Int[Array, " tokens"],
        hidden: Float[Array, "tokens hidden"],
        pages: Sequence[PyTree],
        batch: PagedBatch,
    ) -> tuple[Float[Array, "tokens hidden"], tuple[PyTree, ...]]:
        """Hidden states of many sequences' new pairs, over the pages of the earlier ones.

        Args:
          tokens: `[tokens]`, the later token of each pair.
          hidden: `[tokens, hidden]`, the hidden state of the earlier one.
          pages: pools of the shapes that `page_shapes` gives.
          batch: the sequences; positions and lengths count pairs.

        Returns:
          `[tokens, hidden]`, which `logits` takes, and so does the next pair, whose earlier token is this one's later
          token; and the pages.
        """
        assert self.config.next_token is not None
        top, count = self.top_arrays(), tokens.shape[0]
        rows = embedded(self.config, {"embed": self.embed.get_value()}, tokens[None], self.dtype)
        pair = norm(self.config, rows, top["token_norm"]), norm(self.config, hidden[None], top["hidden_norm"])
        x = linear(jnp.concatenate(pair, axis=-1), top["join"])
        lengths = batch.kv_lens if batch.lengths is None else batch.lengths
        step = Step(batch, batch.positions(count)[None], lengths[batch.sequences(count)][None])
        (segment,), group = segments(self.config, self.stacked), [self.layers[0].arrays()]
        carry = x, jnp.zeros_like(x), {}
        (stream, delta, _), pools, _ = run_segment(self.config, segment, group, carry, step, tuple(pages), jax.jit)
        assert pools is not None
        normalized = self.config.next_token.normalized
        out = final_norm(self.config, top, delta, stream) if normalized else stream + delta
        return out[0], pools

    def logits(self, hidden: Float[Array, "*tokens hidden"]) -> Float[Array, "*tokens vocab"]:
        """float32 logits of the token after each pair."""
        assert self.config.next_token is not None
        if not self.config.next_token.normalized:
            hidden = final_norm(self.config, self.top_arrays(), hidden)
        return super().logits(hidden)


def decoder_class(config: ModelConfig) -> type[Decoder]:
    """The class of a model, or of a head."""
    return Decoder if config.next_token is None else NextTokenHead


def head_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the head of a model: one layer like the model's last one that attends to all tokens.

    Raises:
      UnsupportedError: heads of the family are not computed.

    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...     "max_position_embeddings": 512})
    >>> head_config(config)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    vishwamai.core.errors.UnsupportedError: llama: no head that predicts a further token (MTP) is computed...
    """
    entry = FAMILIES[config.family].next_token
    if entry is None:
        names = ", ".join(name for name, family in FAMILIES.items() if family.next_token is not None)
        raise UnsupportedError(
            f"{config.family}: no head that predicts a further token (MTP) is computed for this family; it is for "
            f"{names}. Guess by a draft model or from the text (--draft-model, --guesses)."
        )
    full = [
        kind
        for kind in config.layers
        if not kind.mixer.state(config) and kind.mixer.window is None and kind.mixer.layer_type != "shared"
    ]
    if not full:
        raise UnsupportedError(
            f"{config.family}: the layer of its head that predicts a further token attends to all tokens, but no layer "
            "of this model does. Guess from the text (--guesses)."
        )
    entry = dataclasses.replace(entry, start=entry.start.replace("{layers}", str(config.num_layers)))
    return dataclasses.replace(config, num_layers=1, layers=(full[-1],), dense_layers=0, next_token=entry)


def head_index(index: Mapping[str, Entry], head: NextToken) -> dict[str, Entry]:
    """The tensors of a head, those of its layer under the names of a model's first layer."""
    outside = {tensor.name for tensor in head.tensors.values()}
    copies = {head.start + name for name in head.copies}
    start = head.start + head.layer
    return {
        name if name in outside else name.replace(start, "model.layers.0.", 1): entry
        for name, entry in index.items()
        if name in outside or (name.startswith(start) and name not in copies)
    }


def check_head(directory: Path, head: NextToken) -> None:
    """Raises an error for a checkpoint without a head; reads headers only.

    Raises:
      ShapeError: it has none of the tensors.
    """
    join = head.tensors["join"].name
    if not any(name.startswith(join.removesuffix("weight")) for name in text_tensors(read_index(directory))):
        raise ShapeError(
            f"{directory}: the checkpoint has no tensor `{join}` of a head that predicts a further token (MTP). "
            "Leave out --draft-head, or download a checkpoint that has the head."
        )
