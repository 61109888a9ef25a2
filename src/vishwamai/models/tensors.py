"""Which tensors of a checkpoint make up each parameter, and back: a family's names applied to a configuration."""

from __future__ import annotations

import dataclasses

import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.models.config import ModelConfig
from vishwamai.models.families import FAMILIES
from vishwamai.models.parameters import TOP_TENSORS, Parameter


@dataclasses.dataclass(frozen=True)
class Piece:
    """One parameter of one layer within one tensor of a checkpoint.

    Attributes:
      tensors: the tensor's name, or the names of the tensors that the parameter stacks along its first axis.
      stacked: flag, the parameter stacks them.
      transpose: the tensor has the parameter's last two axes the other way round.
      axis: the tensor's axis that several parameters share; None where the parameter is the whole tensor.
      start, step, block: the parameter's part of that axis, so many entries every `step` ones; `total` is the axis's
        length.
      row: the tensor has an axis of 1 before the parameter's.
    """

    tensors: tuple[str, ...]
    transpose: bool
    stacked: bool = False
    axis: int | None = None
    start: int = 0
    step: int = 1
    total: int = 0
    block: int = 1
    row: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor, of the parameter's."""
        shape = shape[1:] if self.stacked else shape
        stored = (*shape[:-2], shape[-1], shape[-2]) if self.transpose else shape
        if self.axis is None:
            return (1, *stored) if self.row else stored
        return tuple(self.total if i == self.axis else n for i, n in enumerate(stored))

    def index(self, slices: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice | int | np.ndarray, ...]:
        """The index in NumPy's sense: where a part of the parameter lies in the tensor.

        Args:
          slices: a slice for each axis of the parameter, whose shape is `shape`; without the axis of stacked tensors.
        """
        shape = shape[1:] if self.stacked else shape
        bounds = [slice.indices(n)[:2] for slice, n in zip(slices, shape)]
        if self.transpose:
            bounds = [*bounds[:-2], bounds[-1], bounds[-2]]
        selection: list[slice | np.ndarray] = [slice(low, high) for low, high in bounds]
        if self.row:
            return (0, *selection)
        if self.axis is not None and self.block > 1:
            place = np.arange(*bounds[self.axis])
            selection[self.axis] = self.start + place // self.block * self.step + place % self.block
        elif self.axis is not None:
            low, high = bounds[self.axis]
            end = self.start + (high - 1) * self.step + 1 if high > low else self.start
            selection[self.axis] = slice(self.start + low * self.step, end, self.step)
        return tuple(selection)


def piece(config: ModelConfig, name: str, parameter: Parameter, layer: int | None) -> Piece:
    """Where parameter `name` lies in a checkpoint of the family.

    Args:
      layer: the layer's number, or None for parameters outside the layers.
    """
    common = TOP_TENSORS if layer is None else config.layers[layer].tensors
    family = FAMILIES[config.family]
    table = {**common, **family.tensors, **family.norm_tensors.get(config.norms, {})}
    if layer is None and config.next_token is not None:
        table |= config.next_token.tensors
    entry = table.get(name)
    if entry is None:
        raise ShapeError(
            f"models: parameter `{name}` has no tensor in checkpoints of {config.family}; add its `Tensor` to the "
            "layer or to the family."
        )
    name = entry.name.replace("{layer}", str(layer))
    stacked = "{expert}" in name
    names = tuple(name.replace("{expert}", str(i)) for i in range(parameter.shape[0])) if stacked else (name,)
    if entry.part is None:
        return Piece(names, entry.transpose, stacked, row=entry.row)
    rank = len(parameter.shape)
    axis = rank - 2 if entry.transpose else rank - 1
    if entry.part in _BY_GROUP:
        dim, group = config.head_dim, config.num_heads // config.num_kv_heads
        start, block = {"query": (0, group), "key": (group, 1), "value": (group + 1, 1)}[_BY_GROUP[entry.part]]
        step, total = (group + 2) * dim, config.num_kv_heads * (group + 2) * dim
        return Piece(names, entry.transpose, stacked, axis, start * dim, step, total, block=block * dim)
    start, step, total = _parts(config, parameter.shape[-1])[entry.part]
    return Piece(names, entry.transpose, stacked, axis, start, step, total)


def single_experts(where: Piece, name: str, parameter: Parameter) -> Piece | None:
    """Where the weights of experts lie that a quantized checkpoint has one by one, as linear layers, while a plain one
    has those of all experts in one tensor, gate and up side by side; None where that is not so.
    """
    stem, _, end = where.tensors[0].rpartition(".")
    if where.stacked or end not in ("gate_up_proj", "down_proj") or not name.startswith("expert_"):
        return None
    projection = name.removeprefix("expert_")
    names = tuple(f"{stem}.{i}.{projection}_proj.weight" for i in range(parameter.shape[0]))
    return Piece(names, transpose=True, stacked=True)


_BY_GROUP = {f"group_{name}": name for name in ("query", "key", "value")}
"""Parts of a tensor that holds, for one head of keys after the other, its queries, the key and the value."""


def _parts(config: ModelConfig, size: int) -> dict[str, tuple[int, int, int]]:
    """Start and step of each part of a fused tensor, and the length of the axis; the parameter has `size` of it."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = query + 2 * key
    return {
        "query": (0, 1, attention),
        "key": (query, 1, attention),
        "value": (query + key, 1, attention),
        "gate": (0, 1, 2 * size),
        "up": (size, 1, 2 * size),
        "even": (0, 2, 2 * size),
        "odd": (1, 2, 2 * size),
    }
