"""Quantized checkpoints as people publish them: their tensors seen as the plain ones that the decoder expects.

Each format stores a weight as several tensors. `decode_index` replaces them by one `Decoded`: values and scales, as a
`QTensor` has them. It is held so (`quantize="keep"` of `from_pretrained`), or read as the plain weight that it stands
for, which takes the memory of the dtype that is asked for.

4-bit numbers with zero points are held as int8: `q - zero` lies in [-16, 15], which int4 does not have.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.qtensor import FORMATS
from vishwamai.models.shards import Stored
from vishwamai.models.storage import Storage

Index = Mapping[str, "Stored | Decoded"]


@dataclasses.dataclass(frozen=True)
class Computed:
    """An array that is computed of tensors in a file, anew at every reading."""

    path: Path
    shape: tuple[int, ...]
    compute: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        """The array."""
        return self.compute()


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A weight that several tensors make up.

    Attributes:
      values: its numbers before they are scaled, in the weight's shape.
      scales: float32, or uint8 bits of e8m0: the weight's shape with the blocks along `axis` in place of its numbers.
      storage: the `QTensor` that holds it without changing a number.
      axis: the one that a product contracts, -1 or -2.
      groups: the block of each number along `axis`, where a checkpoint lists them.
    """

    values: Stored | Computed
    scales: Stored | Computed
    storage: Storage
    axis: int = -1
    groups: Stored | None = None

    @property
    def path(self) -> Path:
        """The file of its values."""
        return self.values.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's, as a plain checkpoint has it."""
        return self.values.shape

    def read(self) -> np.ndarray:
        """The plain weight, float32; computed anew at every call."""
        scales = np.asarray(self.scales.read())
        if scales.dtype == np.uint8:
            scales = np.where(scales == 255, np.nan, np.ldexp(np.float32(1), scales.astype(np.int32) - 127))
        block = self._order() if self.groups is None else np.asarray(self.groups.read())
        return self.values.read().astype(np.float32) * np.take(scales.astype(np.float32), block, self.axis)

    def check_representable(self) -> None:
        """Checks that `storage` holds the weight, by the groups alone.

        Raises:
          UnsupportedError: numbers that share a scale are not neighbours.
        """
        if self.groups is not None and not np.array_equal(self.groups.read(), self._order()):
            raise UnsupportedError(
                f"{self.path}: rows of a weight of shape {list(self.shape)} that share scales are not neighbours "
                "(desc_act, actorder), which no QTensor holds; leave out quantize='keep' to read the plain weights."
            )

    def quantized_parts(self) -> tuple[Computed, Stored | Computed]:
        """Values in the dtype of the format, and scales, of a weight that is checked.

        Raises:
          ShapeError: when the values are read, one is not in the format.
        """
        dtype = FORMATS[self.storage.format].dtype

        def compute() -> np.ndarray:
            values = self.values.read()
            if values.dtype == np.int8 and dtype == ml_dtypes.int4 and not -8 <= values.min() <= values.max() <= 7:
                raise ShapeError(
                    f"{self.path}: a weight of shape {list(self.shape)} has zero points other than 8, but "
                    "`quantization_config.sym` is True; leave out quantize='keep' to read the plain weights."
                )
            return np.asarray(values).astype(dtype, copy=False)

        return Computed(self.path, self.shape, compute), self.scales

    def _order(self) -> np.ndarray:
        """The block of each number where neighbours share one."""
        count = self.shape[self.axis]
        return np.arange(count) // (self.storage.block_size or count)


