"""Hugging Face directories as decoders: `from_pretrained`.

Tensors are read by parts, straight into (sharded) device arrays: host memory beyond the arrays is one tensor at most.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vishwamai.core.arguments import check_instances, checked
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.qtensor import QTensor
from vishwamai.models.config import ModelConfig, read_config
from vishwamai.models.decoder import Decoder
from vishwamai.models.families import FAMILIES
from vishwamai.models.gguf import model_directory
from vishwamai.models.gguf_parts import block_weights
from vishwamai.models.next_token import decoder_class, head_index
from vishwamai.models.parameters import LOGICAL_NAMES, Parameter, parameter_path
from vishwamai.models.published import Computed, Decoded, Index, decode_index
from vishwamai.models.published.files import is_quantized, quantization
from vishwamai.models.shards import Stored, read_index
from vishwamai.models.shifted_weight import ShiftedWeight
from vishwamai.models.storage import KEEP, KEEP_PACKED, QUANTIZATIONS, Storage, parameter_sharding
from vishwamai.models.tensors import Piece, piece, single_experts
from vishwamai.models.text_part import text_tensors
from vishwamai.models.tied import end_name
from vishwamai.models.variables import parameter_variables
from vishwamai.parallel import LogicalRules

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@checked
def from_pretrained(
    directory: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    mesh: Mesh | None = None,
    rules: Mapping[str, Any] | None = None,
    quantize: str | Storage | None = None,
    stacked: bool | None = False,
    config: ModelConfig | None = None,
) -> Decoder:
    """The decoder in a Hugging Face directory (`config.json` and safetensors files).

    Args:
      directory: folder of the files, or a name of the Hugging Face Hub, "ORG/NAME@REVISION".
      dtype: dtype of parameters, products and activations.
      mesh: devices to split the parameters over; each process reads its own parts only.
      rules: mesh axes by the logical name of an axis, a `LogicalRules` or a dict. The names are
        `parameters.LOGICAL_NAMES`; those without a rule stay whole.
      quantize: "int8", "int4" or "fp8": weights of the layers' products are rounded to `QTensor`s. "keep": those of a
        checkpoint that is published quantized become the `QTensor`s that have exactly its numbers; "keep packed": in
        the fewest bytes that `pack_weights` takes. A `Storage`: that format, in its blocks. None: plain arrays.
      stacked: flag of `Decoder`. By default each layer is alone, as serving wants it: a scan copies each layer's
        weights out of the stack before a kernel reads them, which decoding waits for. To train, stack them.
      config: configuration in place of the directory's own, such as one that ties the head to the embeddings.

    Raises:
      ShapeError: a file or a tensor is missing, damaged, or contradicts `config.json`; the text names the file, the
        tensor, what was expected and what was found.
      UnsupportedError: the configuration is not one that the decoder computes, or "keep" is asked for and no `QTensor`
        has the numbers of a weight; the text names it.
    """
    check_instances("from_pretrained", {"config": ModelConfig, "rules": Mapping}, {"config": config, "rules": rules})
    return loaded(directory, dtype, mesh, rules, quantize, stacked, config)


Weight = jax.Array | QTensor | ShiftedWeight | jax.ShapeDtypeStruct
Read = Callable[[], Weight]


def loaded(
    directory: str | Path,
    dtype: DTypeLike,
    mesh: Mesh | None,
    rules: Mapping[str, str | None] | LogicalRules | None,
    quantize: str | Storage | None,
    stacked: bool | None,
    config: ModelConfig | None,
    when: Callable[[str, Parameter, tuple[int, ...] | None, Read], Weight] = lambda *call: call[-1](),
) -> Decoder:
    """`from_pretrained`; `when` decides when a parameter is read, by the function that reads it."""
    directory = model_directory(Path(directory), weights=True)
    config = config or read_config(directory)
    if rules and mesh is None:
        raise ShapeError("from_pretrained: `rules` are given without a `mesh`; pass the mesh whose axes they name.")
    unknown = [name for name in rules or () if name not in LOGICAL_NAMES]
    if unknown:
        raise ShapeError(
            f"from_pretrained: `rules` have {unknown[0]!r}; a decoder's axes are named {', '.join(LOGICAL_NAMES)}."
        )
    checked_rules = LogicalRules({**dict.fromkeys(LOGICAL_NAMES), **(rules or {})})
    index = _index(directory, quantize, config)
    used: set[str] = set()

    def make(name: str, parameter: Parameter, layers: tuple[int, ...] | None) -> Weight:
        pieces = [_piece(index, config, name, parameter, layer) for layer in layers or (None,)]
        stored = [_find(index, entry, parameter, directory, quantize) for entry in pieces]
        used.update(name for entry in pieces for name in entry.tensors)
        return when(name, parameter, layers, functools.partial(read, name, parameter, layers, pieces, stored))

    def read(
        name: str, parameter: Parameter, layers: tuple[int, ...] | None, pieces: list[Piece], stored: list[list[Any]]
    ) -> Weight:
        kind = jnp.float32 if parameter.float32 else dtype
        where = parameter_path(name, None if layers is None else layers[0])
        storage = _storage(quantize, parameter, pieces, stored, where)
        if mesh is None:
            plain, split = None, None
        elif storage is None:
            plain, split = parameter_sharding(mesh, checked_rules, parameter, len(pieces), where), None
        else:
            split = storage.shardings(mesh, checked_rules, parameter, len(pieces), where)
            replicated = dataclasses.replace(parameter, axes=(*parameter.axes[:-2], None, parameter.axes[-1]))
            plain = parameter_sharding(mesh, checked_rules, replicated, len(pieces), where)
        if storage is None:
            return _read(parameter, pieces, stored, kind, plain)
        if quantize not in _KEPT:
            return storage.quantize(_read(parameter, pieces, stored, kind, plain), split)
        return _read_quantized(storage, parameter, pieces, stored, split)

    model = decoder_class(config)(config, dtype=dtype, param_dtype=dtype, stacked=stacked, make=make)
    used |= _check_constants(config, index)
    _check_unused(config, directory, index, used)
    return model


def quantized(model: Decoder, quantize: str, directory: str | Path | None = None) -> Decoder:
    """The decoder with the weights of the layers' products quantized, in place; under `nnx.eval_shape`, its shapes.

    Args:
      quantize: a name of `QUANTIZATIONS`, or "keep": the formats of the checkpoint in `directory`.
    """
    find = storages(Path(directory), model.config) if quantize == KEEP and directory is not None else None
    for name, parameter, layers, variable in parameter_variables(model):
        if find is not None:
            storage = find(name, parameter, None if layers is None else layers[0])
        else:
            storage = QUANTIZATIONS[quantize] if parameter.matrix else None
        if storage is not None:
            variable.set_value(storage.quantize(variable.get_value()))
    return model


def storages(
    directory: Path, config: ModelConfig, quantize: str = KEEP
) -> Callable[[str, Parameter, int | None], Storage | None]:
    """How `from_pretrained(directory, quantize="keep")` holds each parameter of each layer, by the headers alone: a
    function of a parameter's name, entry and layer to its storage, None for a plain array.

    Args:
      quantize: "keep", or "keep packed".

    Raises:
      VishwamaiError: as `from_pretrained`, as does the function.
    """
    index = _index(directory, quantize, config)

    def find(name: str, parameter: Parameter, layer: int | None) -> Storage | None:
        where = _piece(index, config, name, parameter, layer)
        stored = _find(index, where, parameter, directory, quantize)
        return _storage(quantize, parameter, [where], [stored], parameter_path(name, layer))

    return find


_KEPT = (KEEP, KEEP_PACKED)
"""Values of `quantize` that say to hold the numbers of a checkpoint."""


def _index(directory: Path, quantize: str | Storage | None, config: ModelConfig) -> Index:
    if quantize is not None and not isinstance(quantize, Storage) and quantize not in (*_KEPT, *QUANTIZATIONS):
        raise ShapeError(
            f"from_pretrained: `quantize` is {quantize!r}; pass {', '.join((KEEP, *QUANTIZATIONS))} or None."
        )
    source = directory / "config.json"
    settings = quantization(directory)
    if quantize in _KEPT and not is_quantized(directory):
        raise ShapeError(
            f"from_pretrained: `quantize` is {KEEP!r}, but {source} has no `quantization_config`: its weights are "
            f"plain. Pass {', '.join(QUANTIZATIONS)} or None."
        )
    stored = read_index(directory)
    text = text_tensors({name: name for name in stored}).values()  # settings name modules as the files do
    decoded = decode_index({name: stored[name] for name in text}, settings, str(source))
    index = text_tensors(block_weights(decoded) if quantize in _KEPT else decoded)
    for part, name in FAMILIES[config.family].renamed.items():
        index = {key.replace(part, name): entry for key, entry in index.items()}
    return index if config.next_token is None else head_index(index, config.next_token)


def _storage(
    quantize: str | Storage | None,
    parameter: Parameter,
    pieces: list[Piece],
    stored: list[list[Stored | Decoded]],
    where: str,
) -> Storage | None:
    """How a parameter is held; None for a plain array."""
    if quantize is None or not parameter.matrix:
        return None
    if quantize not in _KEPT:
        return quantize if isinstance(quantize, Storage) else QUANTIZATIONS[quantize]
    names = [name for entry in pieces for name in entry.tensors]
    tensors = [tensor for group in stored for tensor in group]
    storages: dict[Storage | None, str] = {}
    for name, tensor in zip(names, tensors):
        storages[tensor.check_representable() if isinstance(tensor, Decoded) else None] = name
    if len(storages) > 1:
        forms = " and ".join(f"`{name}` as {storage or 'a plain array'}" for storage, name in storages.items())
        raise UnsupportedError(
            f"from_pretrained: {where} would hold {forms}, which are not one QTensor; pass "
            f"{'stacked=False' if len(pieces) > 1 else 'quantize=None'}."
        )
    return next(iter(storages))


def constant_values(config: ModelConfig) -> dict[str, float]:
    """Scalars that a checkpoint holds and nothing trains, by the tensor's name."""
    return {
        name.replace("{layer}", str(layer)): value
        for layer, kind in enumerate(config.layers)
        for name, value in kind.feed_forward.constants.items()
    }


