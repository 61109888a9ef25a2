"""The directory of the model that a run leaves: weights, tokenizer, and what chats and sampling need.

What a run started from has these files; a fine-tuned model keeps them, so that it serves chats as the first one did.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vishwamai.core import caches
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models import read_generation_config, save_pretrained
from vishwamai.models.adapter_files import write_adapter
from vishwamai.models.adapters import Place, Thin
from vishwamai.models.periods import segments
from vishwamai.models.values import read_json
from vishwamai.training.chat import CHAT_TEMPLATE, end_of_text, tokenizer_file, tokenizer_settings
from vishwamai.training.config import LoraSection, TrainConfig
from vishwamai.training.model import ModelParts

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def export(parts: ModelParts, params: PyTree, files: dict[str, str], folder: Path) -> None:
    """Writes config.json, safetensors, and the files of `files_next_to_weights`, which transformers and
    `vishwamai generate` load.

    Raises:
      DeviceError: a file cannot be written, such as on a full disk.
    """
    save_pretrained(parts.merge(params), folder)
    for name, text in files.items():
        with caches.writing(folder / name, "train"):
            caches.write(folder / name, text)


def export_adapter(
    parts: ModelParts,
    adapters: Mapping[str, Mapping[str, object]],
    section: LoraSection,
    base: str | None,
    folder: Path,
) -> None:
    """Writes the adapters in the form of the library peft, where it has one for them.

    Args:
      adapters: `down` and `up` by path, as `lora.initial_adapters`.
      base: `model.start_from`.

    Raises:
      DeviceError: a file cannot be written.
    """
    places = [
        segment.layers(place)
        for segment in segments(parts.config, parts.stacked)
        for place in range(len(segment.kinds))
    ]
    matrices: dict[Place, Thin] = {}
    for path, adapter in adapters.items():
        _, number, name = path.split("/")
        layers = places[int(number)]
        pair = tuple(np.asarray(adapter[half]) for half in ("down", "up"))
        for i, layer in enumerate(layers):
            down, up = pair if len(layers) == 1 else (half[i] for half in pair)
            matrices[layer, name] = down, up
    try:
        write_adapter(folder, parts.config, matrices, section.alpha, base)
    except UnsupportedError as error:
        logging.getLogger(__name__).warning("%s: there is no adapter of this run: %s", folder, error)


def files_next_to_weights(config: TrainConfig, tokenizer: Tokenizer, data: Path) -> dict[str, str]:
    """The other files of the exported model by their names: tokenizer.json, tokenizer_config.json,
    generation_config.json, and chat_template.jinja where there is one.

    The template is that of `data.chat_template`, else that of the tokenizer that the run takes. An answer ends with
    the token after each document, and with what ends an answer of `model.start_from`.

    Args:
      config: configuration of the run.
      tokenizer: tokenizer of the run.
      data: the folder that `data.prepare` filled.

    Raises:
      ShapeError: a file that is kept is damaged.
    """
    start = config.model.start_from
    sampling: dict[str, object] = {}
    if start is not None and (Path(start) / "generation_config.json").is_file():
        sampling = read_json(Path(start) / "generation_config.json")
    before = read_generation_config(start).eos_token_ids if start is not None else ()
    ends = list(dict.fromkeys([tokenizer.token_to_id(end_of_text(config)), *before]))
    sampling["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    values = {"tokenizer_config.json": tokenizer_settings(config), "generation_config.json": sampling}
    files = {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in values.items()}
    files["tokenizer.json"] = tokenizer.to_str(pretty=True)
    has_template = config.data.chat_template is not None
    template = data / CHAT_TEMPLATE if has_template else tokenizer_file(config, CHAT_TEMPLATE)
    if template is not None:
        files[CHAT_TEMPLATE] = template.read_text(encoding="utf-8")
    return files
