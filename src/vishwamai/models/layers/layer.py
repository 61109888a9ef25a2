"""One layer of a decoder: a mixer and a feed-forward network, with their norms.

A layer takes the residual stream as a pair (stream, delta): `delta` is the last block's output, which the next norm
adds in its own pass over memory. Activations that a training step may keep for its backward pass have names
(`checkpoint_name`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vishwamai.models.axes import ONE_DEVICE
from vishwamai.models.blocks import norm
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.feed_forward import ExpertLoad, FeedForward, Gated
from vishwamai.models.layers.mixer import Arrays, Mixer, Rows, Step
from vishwamai.models.layers.mixture import Mixture
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, norm_parameter

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

NORM_TENSORS: Mapping[str, Tensor] = {
    "attention_norm": Tensor(PREFIX + "input_layernorm.weight"),
    "mlp_norm": Tensor(PREFIX + "post_attention_layernorm.weight"),
    "mlp_post_norm": Tensor(PREFIX + "post_feedforward_layernorm.weight"),
}


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The two halves of a layer.

    Attributes:
      mixer: the half in which tokens exchange information.
      feed_forward: the half that computes each token on its own.
    """

    mixer: Mixer = Attention()
    feed_forward: FeedForward = Gated()

    @property
    def experts(self) -> bool:
        """Whether the feed-forward network is a mixture of experts."""
        return isinstance(self.feed_forward, Mixture)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of checkpoints by the parameter's name, where a family has no other."""
        return {**NORM_TENSORS, **self.mixer.tensors, **self.feed_forward.tensors}

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        """The parameters of one layer by name."""
        places = {"pre": ("norm",), "post": ("post_norm",), "both": ("norm", "post_norm")}[config.norms]
        names = (f"{block}_{place}" for block in ("attention", "mlp") for place in places)
        norms = {name: norm_parameter(config, config.hidden_size) for name in names}
        return {**norms, **self.mixer.parameters(config), **self.feed_forward.parameters(config)}


def layer(
    config: ModelConfig,
    kind: LayerKind,
    arrays: Arrays,
    carry: tuple[Any, Any],
    tokens: Rows | Step,
    pool: Any = None,
    first: Any = 0,
    token_mask: Any = None,
) -> tuple[tuple[Any, Any], Any, ExpertLoad | None]:
    """One layer over whole sequences, or over new tokens and a state.

    Args:
      config: the model.
      kind: the layer's halves.
      arrays: its parameters by name.
      carry: (stream, delta), both `[batch, seq, hidden]`; their sum is the layer's input. A delta of None is 0.
      tokens: whole sequences, or the new tokens of a step.
      pool, first: as of `Mixer.step`; None for whole sequences.
      token_mask: as of `FeedForward`.

    Returns:
      The next carry, the pool, and the load of the experts (None without).
    """
    axes = tokens.axes if isinstance(tokens, Rows) else ONE_DEVICE
    x, carry = _enter(config, carry, arrays.get("attention_norm"))
    if isinstance(tokens, Rows):
        mixed = kind.mixer(config, arrays, x, tokens)
    else:
        mixed, pool = kind.mixer.step(config, arrays, x, tokens, pool, first)
    mixed = axes.total(mixed)
    x, carry = _enter(config, (carry, _leave(config, mixed, arrays.get("attention_post_norm"))), arrays.get("mlp_norm"))
    x = checkpoint_name(x, "mlp_input")
    out, load = kind.feed_forward(config, arrays, x, axes, token_mask)
    return (carry, _leave(config, axes.total(out), arrays.get("mlp_post_norm"))), pool, load


def _enter(config: ModelConfig, carry: tuple[Any, Any], scale: Any) -> tuple[Any, Any]:
    """A block's input and the stream: the sum of the carry, normalized where the family does so."""
    stream, delta = carry
    if delta is None:
        return stream if scale is None else norm(config, stream, scale), stream
    if scale is None:
        total = checkpoint_name(stream + delta, "stream")
        return total, total
    x, total = norm(config, delta, scale, residual=stream)
    return x, checkpoint_name(total, "stream")


def _leave(config: ModelConfig, delta: Any, scale: Any) -> Any:
    delta = checkpoint_name(delta, "block_output")
    if config.residual_multiplier != 1.0:
        delta = delta * jnp.asarray(config.residual_multiplier, delta.dtype)
    return delta if scale is None else norm(config, delta, scale)
