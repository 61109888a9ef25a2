"""Checkpoints whose products are rounded to few bits, in the form of the library compressed-tensors, which transformers
reads and vLLM documents; `from_pretrained(directory, quantize="keep")` reads it too.

int8 and int4 are "pack-quantized": numbers plus 2^(bits - 1), side by side in words of 32 bits, with a scale for each
group of neighbours along the input; int4 may have a zero point beside each scale. fp8 is "float-quantized", with a
scale for each output. With a calibration text, the layers are rounded in turn (`gptq`), and products of int4 may become
int8 (`format_choice`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from vishwamai.core import caches
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.qtensor import QTensor, of_zero_words
from vishwamai.models.checkpoint import from_pretrained, replace_products
from vishwamai.models.config import ModelConfig, read_config
from vishwamai.models.decoder import Decoder
from vishwamai.models.format_choice import losses, unit, widened
from vishwamai.models.gguf import model_directory
from vishwamai.models.gptq import gptq
from vishwamai.models.layer_files import LayerFiles
from vishwamai.models.moments import layer_moments
from vishwamai.models.published import Computed
from vishwamai.models.published.files import quantization
from vishwamai.models.saving import drafted
from vishwamai.models.shards import Stored, read_index
from vishwamai.models.storage import Storage
from vishwamai.models.tensors import piece
from vishwamai.models.text_part import text_tensors
from vishwamai.models.values import read_json
from vishwamai.ops.quantization import quantize
from vishwamai.ops.quantization.search import searched

_SCALES = np.dtype(ml_dtypes.bfloat16)
"""Dtype of the scales in the files: models in bfloat16 compute with them as they are."""

_WEIGHTS = ("*.safetensors*", "*.bin", "*.bin.index.json", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx")


@dataclasses.dataclass(frozen=True)
class Compression:
    """How weights are written.

    Attributes:
      bits: int, those of an integer, or of a float where there are no groups.
      group_size: numbers along the input that share a scale; None for all of them.
      asymmetric: bool, True for a zero point beside each scale.
    """

    bits: int
    group_size: int | None
    asymmetric: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Entry `weights` of a group of `quantization_config`."""
        floats = self.group_size is None
        strategy = {"strategy": "channel"} if floats else {"strategy": "group", "group_size": self.group_size}
        kind = {"num_bits": self.bits, "type": "float" if floats else "int", "symmetric": not self.asymmetric}
        return kind | {"dynamic": False} | strategy

    @property
    def format(self) -> str:
        """Its name in `COMPRESSIONS`."""
        return "fp8" if self.group_size is None else f"int{self.bits}"

    @property
    def storage(self) -> Storage:
        """The `QTensor` that a weight is rounded to."""
        return Storage(f"u{self.format}" if self.asymmetric else self.format, self.group_size)

    @property
    def bits_with_scales(self) -> float:
        """Bits of a weight in the file, of those with one scale for each output without it."""
        if self.group_size is None:
            return self.bits
        return self.bits + (16 + (self.bits if self.asymmetric else 0)) / self.group_size

    def __str__(self) -> str:
        shared = "each output" if self.group_size is None else f"{self.group_size} inputs"
        return f"{self.format}, a scale{' and a zero point' if self.asymmetric else ''} for {shared}"

    def rounded(self, weight: np.ndarray, moments: np.ndarray | None = None) -> QTensor:
        """A weight `[out, in]` as a `QTensor` `[in, out]`.

        Args:
          moments: second moments of the inputs, by which `gptq` rounds; None searches scales alone.
        """
        x = weight.astype(np.float32).T
        if self.group_size is None:
            return quantize(jnp.asarray(x), self.format, axis=-2)
        if moments is None:
            format = self.storage.format
            return searched(jnp.asarray(x), format, self.group_size, scale_dtype=_SCALES.name, zero_steps=1)
        return gptq(x, moments, self.storage.format, self.group_size, _SCALES.name)

    def tensors(self, stem: str, q: QTensor) -> dict[str, np.ndarray]:
        """The tensors of a rounded weight."""
        dtype = np.dtype(np.float32) if self.group_size is None else _SCALES
        scales, tensors, half = q.scales, {}, 0
        if self.asymmetric:
            (scales, zeros), half = of_zero_words(scales), 1 << (self.bits - 1)
            words = packed(np.asarray(zeros.astype(jnp.int8)) - half, self.bits)  # along the outputs
            tensors[f"{stem}.weight_zero_point"] = np.ascontiguousarray(words.T)
        tensors[f"{stem}.weight_scale"] = np.ascontiguousarray(np.asarray(scales).T.astype(dtype))
        if self.group_size is None:
            return tensors | {f"{stem}.weight": np.ascontiguousarray(np.asarray(q.values).T)}
        return tensors | {
            f"{stem}.weight_packed": packed(np.asarray(q.values.astype(jnp.int8)).T - half, self.bits),
            f"{stem}.weight_shape": np.array(q.shape[::-1], np.int64),
        }


