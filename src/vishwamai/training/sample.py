"""A sample of a model that was just trained; serving, with its cache, is `vishwamai.inference`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.models import Decoder
from vishwamai.training.tokens import first_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def sample(model: Decoder, tokenizer: Tokenizer, prompt: str, tokens: int, seed: int = 0) -> str:
    """The text that a model writes after a prompt, at temperature 0.7; every token computes all those before it.

    Args:
      model: the decoder.
      tokenizer: its tokenizer.
      prompt: the text to continue, at least one token.
      tokens: number of tokens to write; fewer if the model ends its text.
      seed: seed of the random choices.
    """
    ids = [*first_tokens(tokenizer), *tokenizer.encode(prompt, add_special_tokens=False).ids]
    end = model.config.eos_token_id
    ends = {end} if isinstance(end, int) else set(end or ())
    row = np.zeros((1, len(ids) + tokens), np.int32)
    row[0, : len(ids)] = ids

    @jax.jit
    def choose(row: jax.Array, position: jax.Array, key: jax.Array) -> jax.Array:
        hidden = model(row)[:, position - 1]
        return jax.random.categorical(key, model.logits(hidden)[0].astype(jnp.float32) / 0.7)

    keys = jax.random.split(jax.random.key(seed), tokens)
    for position, key in enumerate(keys, len(ids)):
        row[0, position] = int(choose(row, position, key))
        if int(row[0, position]) in ends:
            return tokenizer.decode(row[0, :position].tolist())
    return tokenizer.decode(row[0].tolist())
