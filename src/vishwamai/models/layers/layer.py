"""One layer of a decoder: a mixer and a feed-forward network, with their norms.

A layer takes the residual stream as two arrays, stream and delta: `delta` is the last block's output, which the next
norm adds in its own pass over memory. Activations that a training step may keep for its backward pass have names
(`checkpoint_name`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vishwamai.core.types import PyTree
from vishwamai.models.axes import ONE_DEVICE
from vishwamai.models.blocks import norm, times
from vishwamai.models.layers import altup, layer_embedding
from vishwamai.models.layers.absent import NoFeedForward, NoMixer
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.feed_forward import ExpertLoad, FeedForward, Gated
from vishwamai.models.layers.indexed import INDEX, SharedIndexAttention
from vishwamai.models.layers.mixer import Arrays, Memory, Mixer, Rows, Step
from vishwamai.models.layers.mixture import GatedAndMixture, Mixture
from vishwamai.models.layers.shared_block import SharedBlockAndMamba
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, norm_parameters

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

_TENSORS: Mapping[str, Tensor] = {
    "layer_scale": Tensor(PREFIX + "layer_scalar"),
    **layer_embedding.TENSORS,
    **altup.TENSORS,
    **{
        f"{name}{suffix}": Tensor(f"{PREFIX}{module}.{kind}")
        for name, module in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
            ("mlp_post_norm", "post_feedforward_layernorm"),
        )
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    },
}
NORMS: Mapping[str, tuple[str, ...]] = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_post_norm", "mlp_post_norm"),
    "both": ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
    "parallel": ("attention_norm", "mlp_norm"),
    "shared": ("attention_norm",),
    "stream": ("attention_norm", "mlp_norm"),
    "mixer": (),
}
"""Names of a layer's norms, by `ModelConfig.norms`."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The two halves of a layer.

    Attributes:
      mixer: the half in which tokens exchange information.
      feed_forward: the half that computes each token on its own.
      norms: place of its norms; None for `ModelConfig.norms`; "mixer" where the mixer does so itself.
    """

    mixer: Mixer = Attention()
    feed_forward: FeedForward = Gated()
    norms: str | None = None

    @property
    def experts(self) -> bool:
        """Whether the feed-forward network is a mixture of experts."""
        return isinstance(self.feed_forward, (Mixture, GatedAndMixture))

    @property
    def sharing(self) -> str | None:
        """`sharing` of the mixer; None of mixers that share nothing."""
        return self.mixer.sharing if isinstance(self.mixer, (Attention, SharedBlockAndMamba)) else None

    @property
    def mixes(self) -> bool:
        """Whether the layer has a mixer."""
        return not isinstance(self.mixer, NoMixer)

    @property
    def computes(self) -> bool:
        """Whether the layer has a feed-forward network."""
        return not isinstance(self.feed_forward, NoFeedForward)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of checkpoints by the parameter's name, where a family has no other."""
        return {**_TENSORS, **self.mixer.layer_tensors, **self.feed_forward.tensors}

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        """The parameters of one layer by name."""
        halves = {"attention": self.mixes, "mlp": self.computes}
        names = [name for name in NORMS[self.norms or config.norms] if halves[name.split("_")[0]]]
        norms = {key: p for name in names for key, p in norm_parameters(config, name).items()}
        if config.layer_scale:
            norms["layer_scale"] = Parameter((1,), (None,), "ones")
        norms |= {**layer_embedding.parameters(config), **altup.parameters(config)}
        return {**norms, **self.mixer.parameters(config), **self.feed_forward.parameters(config)}


Carry = tuple[jax.Array, PyTree, Memory]


