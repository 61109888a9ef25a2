"""Hugging Face directories in and out: `from_pretrained` and `save_pretrained`.

Tensors are read by parts, straight into (sharded) device arrays: host memory beyond the arrays is one tensor at most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import QTensor
from vishwamai.models.config import ModelConfig, read_config, read_json
from vishwamai.models.decoder import Decoder
from vishwamai.models.parameters import LOGICAL_NAMES, Parameter, layer_parameters, top_parameters
from vishwamai.models.periods import segments
from vishwamai.models.published import Decoded, Index, decode_index
from vishwamai.models.shards import Stored, read_index
from vishwamai.models.tensors import Piece, piece
from vishwamai.ops.quantization import quantize as quantize_array
from vishwamai.parallel import LogicalRules

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int4": {"format": "int4", "block_size": 32},
    "fp8": {"format": "fp8_e4m3"},
}
"""What `quantize` means, as options of `vishwamai.quantize`: scales for each column, or blocks of 32 rows of it."""


def from_pretrained(
    directory: str | Path,
    *,
    dtype: Any = jnp.bfloat16,
    mesh: Mesh | None = None,
    rules: Mapping[str, Any] | None = None,
    quantize: str | None = None,
    stacked: bool | None = None,
) -> Decoder:
    """The decoder in a Hugging Face directory (`config.json` and safetensors files).

    Args:
      directory: where the files are.
      dtype: of parameters, products and activations.
      mesh: devices to split the parameters over; each process reads its own parts only.
      rules: mesh axes by the logical name of an axis, a `LogicalRules` or a dict. The names are
        `parameters.LOGICAL_NAMES`; those without a rule stay whole.
      quantize: "int8", "int4" or "fp8": weights of the layers' products become `QTensor`s.
      stacked: as of `Decoder`.

    Raises:
      ShapeError: a file or a tensor is missing, damaged, or contradicts `config.json`; the text names the file, the
        tensor, what was expected and what was found.
      UnsupportedError: the configuration is not one that the decoder computes.
    """
    directory = Path(directory)
    config = read_config(directory)
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise ShapeError(f"from_pretrained: `quantize` is {quantize!r}; pass {', '.join(QUANTIZATIONS)} or None.")
    if rules and mesh is None:
        raise ShapeError("from_pretrained: `rules` are given without a `mesh`; pass the mesh whose axes they name.")
    unknown = [name for name in rules or () if name not in LOGICAL_NAMES]
    if unknown:
        raise ShapeError(
            f"from_pretrained: `rules` have {unknown[0]!r}; a decoder's axes are named {', '.join(LOGICAL_NAMES)}."
        )
    checked_rules = LogicalRules({**dict.fromkeys(LOGICAL_NAMES), **(rules or {})})
    settings = read_json(directory / "config.json").get("quantization_config")
    index = decode_index(read_index(directory), settings, str(directory / "config.json"))
    used: set[str] = set()

    def make(name: str, parameter: Parameter, layers: tuple[int, ...] | None) -> Any:
        pieces = [piece(config, name, parameter, layer) for layer in layers or (None,)]
        stored = [_find(index, one, parameter, directory) for one in pieces]
        used.update(name for one in pieces for name in one.tensors)
        kind = jnp.float32 if parameter.float32 else dtype
        where = name if layers is None else f"layers/{layers[0]}/{name}"
        sharding = None if mesh is None else parameter_sharding(mesh, checked_rules, parameter, len(pieces), where)
        value = _read(parameter, pieces, stored, kind, sharding)
        if quantize is None or not parameter.matrix:
            return value
        return _quantize(value, quantize)

    model = Decoder(config, dtype=dtype, param_dtype=dtype, stacked=stacked, make=make)
    _check_unused(config, directory, index, used)
    return model


def quantized(model: Decoder, quantize: str) -> Decoder:
    """The decoder with the weights of the layers' products quantized, in place; under `nnx.eval_shape`, its shapes.

    Args:
      quantize: a name of `QUANTIZATIONS`.
    """
    for _, parameter, _, held in held_parameters(model):
        if parameter.matrix:
            held.set_value(_quantize(held.get_value(), quantize))
    return model


def _quantize(value: jax.Array, name: str) -> QTensor:
    return jax.jit(lambda x: quantize_array(x, axis=-2, **QUANTIZATIONS[name]))(value)


def _check_unused(config: ModelConfig, directory: Path, index: Index, used: set[str]) -> None:
    """A tensor that nothing reads means that the configuration describes another model."""
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    extra = f"model.layers.{config.num_layers}."  # DeepSeek's layer that predicts a second token
    left = sorted(n for n in index if n not in used | ignored and not n.endswith("rotary_emb.inv_freq"))
    left = [n for n in left if config.latent is None or not n.startswith(extra)]
    if left:
        raise ShapeError(
            f"{index[left[0]].path}: tensor `{left[0]}` is not expected in a {config.family} model of "
            f"{directory / 'config.json'} ({len(left)} such tensors); the configuration does not describe the weights."
        )


def _find(index: Index, where: Piece, parameter: Parameter, directory: Path) -> list[Stored | Decoded]:
    expected = where.shape(parameter.shape)
    for name in where.tensors:
        if name not in index:
            raise ShapeError(
                f"{directory}: tensor `{name}` is missing; config.json expects it, of shape {list(expected)}. Found "
                f"{len(index)} tensors; download the directory again."
            )
        stored = index[name]
        if stored.shape != expected:
            raise ShapeError(
                f"{stored.path}: tensor `{name}` has shape {list(stored.shape)}; config.json expects {list(expected)}. "
                "The two do not belong together."
            )
    return [index[name] for name in where.tensors]


def parameter_sharding(
    mesh: Mesh, rules: LogicalRules, parameter: Parameter, layers: int, where: str, function: str = "from_pretrained"
) -> NamedSharding:
    """Where a parameter lies; with more than one of `layers`, it has a leading axis for them.

    Args:
      where, function: what errors call the parameter and the caller.
    """
    shape = parameter.shape if layers == 1 else (layers, *parameter.shape)
    return rules.sharding(mesh, parameter.axes, shape, where=where, function=function)


def _read(
    parameter: Parameter, pieces: list[Piece], stored: list[list[Stored | Decoded]], dtype: Any, sharding: Any
) -> jax.Array:
    """The parameter, each device's part read from the files on its own."""

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        layers = range(len(pieces))[index[0]] if len(pieces) > 1 else (0,)
        inner = index[1:] if len(pieces) > 1 else index
        parts = [_slice(parameter, pieces[i], stored[i], inner, dtype) for i in layers]
        return np.stack(parts) if len(pieces) > 1 else parts[0]

    shape = parameter.shape if len(pieces) == 1 else (len(pieces), *parameter.shape)
    if sharding is None:
        return jnp.asarray(part((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, part)


def _slice(
    parameter: Parameter, where: Piece, stored: list[Stored | Decoded], wanted: tuple[slice, ...], dtype: Any
) -> Any:
    inner = where.index(wanted[1:] if where.stacked else wanted, parameter.shape)

    def one(tensor: Stored | Decoded) -> np.ndarray:
        found = tensor.read()[inner]
        return np.ascontiguousarray(found.swapaxes(-1, -2) if where.transpose else found, dtype=dtype)

    return np.stack([one(tensor) for tensor in stored[wanted[0]]]) if where.stacked else one(stored[0])


def save_pretrained(model: Decoder, directory: str | Path) -> None:
    """Writes `config.json` and `model.safetensors`, which transformers and `from_pretrained` load.

    The files are whole or absent: the weights are written beside their name and moved there at the end.

    Raises:
      ShapeError: a parameter is quantized or packed; save the model that it was made from.
    """
    from safetensors.numpy import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for name, parameter, layer, value in named_parameters(model):
        if not isinstance(value, (jax.Array, np.ndarray)):
            raise ShapeError(
                f"save_pretrained: parameter `{name}` is a {type(value).__name__}; save the model that it came from."
            )
        where = piece(model.config, name, parameter, layer)
        array = np.asarray(value)
        inner = parameter.shape[1:] if where.stacked else parameter.shape
        whole = where.index((slice(None),) * len(inner), parameter.shape)
        for name, part in zip(where.tensors, array if where.stacked else [array]):
            stored = tensors.setdefault(name, np.zeros(where.shape(parameter.shape), array.dtype))
            stored[whole] = part.swapaxes(-1, -2) if where.transpose else part
    values = model.config.to_dict()
    values["dtype"] = model.embed.get_value().dtype.name
    draft = directory / "model.safetensors.partial"
    save_file(tensors, draft, metadata={"format": "pt"})
    draft.replace(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def named_parameters(model: Decoder) -> list[tuple[str, Parameter, int | None, Any]]:
    """Every parameter of a decoder with its table's entry: name, entry, layer (None outside the layers) and value, each
    layer of a stack on its own.
    """
    found: list[tuple[str, Parameter, int | None, Any]] = []
    for name, entry, layers, held in held_parameters(model):
        value = held.get_value()
        if layers is None or len(layers) == 1:
            found.append((name, entry, None if layers is None else layers[0], value))
            continue
        for i, number in enumerate(layers):
            found.append((name, entry, number, jax.tree.map(lambda x: x[i], value)))  # noqa: B023 (called at once)
    return found


def held_parameters(model: Decoder) -> list[tuple[str, Parameter, tuple[int, ...] | None, nnx.Param]]:
    """Every parameter as the decoder holds it: name, its table's entry, the layers that it stacks (None outside the
    layers), and the variable.
    """
    found: list[tuple[str, Parameter, tuple[int, ...] | None, nnx.Param]]
    found = [(name, p, None, getattr(model, name)) for name, p in top_parameters(model.config).items()]
    places = ((segment, i) for segment in segments(model.config, model.stacked) for i in range(len(segment.kinds)))
    for (segment, place), module in zip(places, model.layers, strict=True):
        entries = layer_parameters(model.config, segment.kinds[place])
        found += [(name, p, segment.layers(place), getattr(module, name)) for name, p in entries.items()]
    return found
