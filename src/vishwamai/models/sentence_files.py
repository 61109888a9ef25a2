"""The files of sentence-transformers: which modules turn a text into its vector, and the prompts before it.

Reimers, Gurevych, "Sentence-BERT" (2019).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.encoder_tensors import Linear, TensorReader
from vishwamai.models.pooling import Pooling, read_mode
from vishwamai.models.shards import read_header
from vishwamai.models.values import check_value, read_json

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "Sigmoid": jax.nn.sigmoid,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """A product behind the pooling.

    Attributes:
      linear: weight and bias.
      activation: a name of torch's activations.
    """

    linear: Linear
    activation: str = dataclasses.field(metadata={"static": True})

    def __call__(self, vectors: jax.Array) -> jax.Array:
        weight, bias = self.linear
        vectors = jnp.matmul(vectors, weight.astype(vectors.dtype), precision="highest")
        return _ACTIVATIONS[self.activation](vectors if bias is None else vectors + bias.astype(vectors.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normalize:
    """Makes the length 1."""

    def __call__(self, vectors: jax.Array) -> jax.Array:
        return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


@dataclasses.dataclass(frozen=True)
class SentenceFiles:
    """What the files say.

    Attributes:
      folder: directory of the encoder's own files.
      pooling: pooling of the states.
      head: modules behind it, in their order.
      prompts: texts that come before an input, by name.
      default_prompt: name of the prompt where none is asked for, or None.
      names: names of all prompts, those of empty ones too.
      default_name: `default_prompt`, of an empty one too.
    """

    folder: Path
    pooling: Pooling
    head: tuple[Dense | Normalize, ...] = ()
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None
    names: tuple[str, ...] = ()
    default_name: str | None = None


def read_sentence_files(directory: Path, dtype: DTypeLike = jnp.float32) -> SentenceFiles:
    """The modules of a directory; without `modules.json` the mean of the states, as sentence-transformers does it.

    Raises:
      ShapeError: a file is damaged.
      UnsupportedError: a module or a mode is not one of those that are computed; the text names it.
    """
    path = directory / "modules.json"
    prompts, default, names, default_name = _prompts(directory)
    if not path.exists():
        return SentenceFiles(directory, Pooling(normalize=False), (), prompts, default, names, default_name)
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = [(str(module["type"]).rsplit(".", 1)[-1], str(module["path"])) for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise ShapeError(f"{path}: expected a list of modules with `type` and `path` ({error!r}).") from error
    folder, mode = directory, "mean"
    head: list[Dense | Normalize] = []
    for i, (kind, where) in enumerate(kinds):
        if (kind == "Transformer") != (i == 0) or (kind == "Pooling" and head):
            raise UnsupportedError(
                f"{path}: module {i} is {kind!r}; one Transformer comes first, and then the pooling."
            )
        if kind == "Transformer":
            folder = directory / where
        elif kind == "Pooling":
            mode = read_mode(directory / where / "config.json", bool(prompts))
        elif kind == "Normalize":
            head.append(Normalize())
        elif kind == "Dense":
            head.append(_dense(directory / where, dtype))
        else:
            raise UnsupportedError(
                f"{path}: module {kind!r} is not computed; only Transformer, Pooling, Dense, Normalize are."
            )
    first = bool(head) and isinstance(head[0], Normalize)
    return SentenceFiles(folder, Pooling(mode, first), tuple(head[first:]), prompts, default, names, default_name)


def _dense(folder: Path, dtype: DTypeLike) -> Dense:
    path = folder / "config.json"
    values = read_json(path)
    for key in ("in_features", "out_features"):
        check_value(key, values.get(key), int, str(path))
    activation = str(values.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    plain = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    wrong = [key for key, value in plain.items() if values.get(key, value) not in (value, None)]
    wrong += ["use_residual"] if values.get("use_residual") else []
    wrong += ["activation_function"] if activation not in _ACTIVATIONS else []
    if wrong:
        raise UnsupportedError(f"{path}: `{wrong[0]}` is {values[wrong[0]]!r:.100}, which is not computed.")
    reader = TensorReader(read_header(folder / "model.safetensors"), "", dtype)
    sizes, bias = (values["in_features"], values["out_features"]), bool(values.get("bias", True))
    return Dense(reader.linear(*sizes, "linear", bias=bias), activation)


def _prompts(directory: Path) -> tuple[dict[str, str], str | None, tuple[str, ...], str | None]:
    path = directory / "config_sentence_transformers.json"
    values = read_json(path) if path.exists() else {}
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not texts or (default is not None and default not in prompts):
        raise ShapeError(f"{path}: `prompts` are {prompts!r:.100}; expected texts by name, the default one among them.")
    texts = {name: text for name, text in prompts.items() if text}
    return texts, default if default in texts else None, tuple(prompts), default