def _check_constants(config: ModelConfig, index: Index) -> set[str]:
    """The names of the constants of a checkpoint, whose values must be those that the decoder computes with."""
    constants = {name: value for name, value in constant_values(config).items() if name in index}
    for name, value in constants.items():
        stored = np.asarray(index[name].read(), np.float64)
        if stored.size != 1 or not np.allclose(stored, value, rtol=1e-2):  # bfloat16 has 8 bits
            raise UnsupportedError(
                f"{index[name].path}: tensor `{name}` holds {stored.tolist()!r:.60}; the decoder computes "
                f"{config.family} with {value} only."
            )
    return set(constants)


_BUFFERS = (
    *("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    *(f".self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
)
"""Ends of the names of constants in files: frequencies, masks of the causal order, and rates of decay."""


def _check_unused(config: ModelConfig, directory: Path, index: Index, used: set[str]) -> None:
    """A tensor that nothing reads means that the configuration describes another model."""
    ignored = {end_name(config.family, "head")} if config.tie_embeddings else set()
    extra = f"model.layers.{config.num_layers}."  # DeepSeek's layer that predicts a second token
    left = sorted(n for n in index if n not in used | ignored and not n.endswith(_BUFFERS))
    if config.latent is not None or (config.experts is not None and config.experts.method == "noaux_tc"):
        left = [n for n in left if not n.startswith(extra)]
    unread = {name.replace("{layer}", str(i)) for i, kind in enumerate(config.layers) for name in kind.mixer.unread}
    left = [n for n in left if not n.startswith((*FAMILIES[config.family].unread, *unread))]
    left = [n for n in left if not (".shared_experts." in n and 0 in index[n].shape)]  # of `n_shared_experts: 0`
    if left:
        raise ShapeError(
            f"{index[left[0]].path}: tensor `{left[0]}` is not expected in a {config.family} model of "
            f"{directory / 'config.json'} ({len(left)} such tensors); the configuration does not describe the weights."
        )


def _piece(index: Index, config: ModelConfig, name: str, parameter: Parameter, layer: int | None) -> Piece:
    """Where a parameter lies in this checkpoint; quantized ones have experts apart that plain ones have together."""
    where = piece(config, name, parameter, layer)
    if where.tensors[0] in index:
        return where
    single = single_experts(where, name, parameter)
    return single if single is not None and single.tensors[0] in index else where


def _find(
    index: Index, where: Piece, parameter: Parameter, directory: Path, quantize: str | Storage | None
) -> list[Stored | Decoded]:
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
    tensors = [index[name] for name in where.tensors]
    if quantize != KEEP_PACKED or not parameter.matrix:
        return tensors
    return [(isinstance(tensor, Decoded) and tensor.packed) or tensor for tensor in tensors]


def _read_quantized(
    storage: Storage, parameter: Parameter, pieces: list[Piece], stored: list[list[Any]], split: Any
) -> QTensor | ShiftedWeight:
    """The weight in the numbers of its file: its parts are read like parameters of their own."""
    parts = [[tensor.quantized_parts() for tensor in group] for group in stored]
    entries, kinds = storage.parts(parameter), jax.tree.leaves(storage.shapes(parameter))
    places = [None] * len(entries) if split is None else jax.tree.leaves(split)

    def read(part: int) -> jax.Array:
        tensors = [[weight[part] for weight in group] for group in parts]
        return _read(entries[part], pieces, tensors, kinds[part].dtype, places[part])

    return storage.tensor(*map(read, range(len(entries))))


def replace_products(model: Decoder, layer: int, tensors: Mapping[str, Computed]) -> None:
    """Replaces those weights of a layer's products, in place, whose tensors are all among `tensors`.

    Args:
      model: decoder with plain weights, whose layers are not stacked.
      tensors: the new tensors, as a plain checkpoint names them.
    """
    for name, parameter in model.config.layers[layer].parameters(model.config).items():
        where = piece(model.config, name, parameter, layer) if parameter.matrix else None
        if where is not None and all(tensor in tensors for tensor in where.tensors):
            value = _read(parameter, [where], [[tensors[tensor] for tensor in where.tensors]], model.dtype, None)
            getattr(model.layers[layer], name).set_value(value)


def _read(
    parameter: Parameter,
    pieces: list[Piece],
    stored: Sequence[Sequence[Readable]],
    dtype: DTypeLike,
    sharding: object,
) -> jax.Array:
    """The parameter, each device's part read from the files on its own.

    Waits for the devices, which read a tensor's memory after the call: the host has one tensor at a time.
    """

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        layers = range(len(pieces))[index[0]] if len(pieces) > 1 else (0,)
        inner = index[1:] if len(pieces) > 1 else index
        parts = [_slice(parameter, pieces[i], stored[i], inner, dtype) for i in layers]
        return np.stack(parts) if len(pieces) > 1 else parts[0]

    shape = parameter.shape if len(pieces) == 1 else (len(pieces), *parameter.shape)
    if sharding is None:
        return jax.block_until_ready(jnp.asarray(part((slice(None),) * len(shape))))
    assert isinstance(sharding, jax.sharding.Sharding)
    return jax.block_until_ready(jax.make_array_from_callback(shape, sharding, part))


Readable = Stored | Computed | Decoded


def _slice(
    parameter: Parameter, where: Piece, stored: Sequence[Readable], slices: tuple[slice, ...], dtype: DTypeLike
) -> np.ndarray:
    inner = where.index(slices[1:] if where.stacked else slices, parameter.shape)

    def read(tensor: Readable) -> np.ndarray:
        array = tensor.read()[inner]
        return np.ascontiguousarray(array.swapaxes(-1, -2) if where.transpose else array, dtype=dtype)

    return np.stack([read(tensor) for tensor in stored[slices[0]]]) if where.stacked else read(stored[0])
