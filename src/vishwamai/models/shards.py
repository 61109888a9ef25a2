"""The safetensors files of a directory: an index of their tensors, checked before a byte of them is read."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from vishwamai.core import caches
from vishwamai.core.errors import ShapeError
from vishwamai.models.gguf import read_tensors
from vishwamai.models.values import read_json

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "U32": np.uint32,
    "BOOL": np.bool_,
}
"""Names of dtypes in a safetensors header."""

_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor: where it lies and what it is."""

    path: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The tensor as an array over the file's own pages: nothing is read before it is used.

        Raises:
          ShapeError: the file cannot be read any more, or became shorter than its header says.
        """
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        try:
            return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        except ValueError as error:
            end = self.offset + self.bytes
            raise ShapeError(
                f"{self.path}: a tensor ends at byte {end}; expected a longer file, found {self.path.stat().st_size} "
                "bytes. The file became shorter while it was read; load it again once it is written."
            ) from error


def read_index(directory: Path) -> dict[str, Stored]:
    """All tensors of a directory, by name; those of its GGUF file where it has one.

    Raises:
      ShapeError: a file is missing, truncated, or its header does not describe it; the text names the file, the tensor,
        what was expected and what was found.
    """
    blocks: Any = read_tensors(directory)
    if blocks is not None:
        return blocks
    index: dict[str, Stored] = {}
    for path, names in _files(directory).items():
        tensors = read_header(path)
        absent = sorted(names - tensors.keys())
        if absent:
            raise ShapeError(
                f"{path}: tensor `{absent[0]}` is missing; model.safetensors.index.json expects it there. Download the "
                "file again."
            )
        index |= tensors
    return index


def _unreadable(path: Path, error: OSError) -> ShapeError:
    return ShapeError(
        f"{path}: the file cannot be read ({error.strerror}); expected a safetensors file that this process may read. "
        "Check its permissions and its disk, or download it again."
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise _unreadable(path, error) from error


def _files(directory: Path) -> dict[Path, set[str]]:
    """The files, each with the tensors that the index expects in it."""
    index = directory / "model.safetensors.index.json"
    if not _exists(index):
        single = directory / "model.safetensors"
        if not _exists(single):
            raise ShapeError(
                f"{directory}: expected model.safetensors or model.safetensors.index.json, found neither; convert the "
                "weights to safetensors, or download them again."
            )
        return {single: set()}
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict):
        raise ShapeError(f"{index}: `weight_map` is missing; expected an object of tensor names to files.")
    files: dict[Path, set[str]] = {}
    for name, file in where.items():
        if Path(str(file)).name != file:
            raise ShapeError(f"{index}: `weight_map` has {file!r} for `{name}`; expected the name of a file beside it.")
        files.setdefault(directory / file, set()).add(name)
    for path in files:
        if not _exists(path):
            raise ShapeError(
                f"{path}: the file is missing; {index.name} expects {len(files[path])} tensors there, such as "
                f"`{min(files[path])}`. Download it again."
            )
    return files


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors that a file's header describes, checked against its size.

    Raises:
      ShapeError: as `read_index`.
    """
    header, start, size = _header(path)
    header.pop(_METADATA, None)
    tensors = {name: _stored(path, name, entry, start, size) for name, entry in header.items()}
    _check_apart(path, tensors)
    return tensors


@functools.lru_cache(maxsize=64)
def read_metadata(path: Path) -> Mapping[str, Any]:
    """The texts by name that the program that wrote a file put into its header.

    Raises:
      ShapeError: as `read_index`.
    """
    metadata = _header(path)[0].get(_METADATA)
    return metadata if isinstance(metadata, dict) else {}


_METADATA = "__metadata__"


def _header(path: Path) -> tuple[dict[str, object], int, int]:
    """A file's header, where the tensors begin, and the file's size."""
    try:
        if caches.is_special(path):  # to open a pipe would block
            raise ShapeError(f"{path}: it is not a regular file; expected a safetensors file.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise ShapeError(
                    f"{path}: the header's length is {length} bytes, but the file has {size}; expected a header within "
                    "it. The file is truncated or is not safetensors; download it again."
                )
            text = file.read(length)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        header = json.loads(text)
    except RecursionError as error:
        raise ShapeError(f"{path}: the header is nested too deeply; download the file again.") from error
    except ValueError as error:
        raise ShapeError(f"{path}: the header is not JSON ({error}); download the file again.") from error
    if not isinstance(header, dict):
        raise ShapeError(f"{path}: the header is not an object of tensors; download the file again.")
    return header, 8 + length, size


def _check_apart(path: Path, tensors: Mapping[str, Stored]) -> None:
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if tensor.bytes and tensor.offset < end:
            raise ShapeError(
                f"{path}: tensors `{before}` and `{name}` overlap at byte {tensor.offset}; the header does not "
                "describe the file; download it again."
            )
        if tensor.bytes:
            end, before = tensor.offset + tensor.bytes, name


def _stored(path: Path, name: str, entry: Any, start: int, size: int) -> Stored:
    def header_error(key: str, expected: str, value: object) -> ShapeError:
        return ShapeError(
            f"{path}: tensor `{name}` has `{key}` = {value!r}; expected {expected}. The header does not describe the "
            "file; download it again."
        )

    if not isinstance(entry, dict):
        raise header_error("entry", "an object with dtype, shape and data_offsets", entry)
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise header_error("dtype", f"one of {', '.join(DTYPES)}", dtype)
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise header_error("shape", "a list of whole numbers", shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise header_error("data_offsets", "two whole numbers", offsets)
    kind = np.dtype(DTYPES[dtype])
    expected = math.prod(shape) * kind.itemsize
    if offsets[1] - offsets[0] != expected:
        raise header_error("data_offsets", f"{expected} bytes for {dtype} {shape}", offsets)
    if start + offsets[1] > size:
        raise ShapeError(
            f"{path}: tensor `{name}` ends at byte {start + offsets[1]}; expected a longer file, found {size} "
            "bytes. The file is truncated; download it again."
        )
    return Stored(path, start + offsets[0], tuple(shape), kind)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
