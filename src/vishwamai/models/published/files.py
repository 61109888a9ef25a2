"""How the files of a directory say that its weights are quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.gguf import LINK
from vishwamai.models.published.index import check_settings
from vishwamai.models.values import read_json

_MODELOPT_FILE = "hf_quant_config.json"
_QUANTO_FILE = "quanto_qmap.json"
"""Files that say how weights are quantized where `config.json` does not."""


def is_quantized(directory: Path) -> bool:
    """Whether a checkpoint is published quantized, or is a GGUF file, whose blocks are."""
    return quantization(directory) is not None or (directory / LINK).exists()


def quantization(directory: Path) -> dict[str, Any] | None:
    """`quantization_config` of the checkpoint, which may lie with the keys of its text part.

    Raises:
      UnsupportedError: another file says that the weights are quantized, in a form that the loader does not read.
    """
    values = read_json(directory / "config.json")
    nested = values.get("text_config")
    settings = values.get("quantization_config")
    if settings is None and isinstance(nested, dict):
        settings = nested.get("quantization_config")
    if settings is not None and not isinstance(settings, dict):
        raise ShapeError(
            f"{directory / 'config.json'}: `quantization_config` is {settings!r:.100}; expected an object."
        )
    if settings is None and (directory / _QUANTO_FILE).exists():
        raise UnsupportedError(
            f"{directory / _QUANTO_FILE}: the weights are quantized by optimum-quanto, which the loader does not read; "
            "load the model that they were made from."
        )
    if settings is None and (directory / _MODELOPT_FILE).exists():
        settings = read_json(directory / _MODELOPT_FILE).get("quantization")
        if not isinstance(settings, dict):
            raise ShapeError(f"{directory / _MODELOPT_FILE}: `quantization` is {settings!r:.100}; expected an object.")
        settings = {"quant_method": "modelopt", **settings}
    if settings is not None:
        check_settings(settings, str(directory / "config.json"))
    return settings