def decode_index(index: Mapping[str, Stored], settings: Mapping[str, Any] | None, source: str) -> Index:
    """The index of a checkpoint with its quantized weights as plain ones.

    Args:
      index: all tensors by name.
      settings: `quantization_config` of `config.json`, or None.
      source: that file's name, for errors.

    Raises:
      UnsupportedError: the format, or an option of it, is not known; the text names it.
      ShapeError: a tensor of a weight is missing, or does not fit the others.
    """
    if settings is None:
        return index
    groups = settings.get("config_groups")
    if groups is not None and not (
        isinstance(groups, Mapping) and all(isinstance(g, Mapping) for g in groups.values())
    ):
        raise _unsupported(source, "config_groups", groups, "an object of groups")
    method = settings.get("quant_method")
    if method is None and settings.get("quant_algo") == "FP8":  # modelopt's own form
        method = "fp8"
    if not isinstance(method, str) or method not in _FORMATS:
        raise _unsupported(source, "quant_method", method, ", ".join(_FORMATS))
    packed = method == "compressed-tensors" and settings.get("format") == "pack-quantized"
    suffixes, name, decoder = _PACKED if packed else _FORMATS[method]
    if method == "fp8" and not any(key.endswith(suffixes[0]) for key in index):
        suffixes = (".weight_scale", ".weight")
    plain = {key: stored for key, stored in index.items() if not key.endswith(_OF_ACTIVATIONS)}
    if len(plain) < len(index) or _quantizes_activations(settings):
        _log(f"{source}: activations, keys and values are quantized there; here the weights alone are.")
    decoded: dict[str, Decoded] = {}
    for first in [key for key in index if key.endswith(suffixes[0])]:
        stem = first.removesuffix(suffixes[0])
        absent = [stem + suffix for suffix in suffixes if stem + suffix not in index]
        if absent:
            raise ShapeError(
                f"{index[first].path}: tensor `{absent[0]}` is missing; `{first}` of a {method} checkpoint needs it."
            )
        parts = tuple(plain.pop(stem + suffix) for suffix in suffixes)
        order = plain.pop(stem + (".weight_g_idx" if packed else ".g_idx"), None)
        shape = plain.pop(stem + ".weight_shape", None)
        decoded[stem + name] = decoder((*parts, shape) if packed else parts, order, settings, source)
    return {**plain, **decoded}


