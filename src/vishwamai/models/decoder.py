"""The decoder: one Flax NNX module for every family, on the public operations alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

import vishwamai
from vishwamai.core.errors import ShapeError
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.types import PyTree
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import final_norm, head_matrix, in_dtype
from vishwamai.models.config import ModelConfig
from vishwamai.models.inputs import embedded, layer_inputs
from vishwamai.models.layers.altup import first_streams, last_stream
from vishwamai.models.layers.feed_forward import ExpertLoad
from vishwamai.models.layers.indexed import first_index
from vishwamai.models.layers.layer import Carry, layer
from vishwamai.models.layers.mixer import Rows, Step
from vishwamai.models.layers.shared_block import first_memory
from vishwamai.models.pages import PagedBatch, first_entry
from vishwamai.models.parameters import Parameter, parameter_axes, top_parameters
from vishwamai.models.periods import Segment, segments, stacks_layers

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int

Make = Callable[[str, Parameter, tuple[int, ...] | None], PyTree]
"""How a parameter comes into being: its name, its shape, and the layers that it stacks (None outside the layers)."""
Period = Callable[..., tuple[Carry, PyTree, PyTree]]
"""One period of layers: carry, pools, parameters and turn to the next carry, the pools and the loads."""
WrapLayer = Callable[[Period], Period]


class Layer(nnx.Module):
    """The parameters of one layer, or of stacked layers along a leading axis."""

    def __init__(self, arrays: dict[str, PyTree]):
        for name, value in arrays.items():
            setattr(self, name, nnx.Param(value))

    def arrays(self) -> dict[str, PyTree]:
        """The values by name."""
        return {name: value.get_value() for name, value in vars(self).items() if isinstance(value, nnx.Param)}


class Decoder(nnx.Module):
    """A decoder-only transformer.

    Weights of products are `[in, out]`, as `vishwamai.gemm` reads them; the embedding and the head are
    `[vocab, hidden]`. Where layers are stacked (`stacked`), every parameter of a layer has a leading axis for the
    layers of its group, and a scan runs them.

    Args:
      config: sizes and layers.
      rngs: seeds of random weights (`rngs.params()`).
      dtype: dtype of products and activations.
      param_dtype: dtype of the parameters.
      stacked: stack and scan layers that repeat; None for the platform's default: not on the CPU.
      make: makes each parameter in place of random weights.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from vishwamai.models import Decoder, ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...     "max_position_embeddings": 512})
    >>> model = Decoder(config, rngs=nnx.Rngs(0))
    >>> hidden = model(jnp.ones((1, 5), jnp.int32))
    >>> hidden.shape, model.logits(hidden).shape
    ((1, 5, 64), (1, 5, 256))
    """

    embed: nnx.Param
    norm: nnx.Param
    head: nnx.Param  # absent where the embedding table is the head
    head_bias: nnx.Param  # of few families

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        stacked: bool | None = None,
        make: Make | None = None,
    ):
        if make is None:
            if rngs is None:
                raise ShapeError("Decoder: `rngs` is None; pass `rngs=nnx.Rngs(seed)` for random weights.")
            make = _random(config, rngs, param_dtype)
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.stacked = stacks_layers(stacked)
        for name, parameter in top_parameters(config).items():
            setattr(self, name, nnx.Param(make(name, parameter, None)))
        self.layers = nnx.List(
            [
                Layer({name: make(name, p, segment.layers(i)) for name, p in kind.parameters(config).items()})
                for segment in segments(config, self.stacked)
                for i, kind in enumerate(segment.kinds)
            ]
        )

    @property
    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        """The logical names of the axes of each parameter, by its name: what `vishwamai.parallel.shard` asks for."""
        return parameter_axes(self.config)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        *,
        wrap_layer: WrapLayer | None = None,
        axes: MeshAxes = ONE_DEVICE,
    ) -> Float[Array, "batch seq hidden"]:
        """Hidden states after the last norm, each of the tokens up to its own.

        Args:
          tokens: ids in the vocabulary.
          positions: positions of the tokens; None counts every row from 0.
          segment_ids: tokens see those of their own segment only (packed sequences); None for one segment a row.
            Segment 0 is padding, which the load of the experts leaves out.
          wrap_layer: transformation that is applied to the function of one layer, or of one period of stacked layers,
            such as `jax.checkpoint`.
          axes: mesh axes over which the model is split, inside `shard_map`.

        Returns:
          `[batch, seq, hidden]` in the decoder's dtype.
        """
        return self.with_load(tokens, positions, segment_ids, wrap_layer=wrap_layer, axes=axes)[0]

    def with_load(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        *,
        wrap_layer: WrapLayer | None = None,
        axes: MeshAxes = ONE_DEVICE,
    ) -> tuple[Float[Array, "batch seq hidden"], tuple[ExpertLoad | None, ...]]:
        """Hidden states, and the load of the experts: for each entry of `layers` an `ExpertLoad` (None without
        experts), with a leading axis where its layers are stacked. The arguments are those of a call.
        """
        if positions is None and axes.sequence is not None:
            raise ShapeError(
                f"Decoder: `positions` is None, but the rows are split over the mesh axis {axes.sequence!r}; pass the "
                "positions of this device's tokens."
            )
        rows = Rows(positions, segment_ids, axes)
        mask = None if segment_ids is None else segment_ids > 0
        hidden, _, load = self._run(tokens, rows, None, wrap_layer or (lambda f: f), mask)
        return hidden, load

    def step(
        self, tokens: Int[Array, " tokens"], pages: Sequence[PyTree], batch: PagedBatch
    ) -> tuple[Float[Array, "tokens hidden"], tuple[PyTree, ...]]:
        """Hidden states of many sequences' new tokens, over the pages of the earlier ones: a serving step.

        Under `jax.jit` with the pages donated, they are written in place.

        Args:
          tokens: `[tokens]`, those of each sequence in turn, as `batch.cu_q_lens` counts them; the rest is padding.
          pages: pools of the shapes that `page_shapes` gives; 8-bit ones as `QuantizedPages`.
          batch: the sequences.

        Returns:
          `[tokens, hidden]` after the last norm, and the pages.
        """
        count = tokens.shape[0]
        lengths = batch.kv_lens if batch.lengths is None else batch.lengths
        step = Step(batch, batch.positions(count)[None], lengths[batch.sequences(count)][None])
        # Layers of one kind are traced and lowered once, so programs of many layers are soon ready.
        hidden, pools, _ = self._run(tokens[None], step, tuple(pages), jax.jit)
        return hidden[0], pools

    def top_arrays(self) -> dict[str, PyTree]:
        """The values of the parameters outside of the layers by name."""
        return {name: getattr(self, name).get_value() for name in top_parameters(self.config)}

    def head_weight(self) -> Float[Array, "vocab hidden"]:
        """The head `[vocab, hidden]`, as `vishwamai.linear_cross_entropy` takes it: the embedding table if tied."""
        return head_matrix(self.config, (self.embed if self.config.tie_embeddings else self.head).get_value())

    def logits(self, hidden: Float[Array, "*tokens hidden"]) -> Float[Array, "*tokens vocab"]:
        """float32 logits of hidden states, with the family's final soft-cap."""
        weight = in_dtype(self.head_weight(), hidden.dtype)
        flat = hidden.reshape(1, -1) if hidden.ndim == 1 else hidden
        transposed = not isinstance(weight, PackedQTensor)  # a packed one is [hidden, vocab]
        bias = self.head_bias.get_value() if self.config.head_bias else None
        logits = vishwamai.gemm(flat, weight, bias=bias, transpose_b=transposed, out_dtype=jnp.float32)
        cap = self.config.final_logit_softcap
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return logits.reshape(*hidden.shape[:-1], self.config.vocab_size)

    def first_carry(
        self, ids: jax.Array, tokens: Rows | Step, pools: tuple[PyTree, ...] | None = None
    ) -> tuple[Carry, jax.Array | None]:
        """The carry of the first layer, and the inputs that layers have besides it: arguments of `run_segment`."""
        axes = tokens.axes if isinstance(tokens, Rows) else ONE_DEVICE
        top = self.top_arrays()
        x = embedded(self.config, top, ids, self.dtype, axes, tokens.positions)
        inputs = layer_inputs(self.config, top, ids, x, axes)
        if self.config.altup is not None:
            x = first_streams(self.config, top, x)
        memory = {**first_index(self.config, x.shape[:2], tokens, pools), **first_memory(self.config, x)}
        return (x, jnp.zeros_like(x), memory), inputs

    def _run(
        self,
        ids: jax.Array,
        tokens: Rows | Step,
        pools: tuple[PyTree, ...] | None,
        wrap: WrapLayer,
        token_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[PyTree, ...], tuple[ExpertLoad | None, ...]]:
        (carry, inputs), states, start = self.first_carry(ids, tokens, pools), [], 0
        loads: list[ExpertLoad | None] = []
        periods: dict[object, Period] = {}
        for segment in segments(self.config, self.stacked):
            end = start + len(segment.kinds)
            group = [layers.arrays() for layers in self.layers[start:end]]
            part = None if pools is None else tuple(pools[start:end])
            carry, part, load = run_segment(
                self.config, segment, group, carry, tokens, part, wrap, periods, token_mask, inputs
            )
            states += part or ()
            loads += load
            start = end
        top = self.top_arrays()
        stream, delta, _ = carry
        if self.config.altup is not None:
            stream, delta = last_stream(self.config, top, stream + delta), None
        hidden = final_norm(self.config, top, stream) if delta is None else final_norm(self.config, top, delta, stream)
        return hidden, tuple(states), tuple(loads)