Place = tuple[int, str]
"""A layer, and the name of a parameter."""

COMPRESSIONS: dict[str, tuple[int, tuple[int, ...] | None]] = {
    "int8": (8, (64, 32)),
    "int4": (4, (32,)),
    "fp8": (8, None),
}
"""By format: bits, and group sizes of which the first that divides all inputs is taken (None: no groups)."""

_WIDE = "int8"
"""Format of the products that get more bits than int4."""

_LOSS_ROW, _LOSS_ROWS = 128, 32
"""Tokens of a text for `losses`, and the largest number of texts."""


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


def compression(
    format: str, tensors: Mapping[str, Place], index: Mapping[str, Stored], asymmetric: bool = False
) -> Compression:
    """How weights are written in a format: with the first of its group sizes that divides the inputs of all."""
    bits, sizes = COMPRESSIONS[format]
    if sizes is None:
        return Compression(bits, None)
    inputs = sorted({index[name].shape[1] for name in tensors})
    for size in sizes:
        if all(n % size == 0 for n in inputs):
            return Compression(bits, size, asymmetric)
    raise UnsupportedError(
        f"quantize: the products have {', '.join(map(str, inputs))} inputs, which are not multiples of {sizes[-1]}, "
        f"the numbers that share a scale in {format}; choose fp8, or round while serving: --quantize {format}."
    )


def check_source(
    source: Path, format: str, asymmetric: bool = False
) -> tuple[Path, Mapping[str, Stored], Mapping[str, Place], Compression]:
    """The directory of a model, its tensors, those of its products, and how they are written; reads headers only.

    Raises:
      UnsupportedError: as `write_compressed`.
    """
    if format not in COMPRESSIONS:
        raise ShapeError(f"quantize: `format` is {format!r}; pass one of {', '.join(COMPRESSIONS)}.")
    if asymmetric and format != "int4":
        raise ShapeError(f"quantize: `format` is {format!r}, but zero points are those of int4; leave them out.")
    directory = model_directory(source, weights=True)
    if not directory.is_dir():
        raise ShapeError(f"{directory}: expected a directory with config.json and safetensors files, or a GGUF file.")
    if quantization(directory) is not None:
        raise UnsupportedError(f"quantize: {directory} is published quantized; pass the model that it was made from.")
    config, index = read_config(directory), read_index(directory)
    if text_tensors(index).keys() != index.keys():
        raise UnsupportedError(f"quantize: {directory} has parts other than the decoder; pass a plain language model.")
    places = products(config, index)
    return directory, index, places, compression(format, places, index, asymmetric)


def check_bits(
    form: Compression, bits: float, tensors: Mapping[str, Place], index: Mapping[str, Stored]
) -> Compression:
    """How the products are written that get more bits than `form`, of which all have `bits` in the mean.

    Raises:
      ShapeError: the mean is out of range, or the format is not int4.
    """
    if form.format != "int4":
        raise ShapeError(f"quantize: `bits` is {bits:g}, but the format is {form.format}; a mean goes with int4.")
    wide = compression(_WIDE, tensors, index)
    low, high = form.bits_with_scales, wide.bits_with_scales
    if not low <= bits <= high:
        raise ShapeError(f"quantize: `bits` is {bits:g}; pass a mean from {low:g} (int4) to {high:g} (int8).")
    return wide