_OF_ACTIVATIONS = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""Endings of tensors that say how activations, keys and values are rounded."""


def _quantizes_activations(settings: Mapping[str, Any]) -> bool:
    groups = settings.get("config_groups") or {}
    return any(group.get("input_activations") for group in groups.values())


@functools.lru_cache(maxsize=64)
def _log(text: str) -> None:
    logging.getLogger(__name__).warning("%s", text)


def _unsupported(source: str, key: str, value: Any, expected: str) -> UnsupportedError:
    return UnsupportedError(f"{source}: `quantization_config.{key}` is {value!r}; the loader reads {expected}.")


def _fits(weight: Stored, scales: Stored, expected: tuple[int, ...]) -> None:
    if scales.shape != expected:
        raise ShapeError(
            f"{scales.path}: a tensor of scales has shape {list(scales.shape)}; expected {list(expected)} for the "
            f"weight of shape {list(weight.shape)}."
        )


_SMALL = {
    np.dtype(np.int8): "int8",
    np.dtype(ml_dtypes.float8_e4m3fn): "fp8_e4m3",
    np.dtype(ml_dtypes.float8_e5m2): "fp8_e5m2",
}
"""Formats by the dtype of a tensor."""


def _float8(parts: tuple[Stored, ...], order: Any, settings: Mapping[str, Any], source: str) -> Decoded:
    """float8 with a scale for each block of rows and columns (DeepSeek V3, Qwen3), for each row or for the weight."""
    block = settings.get("weight_block_size")
    if parts[1].dtype not in _SMALL:
        raise _unsupported(source, "fmt", settings.get("fmt", parts[1].dtype.name), "e4m3 and e5m2")
    return _eight_bits(parts, block, source, "weight_block_size")


def _compressed(parts: tuple[Stored, ...], order: Any, settings: Mapping[str, Any], source: str) -> Decoded:
    """compressed-tensors: int8 or float8, with a scale for the weight, for each row, or for groups or blocks of it."""
    if parts[1].dtype not in _SMALL:
        raise _unsupported(source, "format", settings.get("format"), f"{_COMPRESSED} of 8 bits, and pack-quantized")
    weights = _weights(settings, source)
    block = weights.get("block_structure")
    if isinstance(block, str):
        block = [int(n) if n.isdecimal() else n for n in block.split("x")]
    if weights.get("strategy") == "group":
        block = [1, weights.get("group_size")]
    return _eight_bits(parts, block, source, "config_groups.*.weights.block_structure")


def _eight_bits(parts: tuple[Stored, ...], block: Any, source: str, key: str) -> Decoded:
    """Numbers of 8 bits and their scales; `block` is of rows and columns, None for a scale a row or one in all."""
    scales, weight = parts
    if len(weight.shape) != 2:
        raise ShapeError(
            f"{weight.path}: a quantized weight has shape {list(weight.shape)}; expected rows and columns."
        )
    out = weight.shape[0]
    if block is None:
        if math.prod(scales.shape) != 1:
            _fits(weight, scales, (out, 1) if len(scales.shape) == 2 else (out,))

        def rows() -> np.ndarray:
            return np.broadcast_to(scales.read().astype(np.float32).reshape(-1, 1), (out, 1))

        return Decoded(weight, Computed(scales.path, (out, 1), rows), Storage(_SMALL[weight.dtype]))
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise _unsupported(source, key, block, "a pair, such as [128, 128], or null")
    _fits(weight, scales, tuple(-(-n // b) for n, b in zip(weight.shape, block)))

    def wide() -> np.ndarray:  # rows of a block share its scale; a QTensor has one for each
        return scales.read().astype(np.float32).repeat(block[0], 0)[:out]

    return Decoded(weight, Computed(scales.path, (out, scales.shape[1]), wide), Storage(_SMALL[weight.dtype], block[1]))


_COMPRESSED = "int-quantized and float-quantized"


def _weights(settings: Mapping[str, Any], source: str, bits: tuple[int, ...] = ()) -> Mapping[str, Any]:
    """How weights are rounded: symmetric ones, alike in all groups of modules."""
    rounding: dict[str, Any] = {}
    for name, group in (settings.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        if not weights.get("symmetric", True):
            raise _unsupported(source, f"config_groups.{name}.weights.symmetric", False, "symmetric weights")
        if bits and weights.get("num_bits", bits[0]) not in bits:
            expected = " and ".join(map(str, bits))
            raise _unsupported(source, f"config_groups.{name}.weights.num_bits", weights["num_bits"], expected)
        for key in ("strategy", "group_size", "block_structure", "num_bits"):
            if key in rounding and rounding[key] != weights.get(key):
                raise _unsupported(source, f"config_groups.{name}.weights.{key}", weights.get(key), "equal groups")
            rounding[key] = weights.get(key)
    return rounding


def _compressed_packed(
    parts: tuple[Stored | None, ...], order: Stored | None, settings: Mapping[str, Any], source: str
) -> Decoded:
    """compressed-tensors, "pack-quantized": 4 or 8 bits, stored plus 8 or 128, with a scale for each row or for groups
    of a row. Rows are filled up to whole words.
    """
    weight, scales, sizes = parts
    assert weight is not None and scales is not None
    rounding = _weights(settings, source, (4, 8))
    size, bits = rounding.get("group_size"), rounding.get("num_bits") or 4
    per_word = 32 // bits
    out, columns = weight.shape[0], per_word * weight.shape[1]
    if sizes is not None:
        widths = [int(n) for n in np.asarray(sizes.read()).reshape(-1)]
        if len(widths) != 2 or widths[0] != out or not columns - per_word < widths[1] <= columns:
            raise ShapeError(
                f"{sizes.path}: a tensor `weight_shape` holds {widths}; expected {out} rows and "
                f"{columns - per_word + 1} to {columns} columns for words of shape {list(weight.shape)}."
            )
        columns = widths[1]
    groups = scales.shape[-1]
    _fits(weight, scales, (out, groups))

    def decode() -> np.ndarray:
        words = np.asarray(weight.read())
        if bits == 8:  # bytes in the order of memory
            return (np.ascontiguousarray(words).view(np.uint8)[:, :columns] ^ 128).view(np.int8)
        return _nibbles(words, _PLAIN_ORDER).reshape(out, -1)[:, :columns] - np.int8(8)

    values = Computed(weight.path, (out, columns), decode)
    storage = _grouped(f"int{bits}", columns, groups, size, weight.path)
    return Decoded(values, _float32(scales), storage, groups=order)


def _float32(scales: Stored, transpose: bool = False) -> Computed:
    """Scales `[out, groups]`."""

    def compute() -> np.ndarray:
        array = scales.read().astype(np.float32)
        return array.T if transpose else array

    return Computed(scales.path, scales.shape[::-1] if transpose else scales.shape, compute)


def _grouped(format: str, rows: int, groups: int, size: Any, path: Path) -> Storage:
    """A scale for each `size` numbers of `rows`; None or -1: the groups are equal."""
    block = -(-rows // groups) if size in (None, -1) else size
    if not isinstance(block, int) or block < 1 or -(-rows // block) != groups:
        raise ShapeError(
            f"{path}: a weight of {rows} inputs has {groups} groups of scales, but `group_size` is {size!r}; the "
            "configuration does not describe the weights."
        )
    return Storage(format, None if groups == 1 else block)


def _nibbles(packed: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """int8: eight 4-bit numbers of each int32, along a new last axis; number i of an AWQ word lies at place
    `order[i]`.
    """
    shifts = 4 * np.array(order, np.uint32)
    return ((packed.view(np.uint32)[..., None] >> shifts) & 15).astype(np.int8)


_PLAIN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's kernels put each of eight columns within a word."""