def run_segment(
    config: ModelConfig,
    segment: Segment,
    group: list[dict[str, PyTree]],
    carry: Carry,
    tokens: Rows | Step,
    pools: tuple[PyTree, ...] | None,
    wrap: WrapLayer,
    periods: dict[object, Period] | None = None,
    token_mask: jax.Array | None = None,
    inputs: jax.Array | None = None,
) -> tuple[Carry, tuple[PyTree, ...] | None, tuple[ExpertLoad | None, ...]]:
    """The layers of one segment: in turn, or by a scan over its periods, with the pools in the scan's carry, so that
    they are written in place.

    Args:
      config: the model.
      segment: its layers.
      group: parameters by name for each of its kinds, with a leading axis where the segment repeats.
      carry: (stream, delta, memory), as of `layer`.
      tokens: whole sequences, or the new tokens of a step.
      pools: states for each of its kinds; None for whole sequences.
      wrap: function that is applied to the function of one period.
      periods: wrapped functions of earlier segments with the same other arguments, by what they depend on; it gets this
        one's. Segments of the same kinds then share one function, which JAX traces once.
      token_mask: mask of `FeedForward`.
      inputs: result of `layer_inputs`.

    Returns:
      The next carry, the pools, and the load of the experts of each kind.
    """

    def period(carry: Carry, pools: PyTree, group: PyTree, turn: PyTree) -> tuple[Carry, PyTree, PyTree]:
        states, loads = [], []
        index, features = turn
        for place, kind in enumerate(segment.kinds):
            pool = None if pools is None else pools[place]
            first = 0 if pool is None else first_entry(pool, index, segment.repeats)
            carry, pool, load = layer(
                config, kind, group[place], carry, tokens, pool, first, token_mask, features and features[place]
            )
            states.append(pool)
            loads.append(load)
        return carry, None if pools is None else tuple(states), tuple(loads)

    key = segment.kinds, segment.repeats
    run = wrap(period) if periods is None else periods.setdefault(key, wrap(period))
    features = None
    if inputs is not None:
        features = tuple(inputs[jnp.asarray(segment.layers(place))] for place in range(len(segment.kinds)))
    if segment.repeats == 1:
        return run(carry, pools, group, (0, features and tuple(x[0] for x in features)))

    def body(state: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        *state, loads = run(*state, *xs)
        return tuple(state), loads

    turns = jnp.arange(segment.repeats, dtype=jnp.int32), features
    (carry, pools), loads = jax.lax.scan(body, (carry, pools), (group, turns))
    return carry, pools, loads


def _random(config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> Make:
    """Parameters as transformers starts them: normal weights, norms that do nothing, no biases."""

    def make(name: str, parameter: Parameter, layers: tuple[int, ...] | None) -> jax.Array:
        shape = parameter.shape if layers is None or len(layers) == 1 else (len(layers), *parameter.shape)
        if parameter.start == "log_uniform":
            rates = jax.random.uniform(rngs.params(), shape, jnp.float32, 0.01, 16.0)
            return jnp.log(rates).astype(dtype)
        if parameter.start != "normal":
            value = 1.0 if parameter.start == "ones" else 0.0
            return jnp.full(shape, value, jnp.float32 if parameter.float32 else dtype)
        values = config.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32)
        if name == "embed" and config.pad_token_id is not None and config.pad_token_id < shape[0]:
            values = values.at[config.pad_token_id].set(0.0)
        return values.astype(dtype)

    return make