def write_compressed(
    source: Path,
    target: Path,
    format: str,
    rows: Sequence[Sequence[int]] | None = None,
    bits: float | None = None,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
    asymmetric: bool = False,
) -> dict[Compression, int]:
    """Writes a quantized checkpoint into a directory, with the tokenizer and the other files of its source.

    Args:
      source: directory of a plain checkpoint, or a GGUF file.
      target: directory to write into; its weights are whole or absent.
      format: "int8", "int4" or "fp8".
      rows: token ids of calibration texts, for `gptq`; None searches each scale alone. Not for "fp8".
      bits: mean bits of a rounded weight, scales included; the products that matter most get int8. It needs `rows`.
      on_tensor: function that gets the number of weights that were rounded, and of all.
      asymmetric: bool, True writes int4 with zero points.

    Returns:
      The number of weights in each form.

    Raises:
      UnsupportedError: the checkpoint is quantized, has parts other than the decoder, or products that the form does
        not have.
      DeviceError: a file cannot be written.
    """
    if bits is not None and rows is None:
        raise ShapeError(f"quantize: `bits` is {bits:g}, but `rows` is None; pass the texts that choose the products.")
    directory, index, places, form = check_source(source, format, asymmetric)
    forms = dict.fromkeys(places, form)
    if rows is None or form.group_size is None:
        rounded = ((name, form.rounded(np.asarray(index[name].read()))) for name in places)
    else:
        if bits is not None:
            forms |= _wide_forms(from_pretrained(directory, dtype="float32"), rows, bits, form, places, index)
        rounded = _calibrated(LayerFiles(directory, "float32"), rows, forms, places, index)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, stored in index.items():
            if name not in places:
                yield name, np.asarray(stored.read())
        for done, (name, q) in enumerate(rounded):
            on_tensor(done, len(places))
            yield from forms[name].tensors(name.removesuffix(".weight"), q).items()

    values = read_json(directory / "config.json")
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if form.group_size is None else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": _groups(forms),
        "ignore": _plain_modules(index, places),
        "kv_cache_scheme": None,
    }
    draft = target / "model.safetensors.partial"
    with (
        caches.writing(draft, "quantize"),
        drafted(tensors(), target / "model.safetensors"),
    ):
        _copy_files(directory, target)
        caches.write(target / "config.json", json.dumps(values, indent=2) + "\n")
    counts = dict.fromkeys(forms.values(), 0)
    for name, entry in forms.items():
        counts[entry] += math.prod(index[name].shape)
    return counts


def _wide_forms(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    bits: float,
    form: Compression,
    places: Mapping[str, Place],
    index: Mapping[str, Stored],
) -> dict[str, Compression]:
    """The tensors that get more bits than `form`, with their form."""
    wide = check_bits(form, bits, places, index)
    ids = [token for row in rows for token in row][: _LOSS_ROW * _LOSS_ROWS]
    parts = [ids[start : start + _LOSS_ROW] for start in range(0, len(ids), _LOSS_ROW)]
    sizes: dict[Any, int] = {}
    for name, place in places.items():
        sizes[unit(*place)] = sizes.get(unit(*place), 0) + math.prod(index[name].shape)
    share = (bits - form.bits_with_scales) / (wide.bits_with_scales - form.bits_with_scales)
    chosen = widened(losses(model, parts, form.storage), sizes, share)
    return {name: wide for name, place in places.items() if unit(*place) in chosen}


def _calibrated(
    files: LayerFiles,
    rows: Sequence[Sequence[int]],
    forms: Mapping[str, Compression],
    places: Mapping[str, Place],
    index: Mapping[str, Stored],
) -> Iterator[tuple[str, QTensor]]:
    """The tensors of the products, rounded by the inputs that the rounded layers before them give."""
    for layer, moments in enumerate(layer_moments(files.model, rows, files.layers())):
        replaced: dict[str, Computed] = {}
        for name, (number, parameter) in places.items():
            if number != layer:
                continue
            stored = index[name]
            q = forms[name].rounded(np.asarray(stored.read()), moments.get(parameter))
            yield name, q
            replaced[name] = Computed(stored.path, stored.shape, functools.partial(_plain, q))
        replace_products(files.model, layer, replaced)


def _plain(q: QTensor) -> np.ndarray:
    return np.asarray(q.dequantize()).T


def _groups(forms: Mapping[str, Compression]) -> dict[str, object]:
    """`config_groups`. Of several, each lists its modules: vLLM looks for the class before the parts of fused ones."""
    modules: dict[Compression, list[str]] = {}
    for name, form in forms.items():
        modules.setdefault(form, []).append(name.removesuffix(".weight"))
    return {
        f"group_{i}": {
            "targets": ["Linear"] if len(modules) == 1 else sorted(names),
            "weights": form.settings,
            "input_activations": None,
        }
        for i, (form, names) in enumerate(modules.items())
    }


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
