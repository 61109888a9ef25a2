"""bitsandbytes' 4 bits: codes of a table of 16 numbers (nf4, fp4), and the largest magnitude of each 64 neighbours.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023). With double quantization, these magnitudes are
codes of another table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.models.published.decoded import Computed, Decoded
from vishwamai.models.published.settings import Settings

if TYPE_CHECKING:
    from vishwamai.models.shards import Stored

STATE = ".weight.quant_state.bitsandbytes__"
TYPES = ("nf4", "fp4")


def decode(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """A weight of codes; its blocks run over the ends of rows."""
    weight, largest, table = parts[".weight"], parts[".weight.absmax"], parts[".weight.quant_map"]
    state = next(stored for ending, stored in parts.items() if ending.startswith(STATE))
    values = _state(state)
    shape, size = values.get("shape"), values.get("blocksize")
    if not (isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise _damaged(state, "shape", shape, "[out, in]")
    if not isinstance(size, int) or size < 2:
        raise _damaged(state, "blocksize", size, "a whole number")
    count = math.prod(shape)
    for tensor, numbers in ((weight, -(-count // 2)), (largest, -(-count // size)), (table, 16)):
        if math.prod(tensor.shape) * (tensor.dtype.itemsize if tensor is weight else 1) != numbers:
            raise ShapeError(
                f"{tensor.path}: a tensor of `{module}` has shape {list(tensor.shape)}; expected {numbers} numbers for "
                f"the weight of shape {shape} in blocks of {size}."
            )
    nested = tuple(parts.get(f".weight.nested_{name}") for name in ("absmax", "quant_map"))
    if any(nested) and not all(nested):
        raise ShapeError(f"{state.path}: `{module}` has one of nested_absmax and nested_quant_map; expected both.")

    def magnitudes() -> np.ndarray:
        read = np.asarray(largest.read()).reshape(-1)
        outer, codes = nested
        if outer is None or codes is None:
            return read.astype(np.float32)
        block = np.arange(len(read)) // values.get("nested_blocksize", 256)
        levels = np.asarray(codes.read(), np.float32)[read]
        return levels * np.asarray(outer.read(), np.float32)[block] + np.float32(values.get("nested_offset", 0))

    def compute() -> np.ndarray:
        octets = np.ascontiguousarray(weight.read()).reshape(-1).view(np.uint8)
        codes = np.stack([octets >> 4, octets & 15], axis=-1).reshape(-1)[:count]
        scales = magnitudes().repeat(size)[:count]
        return (np.asarray(table.read(), np.float32)[codes] * scales).reshape(shape)

    ones = Computed(weight.path, (shape[0], 1), lambda: np.ones((shape[0], 1), np.float32))
    kind = str(values.get("quant_type"))
    return Decoded(Computed(weight.path, tuple(shape), compute), ones, f"has the numbers of {kind}")


def _state(state: Stored) -> Mapping[str, Any]:
    try:
        values = json.loads(np.asarray(state.read()).tobytes())
    except ValueError as error:
        raise ShapeError(f"{state.path}: a quant_state of bitsandbytes is not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise ShapeError(f"{state.path}: a quant_state of bitsandbytes is not an object.")
    return values


def _damaged(state: Stored, key: str, value: object, expected: str) -> ShapeError:
    return ShapeError(f"{state.path}: `{key}` of a quant_state is {value!r:.100}; expected {expected}.")
