"""Decoders as Hugging Face directories: `save_pretrained`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from vishwamai.core import caches
from vishwamai.core.arguments import checked
from vishwamai.core.errors import ConfigError, ShapeError
from vishwamai.models.checkpoint import constant_values
from vishwamai.models.decoder import Decoder
from vishwamai.models.remote import why_not_local
from vishwamai.models.tensors import piece
from vishwamai.models.variables import named_parameters


@checked
def save_pretrained(model: Decoder, directory: str | Path) -> None:
    """Writes `config.json` and `model.safetensors`, which transformers and `from_pretrained` load.

    The files are whole or absent: the weights are written beside their name and moved there at the end.

    Raises:
      ConfigError: `directory` is an address such as gs://bucket/model.
      ShapeError: a parameter is quantized or packed; save the model that it was made from.
      DeviceError: a file cannot be written, such as on a full disk; the text names it and the reason.
    """
    from safetensors import SafetensorError

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
    with caches.writing(weights, "save_pretrained", (OSError, SafetensorError)), drafted(tensors, weights):
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)  # of shards, which it would prefer
    with caches.writing(directory / "config.json", "save_pretrained"):
        caches.write(directory / "config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def drafted(tensors: Mapping[str, np.ndarray], weights: Path) -> Iterator[None]:
    """Writes tensors next to the file `weights`, and moves them there once the block has ended without an error."""
    from safetensors.numpy import save_file

    weights.parent.mkdir(parents=True, exist_ok=True)
    draft = weights.with_name(f"{weights.name}.partial")
    try:
        draft.write_bytes(b"")
        mode = draft.stat().st_mode  # by the umask; safetensors gives 0600
        save_file(dict(tensors), draft, metadata={"format": "pt"})
        draft.chmod(mode)
        yield
        draft.replace(weights)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