def layer(
    config: ModelConfig,
    kind: LayerKind,
    arrays: Arrays,
    carry: Carry,
    tokens: Rows | Step,
    pool: PyTree = None,
    first: PyTree = 0,
    token_mask: jax.Array | None = None,
    features: jax.Array | None = None,
) -> tuple[Carry, PyTree, ExpertLoad | None]:
    """One layer over whole sequences, or over new tokens and a state.

    Args:
      config: the model.
      kind: the layer's halves.
      arrays: its parameters by name.
      carry: (stream, delta, memory): `[batch, seq, hidden]` twice, whose sum is the layer's input (a delta of None is
        0), and by type of layer the keys and values, or the pool and its index, of layers whose `sharing` is "writes";
        and the tokens chosen, where layers share them (`indexed.first_index`), and what `shared_block` shares.
      tokens: whole sequences, or the new tokens of a step.
      pool, first: state and index of `Mixer.step`; None for whole sequences.
      token_mask: mask of `FeedForward`.
      features: `[batch, seq, features]`, the layer's own vectors of the tokens (`inputs.layer_inputs`), or None.

    Returns:
      The next carry, the pool, and the load of the experts (None without).
    """
    axes = tokens.axes if isinstance(tokens, Rows) else ONE_DEVICE
    norms = kind.norms or config.norms
    stream, delta, memory = carry

    def mix(x: jax.Array) -> jax.Array:
        nonlocal pool, memory
        mixed, pool, memory = _mixed(config, kind, arrays, x, tokens, pool, first, memory)
        return mixed

    if config.altup is not None:
        assert features is not None, "per-layer embeddings come with AltUp"

        def compute(x: jax.Array) -> jax.Array:
            return kind.feed_forward(config, arrays, x, axes, token_mask)[0]

        stream = altup.layer(config, config.altup, arrays, stream + delta, mix, compute, features, axes)
        return (stream, jnp.zeros_like(stream), memory), pool, None
    if not kind.mixes:
        x, stream = _enter(config, norms, arrays, "mlp_norm", stream, delta)
        out, load = kind.feed_forward(config, arrays, checkpoint_name(x, "mlp_input"), axes, token_mask)
        return (stream, _leave(config, norms, arrays, "mlp_post_norm", axes.total(out)), memory), pool, load
    x, stream = _enter(config, norms, arrays, "attention_norm", stream, delta)
    if norms == "stream":
        stream = times(x, kind.mixer.stream_scale)
    mixed = mix(x)
    if not kind.computes:
        return (stream, _leave(config, norms, arrays, "attention_post_norm", axes.total(mixed)), memory), pool, None
    parallel = norms in ("parallel", "shared")
    if not parallel:
        mixed = times(_leave(config, norms, arrays, "attention_post_norm", axes.total(mixed)), kind.mixer.block_scale)
        x, stream = _enter(config, norms, arrays, "mlp_norm", stream, mixed)
        if norms == "stream":
            stream = times(x, config.mlp_stream_scale)
    elif norms == "parallel":
        x, _ = _enter(config, norms, arrays, "mlp_norm", stream, None)
    x = checkpoint_name(x, "mlp_input")
    extra = {"stream": stream} if kind.feed_forward.reads_stream else {}
    out, load = kind.feed_forward(config, arrays, x, axes, token_mask, **extra)
    out = axes.total(out + mixed if parallel else out)
    out = times(_leave(config, norms, arrays, "mlp_post_norm", out), config.mlp_block_scale)
    if features is not None:
        stream = stream + out
        out = layer_embedding.output(config, arrays, stream, features)
    if config.layer_scale:
        scale = jax.lax.stop_gradient(arrays["layer_scale"]).astype(stream.dtype)
        stream, out = stream * scale, out * scale
    return (stream, out, memory), pool, load


def _mixed(
    config: ModelConfig,
    kind: LayerKind,
    arrays: Arrays,
    x: jax.Array,
    tokens: Rows | Step,
    pool: PyTree,
    first: PyTree,
    memory: Memory,
) -> tuple[jax.Array, PyTree, Memory]:
    """The mixer's output, the pool, and the memory with the layer's keys and values where others read them."""
    mixer, name, sharing = kind.mixer, kind.mixer.layer_type, kind.sharing
    if INDEX in memory:
        assert isinstance(mixer, SharedIndexAttention)
        mixed, pool, index = mixer.mixed(config, arrays, x, tokens, pool, first, memory[INDEX])
        return mixed, pool, {**memory, INDEX: index}
    if isinstance(mixer, SharedBlockAndMamba):
        return mixer.mixed(config, arrays, x, tokens, pool, first, memory)
    if isinstance(tokens, Step) and sharing == "reads":
        return mixer.step(config, arrays, x, tokens, *memory[name])[0], pool, memory
    if isinstance(tokens, Step):
        mixed, pool = mixer.step(config, arrays, x, tokens, pool, first)
        return mixed, pool, {**memory, name: (pool, first)} if sharing == "writes" else memory
    if sharing is None:
        return mixer(config, arrays, x, tokens), pool, memory
    assert isinstance(mixer, Attention)
    source = memory[name] if sharing == "reads" else None
    mixed, source = mixer.with_memory(config, arrays, x, tokens, source)
    return mixed, pool, {**memory, name: source}


def _enter(
    config: ModelConfig, norms: str, arrays: Arrays, name: str, stream: jax.Array, delta: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """A block's input and the stream: the sum of the two, normalized where the family has a norm of that name."""
    if name not in NORMS[norms]:
        total = stream if delta is None else checkpoint_name(stream + delta, "stream")
        return total, total
    scale, bias = arrays.get(name), arrays.get(f"{name}_bias")
    if delta is None:
        return norm(config, stream, scale, bias=bias), stream
    x, total = norm(config, delta, scale, stream, bias)
    return x, checkpoint_name(total, "stream")


def _leave(config: ModelConfig, norms: str, arrays: Arrays, name: str, delta: jax.Array) -> jax.Array:
    """A block's output, normalized where the family has a norm of that name."""
    delta = checkpoint_name(delta, "block_output")
    if name in NORMS[norms]:
        delta = norm(config, delta, arrays.get(name), bias=arrays.get(f"{name}_bias"))
    return times(delta, config.block_multiplier)
