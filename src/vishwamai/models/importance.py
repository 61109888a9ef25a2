"""How much the inputs of a decoder's products matter: their mean squares over a calibration text.

The error of a rounded product is `sum_k (w_k - q_k) x_k` over its inputs. If those are not correlated, its expected
square weighs each row of the weight by the mean square of its input, which llama.cpp calls the importance matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from vishwamai.core.weight import WrappedWeight
from vishwamai.models.blocks import linear
from vishwamai.models.checkpoint import parameter_variables

if TYPE_CHECKING:
    from vishwamai.models.decoder import Decoder

Place = tuple[int, str]
"""A layer, and the name of a parameter."""


@dataclasses.dataclass
class _Squares:
    """The sum of the squares of a product's inputs, by feature, and the number of rows."""

    total: Any = 0.0
    rows: int = 0

    def add(self, x: Any) -> None:
        flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        self.total = self.total + jnp.sum(flat * flat, axis=0)
        self.rows += flat.shape[0]


@dataclasses.dataclass(frozen=True)
class _ObservedWeight(WrappedWeight):
    """A weight that adds up the squares of what it is multiplied with; outside of `jax.jit` only."""

    squares: _Squares

    def product(self, x: Any, out_dtype: Any) -> Any:
        self.squares.add(x)
        return linear(x, self.weight, out_dtype=out_dtype)

    def grouped(self, x: Any, group_sizes: Any) -> Any:
        from vishwamai import grouped_gemm

        self.squares.add(x)
        return grouped_gemm(x, self.weight.astype(x.dtype), group_sizes)


def importance(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    on_row: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Place, np.ndarray]:
    """The mean squares of the inputs of every product of the layers, `[in]` float32 each, by layer and parameter.

    The experts of a layer share one, of all tokens that any of them gets.

    Args:
      model: decoder with plain weights, whose layers are not stacked; it stays as it is.
      rows: token ids of texts.
      on_row: function that gets the number of texts that were computed, and of all.

    >>> from flax import nnx
    >>> from vishwamai.models import Decoder, ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    ...     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64})
    >>> squares = importance(Decoder(config, rngs=nnx.Rngs(0), stacked=False), [[1, 2, 3]])
    >>> squares[0, "query"].shape, squares[0, "down"].shape  # the norm before it makes the mean square 1
    ((32,), (48,))
    >>> round(float(squares[0, "query"].mean()), 1)
    1.0
    """
    squares: dict[Place, _Squares] = {}
    plain: list[tuple[Any, Any]] = []
    for name, parameter, layers, variable in parameter_variables(model):
        if parameter.matrix and layers is not None:
            plain.append((variable, variable.get_value()))
            squares[layers[0], name] = _Squares()
            variable.set_value(_ObservedWeight(variable.get_value(), squares[layers[0], name]))
    try:
        for done, row in enumerate(rows):
            on_row(done, len(rows))
            model(jnp.asarray([list(row)], jnp.int32)).block_until_ready()
    finally:
        for variable, value in plain:
            variable.set_value(value)
    return {place: np.asarray(entry.total / entry.rows) for place, entry in squares.items() if entry.rows}