def _gptq(parts: tuple[Stored, ...], order: Stored | None, settings: Mapping[str, Any], source: str) -> Decoded:
    """GPTQ: `(q - zero) * scale` by groups of rows; zeros are stored minus one but in the "gptq_v2" form, and are 8 in
    a symmetric one. Frantar et al., "GPTQ" (2023).
    """
    weight, zeros, scales = parts
    if settings.get("bits") != 4:
        raise _unsupported(source, "bits", settings.get("bits"), "4")
    rows, columns = 8 * weight.shape[0], weight.shape[1]
    groups = scales.shape[0]
    _fits(weight, scales, (groups, columns))
    _fits(weight, zeros, (groups, columns // 8))
    shift = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    storage = _grouped("int4" if settings.get("sym") else "int8", rows, groups, settings.get("group_size"), weight.path)

    def decode() -> np.ndarray:
        values = _nibbles(np.asarray(weight.read()), _PLAIN_ORDER).swapaxes(1, 2).reshape(rows, columns)
        zero = _nibbles(np.asarray(zeros.read()), _PLAIN_ORDER).reshape(groups, columns) + np.int8(shift)
        group = np.arange(rows) // (storage.block_size or rows) if order is None else np.asarray(order.read())
        return (values - zero[group]).T

    return Decoded(Computed(weight.path, (columns, rows), decode), _float32(scales, True), storage, groups=order)


def _awq(parts: tuple[Stored, ...], order: Any, settings: Mapping[str, Any], source: str) -> Decoded:
    """AWQ: `(q - zero) * scale` by groups of rows, columns packed out of order. Lin et al., "AWQ" (2023)."""
    weight, zeros, scales = parts
    if settings.get("bits") != 4 or settings.get("version", "gemm").lower() != "gemm":
        form = (settings.get("bits"), settings.get("version"))
        raise _unsupported(source, "(bits, version)", form, "(4, 'gemm')")
    rows, columns = weight.shape[0], 8 * weight.shape[1]
    groups = scales.shape[0]
    _fits(weight, scales, (groups, columns))
    _fits(weight, zeros, (groups, columns // 8))

    storage = _grouped("int8", rows, groups, settings.get("group_size"), weight.path)

    def decode() -> np.ndarray:
        values = _nibbles(np.asarray(weight.read()), _AWQ_ORDER).reshape(rows, columns)
        zero = _nibbles(np.asarray(zeros.read()), _AWQ_ORDER).reshape(groups, columns)
        return (values - zero[np.arange(rows) // (storage.block_size or rows)]).T

    return Decoded(Computed(weight.path, (columns, rows), decode), _float32(scales, True), storage)


def _mxfp4(parts: tuple[Stored, ...], order: Any, settings: Mapping[str, Any], source: str) -> Decoded:
    """mxfp4 experts of gpt-oss: `[experts, out, blocks, 16]` pairs of 4-bit floats, and a power of two a block (OCP
    Microscaling Formats, 2023).
    """
    blocks, scales = parts
    _fits(blocks, scales, blocks.shape[:-1])
    experts, out, count, width = blocks.shape

    def decode() -> np.ndarray:
        packed = np.asarray(blocks.read())
        pairs = np.stack([packed & 15, packed >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn)
        return pairs.reshape(experts, out, -1).swapaxes(1, 2)

    values = Computed(blocks.path, (experts, 2 * width * count, out), decode)
    power = Computed(scales.path, (experts, count, out), lambda: np.asarray(scales.read()).swapaxes(1, 2))
    return Decoded(values, power, Storage("mxfp4", 2 * width), axis=-2)


_PACKED = ((".weight_packed", ".weight_scale"), ".weight", _compressed_packed)
_FORMATS: dict[str, tuple[tuple[str, ...], str, Callable[..., Decoded]]] = {
    "fp8": ((".weight_scale_inv", ".weight"), ".weight", _float8),
    "compressed-tensors": ((".weight_scale", ".weight"), ".weight", _compressed),
    "gptq": ((".qweight", ".qzeros", ".scales"), ".weight", _gptq),
    "awq": ((".qweight", ".qzeros", ".scales"), ".weight", _awq),
    "mxfp4": (("_blocks", "_scales"), "", _mxfp4),
}
"""By `quant_method`: the endings of a weight's tensors, that of the plain one, and what makes it of them."""
