"""The container of a GGUF file: its metadata and where its tensors lie, checked against the file's size.

Format: `docs/gguf.md` of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vishwamai.core import caches
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.gguf_blocks import BLOCK_TYPES, BlockType, decoded

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class BlockTensor:
    """A tensor of blocks.

    Attributes:
      path: the file.
      offset: bytes from the start of the file.
      shape: rows first, as in other formats.
      change: function from the file's numbers to those of another program; None for the same.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    kind: BlockType
    change: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) // self.kind.numbers * self.kind.bytes

    def blocks(self) -> np.ndarray:
        """The blocks as they are stored, uint8 `[blocks, bytes]`.

        Raises:
          ShapeError: the file became shorter than its header says.
        """
        try:
            data = np.memmap(self.path, np.uint8, "r", self.offset, (self.bytes,))
        except (OSError, ValueError) as error:
            raise ShapeError(f"{self.path}: a tensor cannot be read ({error}); download the file again.") from error
        return data.reshape(-1, self.kind.bytes)

    def read(self) -> np.ndarray:
        """The numbers, float32.

        Raises:
          ShapeError: as `blocks`.
        """
        numbers = decoded(self.kind, self.blocks()).reshape(self.shape)
        return numbers if self.change is None else self.change(numbers)


@dataclasses.dataclass(frozen=True)
class Container:
    """What a GGUF file holds.

    Attributes:
      values: metadata by key.
      tensors: tensors by name.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, BlockTensor]


def read_container(path: Path) -> Container:
    """The metadata and the tensors of a file; no tensor is read.

    Raises:
      ShapeError: the file is not GGUF, is truncated, or its header does not describe it.
      UnsupportedError: another version, or a tensor's type that is not read.
    """
    if caches.is_special(path) or not path.is_file():
        raise ShapeError(f"{path}: expected a GGUF file.")
    size = path.stat().st_size
    data = memoryview(np.memmap(path, np.uint8, "r")) if size else memoryview(b"")  # type: ignore[arg-type]
    cursor = _Cursor(path, data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ShapeError(f"{path}: the file does not begin with GGUF; download it again.")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise UnsupportedError(f"{path}: the version of GGUF is {version}; versions 2 and 3 are read.")
    tensors, entries = cursor.count("Q"), cursor.count("Q")
    values = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(entries)}
    infos = [_info(cursor) for _ in range(tensors)]
    align = values.get("general.alignment", 32)
    if not isinstance(align, int) or not 1 <= align <= 1 << 20:
        raise ShapeError(f"{path}: `general.alignment` is {align!r}; expected a small power of two.")
    start = cursor.place + -cursor.place % align
    end, placed = 0, {}
    for name, shape, number, offset in sorted(infos, key=lambda info: info[3]):
        if number not in BLOCK_TYPES:
            names = ", ".join(kind.name for kind in BLOCK_TYPES.values())
            raise UnsupportedError(f"{path}: tensor `{name}` has ggml's type {number}; read are {names}.")
        tensor = BlockTensor(path, start + offset, shape, BLOCK_TYPES[number])
        if name in placed or shape[-1] % tensor.kind.numbers or offset < end or tensor.offset + tensor.bytes > size:
            raise ShapeError(
                f"{path}: tensor `{name}` of shape {list(shape)} in {tensor.kind.name} at byte {tensor.offset} does "
                f"not fit into the file's {size} bytes next to the others; download it again."
            )
        placed[name], end = tensor, offset + tensor.bytes
    return Container(path, values, placed)


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, ggml's type and offset of a tensor."""
    name, rank = cursor.string(), cursor.scalar("I")
    if not 1 <= rank <= 4:
        raise ShapeError(f"{cursor.path}: tensor `{name}` has {rank} dimensions; expected 1 to 4.")
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


class _Cursor:
    """Reads values one after another and stays within the file."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.place, self._data = path, 0, data

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        end = self.place + size
        if end > len(self._data):
            raise ShapeError(
                f"{self.path}: the header reads {size} bytes at {self.place}, but the file has {len(self._data)}; it "
                "is truncated or damaged, download it again."
            )
        part, self.place = self._data[self.place : end], end
        return part

    def scalar(self, form: str) -> Any:
        """The next number, in a form of `struct`."""
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def count(self, form: str, least: int = 8) -> int:
        """The next number, of things that take at least `least` bytes each."""
        count = self.scalar(form)
        if count * least > len(self._data) - self.place:
            raise ShapeError(
                f"{self.path}: the header counts {count} entries, more than the file has; download it again."
            )
        return count

    def string(self) -> str:
        """The next text."""
        return bytes(self.take(self.count("Q", 1))).decode("utf-8", "replace")

    def value(self, kind: int, nested: bool = False) -> Any:
        """The next value of a type."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or nested:
            raise ShapeError(f"{self.path}: a value has type {kind}, which GGUF does not have here; download it again.")
        kind = self.scalar("I")
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(bool)
            return np.frombuffer(self.take(self.count("Q", dtype.itemsize) * dtype.itemsize), dtype).tolist()
        return [self.value(kind, True) for _ in range(self.count("Q"))]
