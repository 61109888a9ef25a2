"""Every key of every family, set to other values, added and deleted: we compute what transformers computes, or an error
names the key.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import models_peer
import rotation
from models_families import TINY, family
from models_peer import Peer
from vishwamai import ShapeError, UnsupportedError
from vishwamai.models import ModelConfig, from_pretrained

ABSENT: Any = object()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROTATIONS: list[Any] = [
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0, "rope_theta": 500.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    YARN,
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "no such type"},
]
ACTIVATIONS = ["gelu", "gelu_pytorch_tanh", "relu", "silu", "gelu_new", "tanh"]
VALUES: dict[str, list[Any]] = {
    "rope_parameters": [None, *ROTATIONS],
    "rope_scaling": [None, *ROTATIONS],
    "rope_theta": [100.0, 1e6],
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "hidden_size": [],  # sizes are read off the tensors' shapes: each other value is another model
    "partial_rotary_factor": [0.5, 1.0, None],
    "original_max_position_embeddings": [16, 64, None],
    "max_position_embeddings": [32, 128],
    "sliding_window": [5, 20, None],
    "sliding_window_pattern": [2, 3],
    "_sliding_window_pattern": [2],
    "max_window_layers": [0, 1, 9],
    "layer_types": [["full_attention"], ["sliding_attention"], ["sliding_attention", "full_attention"], None],
    "mlp_only_layers": [[0], [1], [], None],
    "decoder_sparse_step": [1, 2],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc", "no such method"],
    "scoring_func": ["softmax", "sigmoid"],
    "rope_local_base_freq": [100.0],
    "clip_qkv": [0.5, None],
    "head_dim": [8, 24, None],
}
"""Values of keys that their type does not give; a list of layer types is repeated to the number of layers."""
UNREAD = ("transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "id2label", "label2id")
UNREAD += ("problem_type", "is_encoder_decoder", "vocab_size", "return_dict", "_name_or_path", "output_attentions")
UNREAD += ("chunk_size_feed_forward", "output_hidden_states", "num_hidden_layers", "n_layer", "per_layer_config")


def other_values(key: str, value: Any) -> list[Any]:
    """Other values of a key that has this one."""
    if key in VALUES:
        return [other for other in VALUES[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({0, 1, 2, value // 2, 2 * value, value + 1} - {value})
    if isinstance(value, float):
        return [0.0, 2 * value + 0.5, 1.0]
    return {type(None): [True, 2, 0.5], list: [[], None], str: ["silu"]}.get(type(value), [])


@functools.cache
def base(name: str) -> dict[str, Any]:
    """The `config.json` that transformers writes of a tiny model."""
    values = TINY[name].config().to_dict()
    return {key: value for key, value in values.items() if not (value is None and key in UNREAD)}


@functools.cache
def all_keys() -> dict[str, Any]:
    """Every key of every family with a value."""
    known = dict.fromkeys(VALUES, ABSENT)
    for name in TINY:
        known |= {key: value for key, value in base(name).items() if known.get(key, ABSENT) in (ABSENT, None)}
    return known


def variants(name: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Key, value and the file, for each change of one key."""
    values = base(name)
    layers = TINY[name].config().num_hidden_layers
    for key, sample in all_keys().items():
        if key in UNREAD:
            continue
        if key in values:
            yield key, ABSENT, {other: value for other, value in values.items() if other != key}
        options = other_values(key, values.get(key, None if sample is ABSENT else sample))
        if key not in values and sample is not ABSENT and sample is not None:
            options = [sample, *options]
        for value in options:
            if key == "layer_types" and value is not None:
                value = (value * layers)[:layers]
            yield key, value, {**values, key: value}
            if key == "rope_scaling" and value:  # files of transformers 4 have no `rope_parameters`
                old = {other: v for other, v in values.items() if other != "rope_parameters"}
                yield key, value, {**old, key: value, "rope_theta": 5000.0}


