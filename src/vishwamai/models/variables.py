"""The parameters of a decoder, by name and layer, as it holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from vishwamai.core.types import PyTree
from vishwamai.models.parameters import top_parameters
from vishwamai.models.periods import segments

if TYPE_CHECKING:
    from flax import nnx

    from vishwamai.models.decoder import Decoder
    from vishwamai.models.parameters import Parameter


def named_parameters(model: Decoder) -> list[tuple[str, Parameter, int | None, PyTree]]:
    """Every parameter of a decoder with its table's entry: name, entry, layer (None outside the layers) and value, each
    layer of a stack on its own.
    """
    parameters: list[tuple[str, Parameter, int | None, PyTree]] = []
    for name, entry, layers, variable in parameter_variables(model):
        value = variable.get_value()
        if layers is None or len(layers) == 1:
            parameters.append((name, entry, None if layers is None else layers[0], value))
            continue
        for i, number in enumerate(layers):
            parameters.append((name, entry, number, jax.tree.map(lambda x: x[i], value)))  # noqa: B023 (called at once)
    return parameters


def parameter_variables(model: Decoder) -> list[tuple[str, Parameter, tuple[int, ...] | None, nnx.Param]]:
    """Every parameter as the decoder holds it: name, its table's entry, the layers that it stacks (None outside the
    layers), and the variable.
    """
    variables: list[tuple[str, Parameter, tuple[int, ...] | None, nnx.Param]]
    variables = [(name, p, None, getattr(model, name)) for name, p in top_parameters(model.config).items()]
    places = ((segment, i) for segment in segments(model.config, model.stacked) for i in range(len(segment.kinds)))
    for (segment, place), module in zip(places, model.layers, strict=True):
        entries = segment.kinds[place].parameters(model.config)
        variables += [(name, p, segment.layers(place), getattr(module, name)) for name, p in entries.items()]
    return variables
