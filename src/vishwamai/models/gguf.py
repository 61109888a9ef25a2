"""GGUF files in: a file's configuration, tokenizer and chat template in the form of a Hugging Face directory.

The directory lies in the user's cache and has a link to the file, `model.gguf`, whose tensors are read in place of
those of safetensors files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import vishwamai
from vishwamai.core import caches
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models import hub
from vishwamai.models.gguf_container import BlockTensor, Container, read_container

LINK = "model.gguf"
"""The name of the file in the directory."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
"""`model_type` by `general.architecture`."""

_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_GEMMA_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NO_EFFECT = ("vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.finetuned")
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix == ".gguf" and not path.is_dir()


def model_directory(path: Path, weights: bool = False) -> Path:
    """The directory of a model: `path` itself, for a GGUF file the one that is made of it, or that of a model of the
    Hub ("ORG/NAME@REVISION", "ORG/NAME:Q4_K_M"), whose safetensors files are fetched with `weights` only.

    Raises:
      ShapeError, DeviceError: as `hub.local_model`.
      ShapeError, UnsupportedError: the file cannot be read, or holds what the decoder does not compute.
    """
    path = hub.local_model(path, weights)
    if not is_gguf(path):
        return path
    path = path.resolve()
    if not path.is_file():
        raise ShapeError(f"{path}: expected a GGUF file, or a directory with config.json and safetensors files.")
    state = path.stat()
    origin = [str(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, vishwamai.__version__]
    root = caches.cache_directory("weights")
    try:
        if root is None:
            raise OSError(caches.no_directory("weights"))
        caches.private_directory(root)
    except OSError:
        root = Path(tempfile.mkdtemp(prefix="vishwamai-gguf-"))
    folder = root / hashlib.sha256(json.dumps(origin).encode()).hexdigest()
    if not (folder / LINK).exists():
        files = _files(read_container(path))
        with caches.temporary_directory(root) as draft:
            inside = draft / "entry"
            inside.mkdir(mode=0o700)
            for name, text in files.items():
                (inside / name).write_text(text, encoding="utf-8")
            (inside / LINK).symlink_to(path)
            if not folder.exists():
                os.replace(inside, folder)
    return folder


def source_file(directory: Path) -> Path:
    """The GGUF file that a directory was made of, or the directory itself."""
    link = directory / LINK
    return link.readlink() if link.is_symlink() else directory


def _files(container: Container) -> dict[str, str]:
    """The text of each file of the directory."""
    from vishwamai.models.gguf_tokenizer import read_encoder

    values, source = container.values, str(container.path)
    special = {name: values.get(f"tokenizer.ggml.{key}_token_id") for key, name in _SPECIAL.items()}
    tokens = values.get("tokenizer.ggml.tokens") or []
    for name, id in special.items():
        if id is not None and not (isinstance(id, int) and 0 <= id < len(tokens)):
            raise ShapeError(f"{source}: the id of `{name}` is {id!r}, which is not one of {len(tokens)} tokens.")
    ends = dict.fromkeys(values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    config = _config(container) | {f"{name}_id": special[name] for name in ("bos_token", "eos_token", "pad_token")}
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": text
        for key, text in values.items()
        if key.startswith("tokenizer.chat_template") and isinstance(text, str)
    }
    settings: dict[str, Any] = {name: tokens[id] for name, id in special.items() if id is not None}
    if templates:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps({"eos_token_id": [id for id in ends if id is not None]}),
        "tokenizer_config.json": json.dumps(settings),
        "tokenizer.json": read_encoder(values, source).to_str(),
    }


