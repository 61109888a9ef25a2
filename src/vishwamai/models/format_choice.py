"""Which products of a decoder get more bits than the others, by what their rounding adds to the loss of a text.

To second order, rounding a weight by E raises the loss by `sum(F E^2) / 2`, with F the mean square of the gradient (the
diagonal of the Fisher information; Y. LeCun et al., "Optimal Brain Damage", 1989). The products with the largest sum
for each number get the wider format, as many as a mean number of bits allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from vishwamai.core.types import PyTree
from vishwamai.models.storage import Storage
from vishwamai.models.variables import parameter_variables

if TYPE_CHECKING:
    from vishwamai.models.decoder import Decoder

Unit = tuple[int, str]
"""A layer, and the name of products in it that have one format."""

_FUSED = {"query": "attention", "key": "attention", "value": "attention", "gate": "unit", "up": "unit"}


def unit(layer: int, name: str) -> Unit:
    """The unit of a parameter. vLLM fuses the projections of attention, gate and up, and the experts of a layer.

    >>> unit(0, "key"), unit(0, "down"), unit(1, "expert_down")
    ((0, 'attention'), (0, 'down'), (1, 'experts'))
    """
    return layer, "experts" if name.startswith("expert_") else _FUSED.get(name, name)


def losses(model: Decoder, rows: Sequence[Sequence[int]], storage: Storage) -> dict[Unit, float]:
    """What rounding each unit to a format adds to the loss of a text, up to a common factor.

    Args:
      model: decoder with plain weights in float32, whose layers are not stacked.
      rows: token ids of texts, each of which gives one gradient.
      storage: format of the rounded weights.
    """
    places = [(layers[0], n) for n, p, layers, _ in parameter_variables(model) if p.matrix and layers is not None]
    graph, weights, rest = nnx.split(model, lambda path, _: path[0] == "layers" and tuple(path[1:3]) in places, ...)

    def loss(weights: PyTree, tokens: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, weights, rest)
        logits = merged.logits(merged(tokens[None, :-1], wrap_layer=jax.jit)[0])
        return jnp.sum(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, tokens[1:, None], -1)[:, 0])

    gradient = jax.grad(loss)
    squares: PyTree = jax.tree.map(jnp.zeros_like, weights)
    for row in rows:
        squares = _with_squares(squares, gradient(weights, jnp.asarray(list(row), jnp.int32)))
    sums: dict[Unit, float] = {}
    for layer, name in places:
        weight = getattr(model.layers[layer], name).get_value()
        error = storage.quantize(weight).dequantize() - weight
        entry = squares["layers"][layer][name].get_value()
        sums[unit(layer, name)] = sums.get(unit(layer, name), 0.0) + float(jnp.sum(entry * error * error))
    return sums


@jax.jit
def _with_squares(squares: PyTree, gradients: PyTree) -> PyTree:
    return jax.tree.map(lambda total, gradient: total + gradient * gradient, squares, gradients)


def widened(losses: Mapping[Unit, float], sizes: Mapping[Unit, int], share: float) -> set[Unit]:
    """The units of largest loss for each number, which have at most a share of all numbers.

    >>> sorted(widened({(0, "down"): 4.0, (0, "unit"): 5.0, (1, "down"): 1.0}, {(0, "down"): 2, (0, "unit"): 4,
    ...     (1, "down"): 2}, 0.5))
    [(0, 'down'), (1, 'down')]
    """
    left = share * sum(sizes.values())
    chosen = set()
    for entry in sorted(sizes, key=lambda entry: -losses[entry] / sizes[entry]):
        if sizes[entry] <= left:
            chosen.add(entry)
            left -= sizes[entry]
    return chosen
