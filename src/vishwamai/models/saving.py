"""Decoders as Hugging Face directories: `save_pretrained`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np

from vishwamai.core import caches
from vishwamai.core.arguments import checked
from vishwamai.core.errors import ConfigError, ShapeError
from vishwamai.models.checkpoint import constant_values
from vishwamai.models.decoder import Decoder
from vishwamai.models.remote import why_not_local
from vishwamai.models.shards import DTYPES
from vishwamai.models.tensors import piece
from vishwamai.models.variables import named_parameters

_CHUNK = 16 << 20
"""Bytes that are copied at once."""


@checked
def save_pretrained(model: Decoder, directory: str | Path) -> None:
    """Writes `config.json` and `model.safetensors`, which transformers and `from_pretrained` load.

    The files are whole or absent: the weights are written beside their name and moved there at the end.

    Raises:
      ConfigError: `directory` is an address such as gs://bucket/model.
      ShapeError: a parameter is quantized or packed; save the model that it was made from.
      DeviceError: a file cannot be written, such as on a full disk; the text names it and the reason.
    """
    if reason := why_not_local(directory):
        raise ConfigError(f"save_pretrained: {reason}.")
    directory = Path(directory)
    tensors: dict[str, np.ndarray] = {}
    for name, parameter, layer, value in named_parameters(model):
        if not isinstance(value, (jax.Array, np.ndarray)):
            raise ShapeError(
                f"save_pretrained: parameter `{name}` is a {type(value).__name__}; save the model that it came from, "
                "or load the directory without `quantize`."
            )
        where = piece(model.config, name, parameter, layer)
        array = np.asarray(value)
        inner = parameter.shape[1:] if where.stacked else parameter.shape
        selection = where.index((slice(None),) * len(inner), parameter.shape)
        for name, part in zip(where.tensors, array if where.stacked else [array]):
            stored = tensors.setdefault(name, np.zeros(where.shape(parameter.shape), array.dtype))
            stored[selection] = part.swapaxes(-1, -2) if where.transpose else part
    tensors |= {name: np.asarray(value, np.float32) for name, value in constant_values(model.config).items()}
    values = model.config.to_dict()
    values["dtype"] = model.embed.get_value().dtype.name
    weights = directory / "model.safetensors"
    with caches.writing(weights, "save_pretrained"), drafted(tensors.items(), weights):
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)  # of shards, which it would prefer
    with caches.writing(directory / "config.json", "save_pretrained"):
        caches.write(directory / "config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def drafted(tensors: Iterable[tuple[str, np.ndarray]], weights: Path) -> Iterator[None]:
    """Writes tensors next to the file `weights`, and moves them there once the block has ended without an error.

    Args:
      tensors: names and arrays, of which one at a time is in memory where they are computed one by one.
    """
    weights.parent.mkdir(parents=True, exist_ok=True)
    draft = weights.with_name(f"{weights.name}.partial")
    try:
        _write(tensors, draft)
        yield
        draft.replace(weights)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@dataclasses.dataclass(frozen=True)
class _Written:
    """A tensor in a spool: the name of its dtype, its shape, its first byte, and the bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def _write(tensors: Iterable[tuple[str, np.ndarray]], path: Path) -> None:
    """A file in the form of safetensors, whose own writer takes all tensors at once.

    Its header has all sizes, and wide dtypes precede narrow ones, so that each tensor is aligned: until both are known,
    the bytes wait in a file without a name.
    """
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    with tempfile.TemporaryFile(dir=path.parent) as spool, path.open("wb") as file:
        entries: dict[str, _Written] = {}
        for name, tensor in tensors:
            entries[name] = _Written(tensor.dtype, tensor.shape, spool.tell(), tensor.nbytes)
            spool.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        order = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in order:
            entry, start = entries[name], end
            end += entry.nbytes
            header[name] = {"dtype": names[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            spool.seek(entries[name].start)
            for first in range(0, entries[name].nbytes, _CHUNK):
                file.write(spool.read(min(_CHUNK, entries[name].nbytes - first)))
