"""Adapters of a served decoder: LoRA in the form of the library peft, several of them next to one model.

A weight W of a product becomes `x W + ((x A) * chosen) B`: A and B hold the matrices of all adapters side by side, and
`chosen` keeps each token's columns. So tokens of several adapters, and of none, share two products. Hu et al., "LoRA"
(2021).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.types import AnyArray
from vishwamai.core.weight import WrappedWeight
from vishwamai.models.blocks import linear
from vishwamai.models.config import ModelConfig
from vishwamai.models.parameters import Parameter
from vishwamai.models.shards import read_header
from vishwamai.models.tensors import Piece, piece
from vishwamai.models.values import read_json

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from vishwamai.models.decoder import Decoder

TARGETS = ("query", "key", "value", "output", "gate", "up", "down")
"""Products of a layer that may have an adapter."""

_PLAIN: Mapping[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "modules_to_save": None,
    "use_dora": False,
    "lora_bias": False,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,  # peft's name of experts in one tensor
}
"""What the settings of an adapter that is served say, where they say it."""

Place = tuple[int, str]
"""A layer's number, and the name of one of its parameters."""

Thin = tuple[np.ndarray, np.ndarray]
"""`[in, rank]`, and `[rank, out]` with the scale in it; float32."""


def read_adapter(directory: str | Path, config: ModelConfig) -> dict[Place, Thin]:
    """The matrices of an adapter by layer and parameter: `adapter_config.json` and `adapter_model.safetensors`.

    Args:
      directory: folder that peft wrote.
      config: the model that it adapts.

    Raises:
      ShapeError: a file is missing or damaged, or does not fit the model.
      UnsupportedError: it is not LoRA of the layers' products alone.
    """
    settings_path, path, settings = _settings(directory)
    tensors = read_header(path)
    places = _places(config)
    adapter: dict[Place, Thin] = {}
    used: set[str] = set()
    for (layer, name), (where, parameter) in places.items():
        module = where.tensors[0].removesuffix(".weight")
        names = [f"base_model.model.{module}.lora_{half}.weight" for half in "AB"]
        if names[0] not in tensors and names[1] not in tensors:
            continue
        if not all(half in tensors for half in names):
            raise ShapeError(f"{path}: it has one of `{names[0]}` and `{names[1]}`; expected both.")
        down, up = (np.asarray(tensors[half].read()).astype(np.float32) for half in names)
        used.update(names)
        rank, stored = down.shape[0], where.shape(parameter.shape)
        outer, inner = (0, 1) if where.transpose else (1, 0)  # GPT-2's weights are [in, out]
        if down.shape != (rank, stored[inner]) or up.shape != (stored[outer], rank):
            raise ShapeError(
                f"{path}: `{module}` has matrices of shapes {list(down.shape)} and {list(up.shape)}; the model's "
                f"weight has {list(stored)}."
            )
        rows = where.index((slice(None), slice(None)), parameter.shape)[outer]
        adapter[layer, name] = down.T, _scale(settings, module, rank, settings_path) * up[rows].T
    unread = sorted(tensors.keys() - used)
    if unread or not adapter:
        raise UnsupportedError(
            f"{path}: {f'`{unread[0]}` is not a matrix' if unread else 'it has no matrices'} of the products "
            f"{', '.join(TARGETS)} of this model's {config.num_layers} layers, which alone may have adapters; experts "
            "have none. Merge it into the model instead."
        )
    return adapter


