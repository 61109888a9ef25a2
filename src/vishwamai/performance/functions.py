"""Functions of the performance system that pass on to the functions that do the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vishwamai
from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import ShapeError

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


@checked
def flash_attention_forward(
    q: Float[Array, "batch heads q_len qk_dim"],
    k: Float[Array, "batch kv_heads kv_len qk_dim"],
    v: Float[Array, "batch kv_heads kv_len v_dim"],
    block_size: int | None = None,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """The forward pass of `vishwamai.flash_attention`.

    Args:
      q: `[batch, heads, q_len, qk_dim]`.
      k: `[batch, kv_heads, kv_len, qk_dim]`.
      v: `[batch, kv_heads, kv_len, v_dim]`.
      block_size: edge of the tiles, in elements; None takes the tuned ones.
      return_lse: bool, True returns the logsumexp, too.
      **options: the others of `vishwamai.flash_attention`.

    Returns:
      The output `[batch, heads, q_len, v_dim]`; with `return_lse=True` a pair of it and the natural logsumexp
      `[batch, heads, q_len]`, float32 (float64 for float64).

    Raises:
      VishwamaiError: as `vishwamai.flash_attention`.

    >>> import jax.numpy as jnp
    >>> x = jnp.zeros((1, 2, 8, 16))
    >>> flash_attention_forward(x, x, x, block_size=128).shape
    (1, 2, 8, 16)
    >>> out, lse = flash_attention_forward(x, x, x, return_lse=True)
    >>> out.shape, round(float(lse[0, 0, 0]), 4)  # the logarithm of 8 keys with logits of 0
    ((1, 2, 8, 16), 2.0794)
    """
    return vishwamai.flash_attention(q, k, v, block_size=block_size, return_lse=return_lse, **options)


@checked
def apply_gradient_checkpointing(model: object, checkpoint_policy: str = "block_wise") -> Any:
    """The model with a gradient that keeps less of the forward pass and recomputes the rest; its numbers stay.

    Args:
      model: a module of Flax, NNX or linen. Its blocks are siblings that are alike, or else its children.
      checkpoint_policy: "none", "dots", "block_wise" or "full"; of a `vishwamai.models.Decoder` "offload", too, or
        names of activations with commas between them.

    Returns:
      The module: of NNX it shares its parameters with `model`, of linen its parameters have the same tree. Of a
      `Decoder` a function of its arguments, `[batch, seq]` tokens to `[batch, seq, hidden]`.

    Raises:
      ShapeError: `model` is not a module of Flax.
      ConfigError: the policy is neither a policy nor an activation of this model.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from vishwamai.models import Decoder, ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    ...     "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64})
    >>> forward = apply_gradient_checkpointing(Decoder(config, rngs=nnx.Rngs(0)))
    >>> forward(jnp.ones((1, 5), jnp.int32)).shape
    (1, 5, 32)
    """
    from flax import linen, nnx

    from vishwamai.models import Decoder
    from vishwamai.training import remat, remat_modules

    if isinstance(model, Decoder):
        return remat.apply_gradient_checkpointing(model, checkpoint_policy)
    if not isinstance(model, (nnx.Module, linen.Module)):
        raise ShapeError(
            f"apply_gradient_checkpointing: `model` is {described(model)}; pass a module of Flax, NNX or linen."
        )
    return remat_modules.checkpoint_blocks(model, checkpoint_policy)