def theirs(values: dict[str, Any]) -> Any:
    """The configuration of transformers, or None where it does not take the values."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))
    except Exception:  # each class has checks of its own
        return None


def ours(values: dict[str, Any]) -> ModelConfig | str:
    """Our configuration, or the text of the error."""
    try:
        return ModelConfig.from_dict(values)
    except (ShapeError, UnsupportedError) as error:
        return str(error)


def is_named(key: str, value: Any, text: str) -> bool:
    """Whether an error names the key, or one inside of its value, in one line."""
    names = [key, *value] if isinstance(value, dict) else [key]
    names += ["layer_types"] if key == "use_sliding_window" else []
    names += ["rope_parameters"] if key in ("rope_scaling", "original_max_position_embeddings") else []
    return "\n" not in text and any(f"`{name}" in text for name in names)


def label(key: str, value: Any) -> str:
    return f"{key} deleted" if value is ABSENT else f"{key} = {value!r}"


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", TINY)
def test_a_changed_key_is_read_as_transformers_reads_it(name: str) -> None:
    """What a file says is what the file says that transformers writes of it, where every key is present."""
    wrong = []
    for key, value, values in variants(name):
        config, peer = ours(values), theirs(values)
        if isinstance(config, str):
            if not is_named(family(name).aliases.get(key, key), value, config):
                wrong.append(f"{label(key, value)}: {config}")
            continue
        if peer is None:
            continue
        try:
            explicit = ModelConfig.from_dict(peer.to_dict())
        except (ShapeError, UnsupportedError) as error:
            if not is_named(key, value, str(error)):  # one that transformers takes and cannot compute
                wrong.append(f"{label(key, value)}: accepted, but not as transformers writes it: {error}")
            continue
        if explicit != config:
            pairs = zip(vars(config).items(), vars(explicit).values())
            wrong.append(f"{label(key, value)}: {[(k, a, b) for (k, a), b in pairs if a != b]}")
    assert not wrong, "\n".join(wrong)


TOKENS = np.random.default_rng(0).integers(3, 131, (1, 48))


def peer_model(config: Any) -> Any:
    try:
        return Peer.build(config)
    except Exception:  # sizes that do not fit one another
        return None


def our_logits(directory: Path, values: dict[str, Any]) -> np.ndarray:
    (directory / "config.json").write_text(json.dumps(values, default=str))
    decoder = from_pretrained(directory, dtype=jnp.float32)
    return np.asarray(decoder.logits(decoder(jnp.asarray(TOKENS))))


@functools.cache
def base_logits(name: str) -> np.ndarray:
    return models_peer.peer_logits(Peer.build(TINY[name].config()), TOKENS)


def check_logits(name: str, key: str, value: Any, values: dict[str, Any], directory: Path) -> str | None:
    """What is wrong, or None."""
    if key == "index_n_heads" and value in (1, 2):  # many scores are 0 then, and `torch.topk` takes any of them
        return None
    config = ours(values)
    peer = None if isinstance(config, str) else theirs(values)
    model = None if peer is None else peer_model(peer)
    if model is None:
        return None
    try:
        expected = models_peer.peer_logits(model, TOKENS)
        model.save_pretrained(directory)
    except Exception:  # a value that transformers takes and cannot compute
        return None
    if config == ModelConfig.from_dict(base(name)) and np.array_equal(expected, base_logits(name)):
        return None  # neither reads the key; `test_models` and `test_models_families` compare the logits
    try:
        logits = our_logits(directory, values)
    except (ShapeError, UnsupportedError) as error:
        return f"{label(key, value)}: {error}"
    error = np.abs(logits - expected).max() / (np.abs(expected).max() or 1.0)  # an `initializer_range` of 0
    if error >= 1e-3:  # of sizes such as 1, whose norms divide by next to nothing, transformers' own may be off by more
        exact = models_peer.peer_logits(model, TOKENS, double=True)
        bound = 8 if name.startswith("zamba2") else 1  # its blocks are used again, which amplifies a rounding
        error = 0.0 if np.abs(logits - exact).max() <= bound * np.abs(expected - exact).max() else error
    return None if error < 1e-3 else f"{label(key, value)}: logits differ by {error:.2g} of the largest"


def sampled(name: str, count: int | None) -> list[tuple[str, Any, dict[str, Any]]]:
    """Some variants, others on other days."""
    found = list(variants(name))
    if count is None:
        return found
    return random.Random(rotation.SEED + zlib.crc32(name.encode())).sample(found, count)


def wrong_logits(name: str, count: int | None, directory: Path) -> list[str]:
    results = (check_logits(name, *variant, directory) for variant in sampled(name, count))
    return [text for text in results if text is not None]


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", TINY)
def test_a_changed_key_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    assert not wrong_logits(name, 1, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", TINY)
def test_all_changed_keys_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    wrong = wrong_logits(name, None, tmp_path)
    assert not wrong, "\n".join(wrong)
