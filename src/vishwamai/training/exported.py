"""The directory of the model that a run leaves: weights, tokenizer, and what chats and sampling need.

What a run started from has these files; a fine-tuned model keeps them, so that it serves chats as the first one did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vishwamai.core import caches
from vishwamai.models import read_generation_config, save_pretrained
from vishwamai.models.values import read_json
from vishwamai.training.chat import CHAT_TEMPLATE, end_of_text, tokenizer_file, tokenizer_settings
from vishwamai.training.config import TrainConfig
from vishwamai.training.model import ModelParts, Tree

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def export(parts: ModelParts, params: Tree, files: dict[str, str], folder: Path) -> None:
    """Writes config.json, safetensors, and the files of `files_next_to_weights`, which transformers and
    `vishwamai generate` load.

    Raises:
      DeviceError: a file cannot be written, such as on a full disk.
    """
    save_pretrained(parts.merge(params), folder)
    for name, text in files.items():
        with caches.writing(folder / name, "train"):
            caches.write(folder / name, text)


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
    sampling: dict[str, Any] = {}
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
