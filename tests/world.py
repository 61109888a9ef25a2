"""Published files, real tokenizers and real weights for the tests, and tiny models that have a real vocabulary.

The world folder is `VISHWAMAI_WORLD`, or `../shared/world` next to the clone. `make world` fetches tokenizers and
weights into `world/` of the environment. A test of something that is absent skips and names it.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

WORLD = Path(os.environ.get("VISHWAMAI_WORLD", Path(__file__).parents[2] / "shared" / "world"))
FETCHED = Path(sys.prefix) / "world"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3_GGUF = "gemma-3-270m-Q4_K_M.gguf"


def folder(name: str) -> Path:
    """A folder of the world: `configs`, `requests`, `chat_templates`, `bugs`, `safetensors`, ..."""
    return _present(WORLD / name, "the world folder")


def files(name: str, pattern: str) -> list[Path]:
    """Sorted files of a folder of the world, for parametrized tests: empty where there is no world."""
    return sorted((WORLD / name).glob(pattern))


def tokenizer(name: str) -> Path:
    """A directory with the published `tokenizer.json` and `tokenizer_config.json` of `name`, such as `qwen3`."""
    return _present(FETCHED / "tokenizers" / name, "make world")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: weights in float32, tokenizer and chat template as transformers writes them."""
    return _present(FETCHED / "models" / "smollm2-135m-instruct", "make world")


def gguf(name: str) -> Path:
    """A published GGUF file: `SMOLLM2_GGUF` or `GEMMA3_GGUF`."""
    return _present(FETCHED / "models" / name, "make world")


@dataclasses.dataclass(frozen=True)
class Published:
    """What the published models of one tokenizer say: transformers' class, size of the vocab, ids of begin and end."""

    peer: str
    vocab: int
    begin: int | None
    end: int | list[int]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


PUBLISHED = {
    "llama2": Published("Llama", 32000, 1, 2),
    "llama3_1": Published("Llama", 128256, 128000, [128001, 128008, 128009]),
    "qwen3": Published("Qwen3", 151936, 151643, [151645, 151643], {"head_dim": 16}),
    "gemma3": Published("Gemma3Text", 262208, 2, [1, 106], {"head_dim": 16}),
    "gptoss": Published(
        "GptOss", 201088, 199998, [200002, 199999, 200012],
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
"""Tokenizers with which `tiny` makes models."""


@functools.cache
def tiny(name: str, **options: Any) -> Path:
    """A random model of one layer and 32 features with the published vocab, tokenizer and end ids of `name`.

    `options` are keys of transformers' configuration, `vocab_size` among them. The same call gives the same directory
    within a process, which tests do not change.
    """
    from models_peer import Peer

    source = tokenizer(name)
    published = PUBLISHED[name]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    ids = {"vocab_size": published.vocab, "bos_token_id": published.begin, "eos_token_id": published.end}
    directory = Path(tempfile.mkdtemp(prefix=f"vishwamai-{name}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    Peer(published.peer, {**sizes, **ids, "pad_token_id": None, **published.options, **options}).save(directory)
    for path in source.iterdir():
        shutil.copy(path, directory)
    return directory


def records(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file of the world."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _present(path: Path, source: str) -> Path:
    if not path.exists():
        pytest.skip(f"world: {path.name} is not here ({source})")
    return path