def read_modules(directory: str | Path) -> dict[str, Thin]:
    """The matrices of an adapter by the names of the modules, those of tables of embeddings too.

    Args:
      directory: folder that peft wrote.

    Raises:
      ShapeError: a file is missing or damaged.
      UnsupportedError: it is not plain LoRA.
    """
    settings_path, path, settings = _settings(directory)
    tensors, halves = read_header(path), {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(embedding_)?([AB])(\.weight)?", name)
        if match is None or len(tensor.shape) != 2:
            raise UnsupportedError(f"{path}: `{name}` is not a matrix of LoRA; no other adapters are computed.")
        halves.setdefault(match[1], {})[match[3]] = np.asarray(tensor.read()).astype(np.float32)
    for module, pair in halves.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise ShapeError(f"{path}: the matrices of `{module}` are not two of one rank; save the adapter again.")
    return {
        module: (pair["A"].T, _scale(settings, module, pair["A"].shape[0], settings_path) * pair["B"].T)
        for module, pair in halves.items()
    }


def _settings(directory: str | Path) -> tuple[Path, Path, dict[str, object]]:
    """The files of an adapter's settings and matrices, and the settings, which are those of plain LoRA."""
    settings_path, path = Path(directory) / "adapter_config.json", Path(directory) / "adapter_model.safetensors"
    for file in (settings_path, path):
        if not file.is_file():
            raise ShapeError(f"{file}: the file is missing; expected an adapter as the library peft writes it.")
    settings = read_json(settings_path)
    for key, plain in _PLAIN.items():
        if settings.get(key, plain) not in (plain, None, [] if plain is None else plain):
            raise UnsupportedError(
                f"{settings_path}: `{key}` is {settings[key]!r:.100}; adapters with {plain!r} are served. Merge it "
                "into the model instead."
            )
    return settings_path, path, settings


def _places(config: ModelConfig) -> dict[Place, tuple[Piece, Parameter]]:
    """Where the products that may have an adapter lie in a checkpoint, and their weights `[in, out]`."""
    return {
        (layer, name): (piece(config, name, parameter, layer), parameter)
        for layer, kind in enumerate(config.layers)
        for name, parameter in kind.parameters(config).items()
        if name in TARGETS and parameter.matrix and len(parameter.shape) == 2
    }


def _scale(settings: Mapping[str, object], module: str, rank: int, path: Path) -> float:
    patterns = settings.get("alpha_pattern")
    entries = patterns.items() if isinstance(patterns, Mapping) else ()
    try:
        alpha = next((value for key, value in entries if re.match(rf"(.*\.)?({key})$", module)), None)
    except re.error as error:
        raise ShapeError(f"{path}: a key of `alpha_pattern` is not a regular expression ({error}).") from error
    alpha = settings.get("lora_alpha") if alpha is None else alpha
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ShapeError(f"{path}: `lora_alpha` is {alpha!r:.100}; expected a number.")
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedWeight(WrappedWeight):
    """A weight with the matrices of several adapters.

    Attributes:
      weight: `[in, out]`: an array, or one that is quantized or packed.
      down: `[in, columns]`, of all adapters. up: `[columns, out]`.
      chosen: `[tokens, columns]`, 1 where a column is of the token's adapter, and 0 elsewhere.
    """

    down: jax.Array
    up: jax.Array
    chosen: jax.Array

    def product(self, x: jax.Array, out_dtype: DTypeLike | None) -> jax.Array:
        base = linear(x, self.weight, out_dtype=jnp.float32)
        thin = linear(x, self.down) * self.chosen.astype(x.dtype)
        return (base + linear(thin, self.up, out_dtype=jnp.float32)).astype(out_dtype)

    def grouped(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        raise UnsupportedError("AdaptedWeight: experts have no adapters; leave them out of the adapter.")


@dataclasses.dataclass(frozen=True)
class AdapterSizes:
    """How many adapters are loaded at once, and the highest rank of one."""

    count: int
    rank: int

    def parameters(self, config: ModelConfig) -> dict[Place, tuple[Parameter, Parameter]]:
        """`down` and `up` of all adapters, by place: a mesh that splits the weight splits the same axis of them."""
        columns = self.count * self.rank
        return {
            where: (
                Parameter((weight.shape[0], columns), (weight.axes[0], None)),
                Parameter((columns, weight.shape[1]), (None, weight.axes[1])),
            )
            for where, (_, weight) in _places(config).items()
        }

    @staticmethod
    def modules(config: ModelConfig) -> set[str]:
        """Names of the modules of a checkpoint whose products may have an adapter."""
        return {where.tensors[0].removesuffix(".weight") for where, _ in _places(config).values()}

    def choice(self, places: jax.Array) -> jax.Array:
        """`[tokens, columns]` of the number of each token's adapter, -1 for none; see `AdaptedWeight`."""
        return places[:, None] == jnp.arange(self.count * self.rank, dtype=jnp.int32) // self.rank


def adapt(model: Decoder, matrices: Mapping[Place, tuple[AnyArray, AnyArray]], chosen: jax.Array) -> None:
    """Puts the matrices of adapters next to the weights of a decoder, in place; its layers are not stacked."""
    for (layer, name), (down, up) in matrices.items():
        variable = getattr(model.layers[layer], name)
        variable.set_value(AdaptedWeight(variable.get_value(), down, up, chosen))
