"""What `generation_config.json` says of how a model is to be sampled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.models.config import read_config
from vishwamai.models.gguf import model_directory
from vishwamai.models.values import read_json


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Defaults of sampling that a model's authors recommend; None where they say nothing.

    Attributes:
      eos_token_ids: ids that end an answer.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


@checked
def read_generation_config(directory: str | Path) -> GenerationConfig:
    """The defaults in a Hugging Face directory; `config.json` gives the special tokens where the file is absent.

    Raises:
      ShapeError: a file is damaged, or a value has another type than its name says.
    """
    directory = model_directory(Path(directory))
    path = directory / "generation_config.json"
    values = read_json(path) if path.exists() else {}
    if "eos_token_id" not in values:
        config = read_config(directory)
        values = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id, **values}
        values["eos_token_id"] = config.eos_token_id
    ends = values.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(_is_whole(id) and 0 <= id < 2**31 for id in ends):
        raise ShapeError(f"{path}: `eos_token_id` is {values['eos_token_id']!r:.100}; expected token ids.")
    read: dict[str, Any] = {"eos_token_ids": tuple(ends)}
    for field in dataclasses.fields(GenerationConfig):
        value = values.get(field.name)
        if field.name == "eos_token_ids" or value is None:
            continue
        expected, allows = _ALLOWED[field.name]
        if isinstance(value, bool) != (field.name == "do_sample") or not isinstance(value, int | float):
            raise ShapeError(f"{path}: `{field.name}` is {value!r:.100}; expected {expected}.")
        if not allows(value):
            raise ShapeError(f"{path}: `{field.name}` is {value!r:.100}; expected {expected}.")
        read[field.name] = value
    if read.get("top_k") == -1:  # no limit, as 0
        read["top_k"] = 0
    if read.get("top_p") == 0:  # transformers keeps the likeliest token
        read |= {"top_p": None, "top_k": 1}
    return GenerationConfig(**read)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TOKEN = ("a token id", lambda value: _is_whole(value) and -1 <= value < 2**31)
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "do_sample": ("true or false", lambda value: True),
    "temperature": ("a number of at least 0", lambda value: 0 <= value < math.inf),
    "top_k": ("a whole number of at least 0, or -1", lambda value: _is_whole(value) and -1 <= value < 2**31),
    "top_p": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "min_p": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a number above 0", lambda value: 0 < value < math.inf),
    "bos_token_id": _TOKEN,
    "pad_token_id": _TOKEN,
}
"""By field: what is expected, and whether a number is."""
