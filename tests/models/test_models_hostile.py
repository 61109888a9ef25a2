"""Model directories with damaged files: an error of ours or a model, whatever is changed."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import world
from vishwamai.core.errors import VishwamaiError
from vishwamai.models import (
    Decoder,
    ModelConfig,
    from_pretrained,
    read_config,
    read_generation_config,
    read_tokenizer,
    save_pretrained,
)

VALUES = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
OTHERS: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**8,
    10**30,
    1e308,
    float("nan"),
    "",
    "a",
    "../a",
    [],
    [5],
    {},
    {"a": [[]]},
]
SMALL = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    save_pretrained(Decoder(ModelConfig.from_dict(VALUES), rngs=nnx.Rngs(0)), path)
    header = json.loads((path / "model.safetensors").read_bytes()[8:][: _length(path)])
    header.pop("__metadata__", None)
    index = {"metadata": {}, "weight_map": dict.fromkeys(header, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "eos_token_id": [1, 2]}
    (path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = json.loads((world.WORLD / "tokenizers/small/llm-d-test-model.tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = dict(list(tokenizer["model"]["vocab"].items())[:2000])
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": "{{ messages[0].content }}", "eos_token": "[SEP]", "bos_token": {"content": "[CLS]"}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def _length(path: Path) -> int:
    return struct.unpack("<Q", (path / "model.safetensors").read_bytes()[:8])[0]


def _changed(draw: random.Random, values: Any) -> Any:
    """One value at some depth replaced, removed, or added."""
    if isinstance(values, dict) and values and draw.random() < 0.9:
        key = draw.choice(list(values))
        action = draw.random()
        if action < 0.15:
            return {name: value for name, value in values.items() if name != key}
        if action < 0.25:
            return {
                **values,
                draw.choice(["extra", "rope_scaling", "layer_types", "quantization_config"]): draw.choice(OTHERS),
            }
        return {**values, key: _changed(draw, values[key])}
    if isinstance(values, list) and values and draw.random() < 0.5:
        place = draw.randrange(len(values))
        return [_changed(draw, value) if i == place else value for i, value in enumerate(values)]
    return draw.choice(OTHERS)


def _damage(draw: random.Random, path: Path) -> str:
    """Changes a file of a directory; says how."""
    name = draw.choice(
        [*SMALL, "config.json", "config.json", "header", "header", "tokenizer.json", "bits", "cut", "deep"]
    )
    if name == "header":
        data = (path / "model.safetensors").read_bytes()
        length = _length(path)
        header = json.dumps(_changed(draw, json.loads(data[8 : 8 + length]))).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
        return name
    if name in ("bits", "cut", "deep"):
        file = path / draw.choice([*SMALL, "tokenizer.json", "model.safetensors"])
        data = bytearray(file.read_bytes())
        place = draw.randrange(len(data))
        if name == "bits":
            data[place] ^= 1 << draw.randrange(8)
        file.write_bytes(b'{"a":' * 100_000 if name == "deep" else data[:place] if name == "cut" else data)
        return f"{name} of {file.name} at {place}"
    values = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(_changed(draw, values)))
    return f"{name}: {(path / name).read_text()[:1500]}"


@pytest.mark.parametrize("count", [pytest.param(60, id="few"), pytest.param(1000, id="many", marks=pytest.mark.long)])
def test_damaged_directories_are_errors_of_ours(count: int, directory: Path, tmp_path: Path) -> None:
    read = [
        lambda path: from_pretrained(path, dtype=jnp.float32),
        read_config,
        read_generation_config,
        lambda path: read_tokenizer(path).render_chat([{"role": "user", "content": "hello"}]),
        lambda path: read_tokenizer(path).decode(read_tokenizer(path).encode("hello")),
    ]
    errors = 0
    for seed in range(count):
        path = tmp_path / str(seed)
        shutil.copytree(directory, path)
        damage = _damage(random.Random(seed), path)
        for function in read:
            try:
                function(path)
            except VishwamaiError as error:
                errors += 1
                assert len(str(error)) < 5000, damage
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {damage}") from error
        shutil.rmtree(path)
    assert errors > count // 3
