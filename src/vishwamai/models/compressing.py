"""Checkpoints whose products are rounded to few bits, in the form of the library compressed-tensors, which transformers
reads and vLLM documents; `from_pretrained(directory, quantize="keep")` reads it too.

int8 and int4 are "pack-quantized": numbers plus 2^(bits - 1), side by side in words of 32 bits, with a scale for each
group of neighbours along the input. fp8 is "float-quantized", with a scale for each output. Tensors are read, rounded
and written one by one.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from vishwamai.core import caches
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.checkpoint import quantization
from vishwamai.models.config import ModelConfig, read_config
from vishwamai.models.gguf import model_directory
from vishwamai.models.importance import Place
from vishwamai.models.saving import drafted
from vishwamai.models.shards import Stored, read_index
from vishwamai.models.tensors import piece
from vishwamai.models.text_part import text_tensors
from vishwamai.models.values import read_json
from vishwamai.ops.quantization import quantize
from vishwamai.ops.quantization.search import searched

_SCALES = ml_dtypes.bfloat16
"""Dtype of the scales in the files: models in bfloat16 compute with them as they are."""

_WEIGHTS = ("*.safetensors*", "*.bin", "*.bin.index.json", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx")


@dataclasses.dataclass(frozen=True)
class Compression:
    """How weights are written: `num_bits` of integers in groups along the input, or 8-bit floats without groups."""

    bits: int
    group_size: int | None

    @property
    def settings(self) -> dict[str, Any]:
        """Entry `weights` of a group of `quantization_config`."""
        floats = self.group_size is None
        strategy = {"strategy": "channel"} if floats else {"strategy": "group", "group_size": self.group_size}
        kind = {"num_bits": self.bits, "type": "float" if floats else "int", "symmetric": True, "dynamic": False}
        return kind | strategy

    def tensors(self, stem: str, weight: np.ndarray, importance: np.ndarray | None) -> dict[str, np.ndarray]:
        """The tensors that stand for a weight `[out, in]`."""
        x = jnp.asarray(weight, jnp.float32).T
        if self.group_size is None:
            q = quantize(x, "fp8", axis=-2)
            values, scales = np.asarray(q.values).T, np.asarray(q.scales).T.astype(np.float32)
            return {
                f"{stem}.weight": np.ascontiguousarray(values),
                f"{stem}.weight_scale": np.ascontiguousarray(scales),
            }
        name = "int8" if self.bits == 8 else "int4"
        weights = None if importance is None else jnp.asarray(importance)
        q = searched(x, name, self.group_size, weights, scale_dtype="bfloat16")
        return {
            f"{stem}.weight_packed": packed(np.asarray(q.values.astype(jnp.int8)).T, self.bits),
            f"{stem}.weight_scale": np.ascontiguousarray(np.asarray(q.scales).T.astype(_SCALES)),
            f"{stem}.weight_shape": np.array(weight.shape, np.int64),
        }


COMPRESSIONS: dict[str, tuple[int, tuple[int, ...] | None]] = {
    "int8": (8, (64, 32)),
    "int4": (4, (32,)),
    "fp8": (8, None),
}
"""By format: bits, and group sizes of which the first that divides all inputs is taken (None: no groups)."""


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """int32 `[rows, words]` of int8 `[rows, columns]`, each plus 2^(bits - 1), the first in the lowest bits.

    >>> [hex(word) for word in packed(np.array([[-8, -7, 7]], np.int8), 4)[0]]
    ['0xf10']
    """
    per_word = 32 // bits
    rows, columns = values.shape
    codes = (values.astype(np.int32) + (1 << (bits - 1))).astype(np.uint32)
    codes = np.pad(codes, ((0, 0), (0, -columns % per_word))).reshape(rows, -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    return np.ascontiguousarray(np.bitwise_or.reduce(codes << shifts, axis=-1)).view(
        np.int32
    )  # as safetensors wants it


def products(config: ModelConfig, index: Mapping[str, Stored]) -> dict[str, Place]:
    """The tensors `[out, in]` of the layers' products, by name, with one parameter that each holds.

    Raises:
      UnsupportedError: a product is stored in a form that compressed-tensors does not have.
    """
    tensors: dict[str, Place] = {}
    for layer, kind in enumerate(config.layers):
        for name, parameter in kind.parameters(config).items():
            if not parameter.matrix:
                continue
            where = piece(config, name, parameter, layer)
            for tensor in where.tensors:
                stored = index.get(tensor)
                if not where.transpose or not tensor.endswith(".weight") or stored is None or len(stored.shape) != 2:
                    raise UnsupportedError(
                        f"quantize: the weight `{tensor}` of {config.family} is not a matrix [out, in] of one linear "
                        "layer, and compressed-tensors has no form for it; round it while serving: --quantize."
                    )
                tensors[tensor] = (layer, name)
    return tensors


def compression(format: str, tensors: Mapping[str, Place], index: Mapping[str, Stored]) -> Compression:
    """How weights are written in a format: with the first of its group sizes that divides the inputs of all."""
    bits, sizes = COMPRESSIONS[format]
    if sizes is None:
        return Compression(bits, None)
    inputs = sorted({index[name].shape[1] for name in tensors})
    for size in sizes:
        if all(n % size == 0 for n in inputs):
            return Compression(bits, size)
    raise UnsupportedError(
        f"quantize: the products have {', '.join(map(str, inputs))} inputs, which are not multiples of {sizes[-1]}, "
        f"the numbers that share a scale in {format}; choose fp8, or round while serving: --quantize {format}."
    )


def check_source(source: Path, format: str) -> tuple[Path, Mapping[str, Stored], Mapping[str, Place], Compression]:
    """The directory of a model, its tensors, those of its products, and how they are written; reads headers only.

    Raises:
      UnsupportedError: as `write_compressed`.
    """
    if format not in COMPRESSIONS:
        raise ShapeError(f"quantize: `format` is {format!r}; pass one of {', '.join(COMPRESSIONS)}.")
    directory = model_directory(source, weights=True)
    if not directory.is_dir():
        raise ShapeError(f"{directory}: expected a directory with config.json and safetensors files, or a GGUF file.")
    if quantization(directory) is not None:
        raise UnsupportedError(f"quantize: {directory} is published quantized; pass the model that it was made from.")
    config, index = read_config(directory), read_index(directory)
    if text_tensors(index).keys() != index.keys():
        raise UnsupportedError(f"quantize: {directory} has parts other than the decoder; pass a plain language model.")
    places = products(config, index)
    return directory, index, places, compression(format, places, index)


def write_compressed(
    source: Path,
    target: Path,
    format: str,
    importance: Mapping[Place, np.ndarray] | None = None,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> Compression:
    """Writes a quantized checkpoint into a directory, with the tokenizer and the other files of its source.

    Args:
      source: directory of a plain checkpoint, or a GGUF file.
      target: directory to write into; its weights are whole or absent.
      format: "int8", "int4" or "fp8".
      importance: result of `importance.importance`; None weighs all inputs alike.
      on_tensor: function that gets the number of weights that were rounded, and of all.

    Raises:
      UnsupportedError: the checkpoint is quantized, has parts other than the decoder, or products that the form does
        not have.
      DeviceError: a file cannot be written.
    """
    from safetensors import SafetensorError

    directory, index, places, form = check_source(source, format)
    tensors: dict[str, np.ndarray] = {}
    for name, stored in index.items():
        if name not in places:
            tensors[name] = np.asarray(stored.read())
            continue
        on_tensor(len([key for key in tensors if key.endswith("_scale")]), len(places))
        weights = None if importance is None else importance.get(places[name])
        tensors |= form.tensors(name.removesuffix(".weight"), np.asarray(stored.read()), weights)
    values = read_json(directory / "config.json")
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if form.group_size is None else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": form.settings, "input_activations": None}},
        "ignore": _plain_modules(index, places),
        "kv_cache_scheme": None,
    }
    draft = target / "model.safetensors.partial"
    with (
        caches.writing(draft, "quantize", (OSError, SafetensorError)),
        drafted(tensors, target / "model.safetensors"),
    ):
        _copy_files(directory, target)
        caches.write(target / "config.json", json.dumps(values, indent=2) + "\n")
    return form


def _plain_modules(index: Mapping[str, Stored], places: Mapping[str, Place]) -> list[str]:
    """Linear layers that stay as they are: the head, routers and the like."""
    plain = {
        name.removesuffix(".weight")
        for name, stored in index.items()
        if name.endswith(".weight") and name not in places and len(stored.shape) == 2 and "embed" not in name
    }
    return sorted(plain | {"lm_head"})


def _copy_files(source: Path, target: Path) -> None:
    """Copies the files of a checkpoint that are neither weights nor its configuration."""
    for path in sorted(source.rglob("*")):
        inner = path.relative_to(source)
        hidden = any(part.startswith(".") for part in inner.parts)
        if hidden or not path.is_file() or str(inner) == "config.json" or any(path.match(form) for form in _WEIGHTS):
            continue
        (target / inner).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / inner)
