"""A weight that several tensors of a checkpoint make up: values, scales and shifts, as a `QTensor` or a
`ShiftedWeight` has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.qtensor import FORMATS, ZERO_FORMATS, bits
from vishwamai.models.storage import Storage

if TYPE_CHECKING:
    from vishwamai.models.gguf_container import BlockTensor
    from vishwamai.models.shards import Stored


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
      storage: the `QTensor` that holds it without changing a number, or the reason why none does.
      axis: the one that a product contracts, -1 or -2.
      shifts: float32 numbers that are added to those of a block, shaped as `scales`; None for 0.
      groups: the block of each number along `axis`, where a checkpoint lists them.
      packed: the weight with its zero points in the words of its scales (`zero_words`), for `KEEP_PACKED`; None where
        it has none, or no kernel reads it so.
    """

    values: Stored | Computed | BlockTensor
    scales: Stored | Computed
    storage: Storage | str
    axis: int = -1
    shifts: Computed | None = None
    groups: Stored | None = None
    packed: Decoded | None = None

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
        if self.groups is None:
            count, blocks = self.shape[self.axis], max(scales.shape[self.axis], 1)
            size = None if isinstance(self.storage, str) else self.storage.block_size
            block = np.arange(count) // (size or max(-(-count // blocks), 1))
        else:
            block = np.asarray(self.groups.read())
        wide = self.values.read().astype(np.float32) * np.take(scales.astype(np.float32), block, self.axis)
        return wide if self.shifts is None else wide + np.take(self.shifts.read(), block, self.axis)

    def check_representable(self) -> Storage:
        """The `QTensor` that holds the weight, by the groups alone.

        Raises:
          UnsupportedError: numbers that share a scale are not neighbours, or no format has the numbers.
        """
        if isinstance(self.storage, str):
            raise UnsupportedError(
                f"{self.path}: a weight of shape {list(self.shape)} {self.storage}, which no QTensor holds; leave out "
                "quantize='keep' to read the plain weights."
            )
        count = self.shape[self.axis]
        order = np.arange(count) // (self.storage.block_size or max(count, 1))
        if self.groups is not None and not np.array_equal(self.groups.read(), order):
            raise UnsupportedError(
                f"{self.path}: rows of a weight of shape {list(self.shape)} that share scales are not neighbours "
                "(desc_act, actorder), which no QTensor holds; leave out quantize='keep' to read the plain weights."
            )
        return self.storage

    def quantized_parts(self) -> tuple[Stored | Computed, ...]:
        """Values in the dtype of the format, scales, and shifts where there are any, of a weight that is checked.

        Raises:
          ShapeError: when the values are read, one is not in the format.
        """
        storage = self.check_representable()
        dtype = (FORMATS | ZERO_FORMATS)[storage.format].dtype

        def compute() -> np.ndarray:
            values = np.asarray(self.values.read())
            if values.dtype == dtype or values.dtype.kind != "i" or not values.size:
                return values.astype(dtype, copy=False)
            least = -(2 ** (bits(dtype) - 1))
            if not least <= values.min() <= values.max() < -least:
                raise ShapeError(
                    f"{self.path}: a weight of shape {list(self.shape)} has zero points other than {-least}, and so "
                    f"numbers that {storage.format} does not have; leave out quantize='keep' to read the plain weights."
                )
            return values.astype(dtype)

        parts = (Computed(self.path, self.shape, compute), self.scales)
        return parts if self.shifts is None else (*parts, self.shifts)


Index = Mapping[str, "Stored | Decoded"]


def check_scales(weight: tuple[int, ...], scales: Stored, expected: tuple[int, ...]) -> None:
    """Raises ShapeError where the scales of a weight, or its zero points, have another shape."""
    if scales.shape != expected:
        raise ShapeError(
            f"{scales.path}: a tensor of scales has shape {list(scales.shape)}; expected {list(expected)} for the "
            f"weight of shape {list(weight)}."
        )


def wide_scales(scales: Stored, transpose: bool = False) -> Computed:
    """Scales `[out, groups]` in float32."""

    def compute() -> np.ndarray:
        array = scales.read().astype(np.float32)
        return array.T if transpose else array

    return Computed(scales.path, scales.shape[::-1] if transpose else scales.shape, compute)


def grouped(format: str, rows: int, groups: int, size: object, path: Path) -> Storage:
    """A scale for each `size` numbers of `rows`; None or -1: the groups are equal."""
    block = -(-rows // groups) if size in (None, -1) else size
    if not isinstance(block, int) or block < 1 or -(-rows // block) != groups:
        raise ShapeError(
            f"{path}: a weight of {rows} inputs has {groups} groups of scales, but `group_size` is {size!r}; the "
            "configuration does not describe the weights."
        )
    return Storage(format, None if groups == 1 else block)


def dense_bits(words: np.ndarray, width: int) -> np.ndarray:
    """Numbers of `width` bits, uint8, that lie next to one another in the rows of int32 words, the lowest bits first.

    >>> dense_bits(np.array([[0x76543210]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    octets = np.ascontiguousarray(words).view(np.uint8)
    if width == 8:
        return octets
    if width == 4:
        return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)
    single = np.unpackbits(octets, axis=-1, bitorder="little")
    planes = single.reshape(*octets.shape[:-1], -1, width)
    return np.packbits(planes, axis=-1, bitorder="little")[..., 0]
