"""What `generation_config.json` says of how a model is to be sampled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.models.config import read_config
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
    path = Path(directory) / "generation_config.json"
    values = read_json(path) if path.exists() else {}
    if "eos_token_id" not in values:
        config = read_config(directory)
        values = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id, **values}
        values["eos_token_id"] = config.eos_token_id
    ends = values.get("eos_token_id")
    ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    found: dict[str, Any] = {"eos_token_ids": ends}
    for field in dataclasses.fields(GenerationConfig):
        value = values.get(field.name)
        if field.name == "eos_token_ids" or value is None:
            continue
        if not isinstance(value, int | float):
            raise ShapeError(f"{path}: `{field.name}` is {value!r}; expected a number.")
        found[field.name] = value
    return GenerationConfig(**found)
