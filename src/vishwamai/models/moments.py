"""The second moments of the inputs of a decoder's products over a calibration text, layer by layer.

The error of a rounded product is `sum_k (w_k - q_k) x_k` over its inputs. Its mean square over a text is a quadratic
form of the errors of the weights, whose matrix is the mean of `x x^T`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.weight import WrappedWeight
from vishwamai.models.blocks import linear
from vishwamai.models.decoder import run_segment
from vishwamai.models.layers.mixer import Rows
from vishwamai.models.periods import segments

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from vishwamai.models.decoder import Decoder, Layer


@dataclasses.dataclass
class _Moments:
    """The sum of `x x^T` over the inputs of a product, and their number."""

    total: jax.Array | float = 0.0
    rows: int = 0

    def add(self, x: jax.Array) -> None:
        flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        self.total = self.total + flat.T @ flat
        self.rows += flat.shape[0]


@dataclasses.dataclass(frozen=True)
class _ObservedWeight(WrappedWeight):
    """A weight that adds up the moments of what it is multiplied with; outside of `jax.jit` only."""

    moments: _Moments

    def product(self, x: jax.Array, out_dtype: DTypeLike | None) -> jax.Array:
        self.moments.add(x)
        return linear(x, self.weight, out_dtype=out_dtype)

    def grouped(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        from vishwamai import grouped_gemm

        self.moments.add(x)
        return grouped_gemm(x, self.weight.astype(x.dtype), group_sizes)


def layer_moments(
    model: Decoder, rows: Sequence[Sequence[int]], layers: Iterable[Layer] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """For each layer in turn, the mean of `x x^T` over the inputs of each of its products, `[in, in]` float32 by
    parameter.

    The inputs of the next layer are computed when it is asked for, by the weights that the layers before it have then.
    The experts of a layer share one matrix, of all tokens that any of them gets.

    Args:
      model: decoder with plain weights, whose layers are not stacked.
      rows: token ids of texts.
      layers: the layers, where they are read in turn (`LayerFiles.layers`); None: those of the model.

    >>> from flax import nnx
    >>> from vishwamai.models import Decoder, ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    ...     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64})
    >>> [moments] = layer_moments(Decoder(config, rngs=nnx.Rngs(0), stacked=False), [[1, 2, 3]])
    >>> moments["query"].shape, moments["down"].shape
    ((32, 32), (48, 48))
    >>> round(float(np.trace(moments["query"])) / 32, 1)  # the norm before it makes the mean square 1
    1.0
    """
    config = model.config
    states = []
    for row in rows:
        tokens = Rows(None, None)
        states.append((tokens, *model.first_carry(jnp.asarray([list(row)], jnp.int32), tokens)))
    periods: dict[Any, Any] = {}
    for segment, layer in zip(segments(config, model.stacked), model.layers if layers is None else layers, strict=True):
        plain = {name: layer.arrays()[name] for name, p in segment.kinds[0].parameters(config).items() if p.matrix}
        moments = {name: _Moments() for name in plain}
        observed = {name: _ObservedWeight(value, moments[name]) for name, value in plain.items()}
        for tokens, carry, inputs in states:
            group = [layer.arrays() | observed]
            run_segment(config, segment, group, carry, tokens, None, lambda f: f, inputs=inputs)
        means = {name: np.asarray(entry.total / entry.rows) for name, entry in moments.items() if entry.rows}
        del plain, observed, group, moments  # which would be in memory next to the following layer
        yield means
        del means
        for place, (tokens, carry, inputs) in enumerate(states):
            carry, *_ = run_segment(
                config, segment, [layer.arrays()], carry, tokens, None, jax.jit, periods, inputs=inputs
            )
            states[place] = tokens, carry, inputs