def _config(container: Container) -> dict[str, Any]:
    """The values of config.json."""
    values, source = container.values, str(container.path)
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise UnsupportedError(
            f"{source}: `general.architecture` is {architecture!r}; GGUF files of {', '.join(_FAMILIES)} are read."
        )
    gemma = architecture.startswith("gemma")
    keys = {
        key.removeprefix(f"{architecture}."): value
        for key, value in values.items()
        if key.startswith(f"{architecture}.")
    }
    scaling = {key: keys.pop(key) for key in list(keys) if key.startswith("rope.scaling.")}
    names = _KEYS | (_GEMMA_KEYS if gemma else {})
    unknown = sorted(key for key in keys if key not in names and key not in _NO_EFFECT)
    if unknown:
        raise UnsupportedError(f"{source}: `{architecture}.{unknown[0]}` = {keys[unknown[0]]!r:.100} is not known.")
    config = {name: keys[key] for key, name in names.items() if key in keys}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(hidden, int) and heads > 0):
        raise ShapeError(
            f"{source}: the number of heads is {heads} and the hidden size {hidden}; expected whole numbers."
        )
    config["head_dim"] = keys.get("attention.key_length", keys.get("rope.dimension_count", hidden // heads))
    if keys.get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedError(f"{source}: `{architecture}.rope.dimension_count` is not the size of a head.")
    config |= {"model_type": _FAMILIES[architecture], "vocab_size": _rows(container, "token_embd.weight")}
    config["tie_word_embeddings"] = "output.weight" not in container.tensors
    if gemma:
        config["query_pre_attn_scalar"] = config["head_dim"]
        if config.get("num_hidden_layers") in (46, 62):  # Gemma 2 27B and Gemma 3 27B scale by the width of a head
            config["query_pre_attn_scalar"] = hidden // heads
    rotation = _rotation(container, scaling, source)
    return config | ({} if rotation is None else {"rope_scaling": rotation})


def _rows(container: Container, name: str) -> int:
    if name not in container.tensors:
        raise ShapeError(f"{container.path}: tensor `{name}` is missing.")
    return container.tensors[name].shape[0]


def _rotation(container: Container, scaling: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """`rope_scaling`; Llama 3's is stored as the factor of each frequency."""
    factors = container.tensors.get("rope_freqs.weight")
    kind = scaling.get("rope.scaling.type", "none")
    if factors is not None and kind == "none":
        read = factors.read()
        base = container.values.get(f"{container.values['general.architecture']}.rope.freq_base", 10000.0)
        factor = float(read.max())
        waves = 2 * math.pi * base ** (np.arange(len(read)) / len(read))
        smooth = np.clip((8192 / waves - 1) / 3, 0, 1)  # low_freq_factor 1, high_freq_factor 4
        if not np.allclose(read, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            raise UnsupportedError(f"{source}: `rope_freqs.weight` holds factors of frequencies other than Llama 3's.")
        llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        return {"rope_type": "llama3", "factor": factor, **llama3}
    if kind == "none" and factors is None:
        return None
    factor = scaling.get("rope.scaling.factor")
    if kind == "linear" and factors is None:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factors is None:
        length = scaling.get("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    raise UnsupportedError(f"{source}: `rope.scaling.type` is {kind!r}; none, linear, yarn and Llama 3's are read.")


def read_tensors(directory: Path) -> dict[str, BlockTensor] | None:
    """The tensors of a directory's GGUF file under the names of transformers; None where it has no such file.

    Raises:
      ShapeError: the file is damaged, or a tensor has no place in the model.
    """
    path = directory / LINK
    if not path.exists():
        return None
    container = read_container(path)
    architecture = str(container.values.get("general.architecture"))
    tensors = {}
    for name, tensor in container.tensors.items():
        if name != "rope_freqs.weight":
            change = _change(name, container.values, architecture)
            tensors[_name(name, architecture, path)] = dataclasses.replace(tensor, change=change)
    return tensors


def _name(name: str, architecture: str, path: Path) -> str:
    *layer, stem, ending = name.split(".")
    names = _LAYER | (_GEMMA if architecture.startswith("gemma") else {})
    if not layer and stem in _TOP:
        return f"{_TOP[stem]}.{ending}"
    if len(layer) == 2 and layer[0] == "blk" and stem in names:
        return f"model.layers.{layer[1]}.{names[stem]}.{ending}"
    raise ShapeError(f"{path}: tensor `{name}` has no place in a model of {architecture}.")


def _change(name: str, values: Mapping[str, Any], architecture: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """What makes a tensor that of transformers: llama.cpp has queries and keys of Llama in another order of rows, and
    adds the 1 of Gemma's norms.
    """
    if architecture.startswith("gemma") and "norm" in name:
        return _minus_one
    heads: Any = values.get("llama.attention.head_count")
    if architecture == "llama" and ".attn_q." in name:
        return _halves(heads)
    if architecture == "llama" and ".attn_k." in name:
        return _halves(values.get("llama.attention.head_count_kv", heads))
    return None


def _minus_one(scale: np.ndarray) -> np.ndarray:
    return scale - 1


def _halves(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Rows of each head from neighbouring pairs to halves, as rotation by halves wants them."""
    return lambda rows: rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
