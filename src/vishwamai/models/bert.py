"""The BERT encoder, as a function of a tree of parameters, on the public operations.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (2019): post-norm blocks, learned positions, exact
GELU. The three operations that it needs are an argument, so the same code runs on ours or on plain jax.numpy (`PLAIN`), for comparison.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

import vishwamai

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of the encoder, by the names of Hugging Face's `config.json`."""

    hidden_size: int
    num_attention_heads: int
    num_hidden_layers: int
    layer_norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_file(cls, path: Path) -> BertConfig:
        """Reads a Hugging Face `config.json`."""
        values = json.loads(path.read_text())
        if values.get("hidden_act") != "gelu" or values.get("position_embedding_type", "absolute") != "absolute":
            raise vishwamai.UnsupportedError(
                f"BertConfig: {path} asks for hidden_act={values.get('hidden_act')!r} and position_embedding_type="
                f"{values.get('position_embedding_type')!r}; this encoder has exact gelu and absolute positions."
            )
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


class Norm(NamedTuple):
    scale: Any  # [hidden]
    offset: Any  # [hidden]


class Linear(NamedTuple):
    weight: Any  # [in, out]
    bias: Any  # [out]


class Layer(NamedTuple):
    """One block; query, key and value are one product."""

    qkv: Linear  # [hidden, 3 * hidden]
    output: Linear
    attention_norm: Norm
    up: Linear  # [hidden, intermediate]
    down: Linear
    output_norm: Norm


class Parameters(NamedTuple):
    words: Any  # [vocabulary, hidden]
    positions: Any  # [max positions, hidden]
    types: Any  # [2, hidden]
    norm: Norm
    layers: tuple[Layer, ...]


class Operations(NamedTuple):
    """What the encoder is made of; `vishwamai`'s own unless another set is passed."""

    attention: Callable[
        ..., Any
    ]  # (query, key, value, mask) -> out, all [batch, heads, seq, head_dim], mask [batch, 1, 1, seq]
    linear: Callable[..., Any]  # (x, weight, bias, activation) -> [rows, out]
    add_norm: Callable[..., Any]  # (x, residual, scale, offset, eps) -> [rows, hidden]


def _attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return vishwamai.flash_attention(query, key, value, mask=mask)


def _linear(x: Any, weight: Any, bias: Any, activation: str | None = None) -> Any:
    return vishwamai.gemm(x, weight, bias=bias, activation=activation)


def _add_norm(x: Any, residual: Any, scale: Any, offset: Any, eps: float) -> Any:
    return vishwamai.layer_norm(x, scale, offset, eps=eps, residual=residual)[0]


OURS = Operations(_attention, _linear, _add_norm)


def _plain_attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
    swapped = (x.swapaxes(1, 2) for x in (query, key, value))
    return jax.nn.dot_product_attention(*swapped, mask=mask).swapaxes(1, 2)


def _plain_linear(x: Any, weight: Any, bias: Any, activation: str | None = None) -> Any:
    y = x @ weight + bias
    return jax.nn.gelu(y, approximate=False) if activation == "gelu" else y


def _plain_add_norm(x: Any, residual: Any, scale: Any, offset: Any, eps: float) -> Any:
    total = x + residual
    mean = jnp.mean(total, axis=-1, keepdims=True)
    variance = jnp.var(total, axis=-1, keepdims=True)
    return (total - mean) * jax.lax.rsqrt(variance + eps) * scale + offset


PLAIN = Operations(_plain_attention, _plain_linear, _plain_add_norm)
"""The same on jax.nn and jax.numpy, as it would be written without this library."""


def encode(
    parameters: Parameters,
    config: BertConfig,
    tokens: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    operations: Operations = OURS,
) -> Float[Array, "batch seq hidden"]:
    """The last hidden state of every token.

    Args:
      tokens: `[batch, seq]`, ids in the vocabulary.
      mask: `[batch, seq]`, True for a token, False for padding, which nothing attends to.
      operations: what attention, products and norms are computed with.
    """
    batch, seq = tokens.shape
    rows = batch * seq
    embedded = (parameters.words[tokens] + parameters.positions[:seq]).reshape(rows, config.hidden_size)
    kinds = jnp.broadcast_to(parameters.types[0], embedded.shape)
    x = operations.add_norm(embedded, kinds, *parameters.norm, config.layer_norm_eps)
    keys = mask[:, None, None, :]
    for layer in parameters.layers:
        qkv = operations.linear(x, *layer.qkv).reshape(batch, seq, 3, config.num_attention_heads, config.head_dim)
        query, key, value = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))  # [batch, heads, seq, head_dim]
        mixed = operations.attention(query, key, value, keys).swapaxes(1, 2).reshape(rows, config.hidden_size)
        x = operations.add_norm(
            operations.linear(mixed, *layer.output), x, *layer.attention_norm, config.layer_norm_eps
        )
        wide = operations.linear(x, *layer.up, activation="gelu")
        x = operations.add_norm(operations.linear(wide, *layer.down), x, *layer.output_norm, config.layer_norm_eps)
    return x.reshape(batch, seq, config.hidden_size)


def from_hugging_face(tensors: Mapping[str, Any], config: BertConfig, dtype: Any = jnp.float32) -> Parameters:
    """The tree of parameters from a checkpoint of `transformers.BertModel` (without the pooler, which no embedding needs).

    Args:
      tensors: arrays by their names in the checkpoint; products are stored `[out, in]` there.
      dtype: of the result.
    """

    def array(name: str) -> Any:
        return jnp.asarray(tensors[name], dtype)

    def norm(name: str) -> Norm:
        return Norm(array(f"{name}.weight"), array(f"{name}.bias"))

    def linear(*names: str) -> Linear:
        weight = jnp.concatenate([array(f"{name}.weight") for name in names]).T
        return Linear(weight, jnp.concatenate([array(f"{name}.bias") for name in names]))

    def layer(i: int) -> Layer:
        at = f"encoder.layer.{i}"
        return Layer(
            qkv=linear(*(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))),
            output=linear(f"{at}.attention.output.dense"),
            attention_norm=norm(f"{at}.attention.output.LayerNorm"),
            up=linear(f"{at}.intermediate.dense"),
            down=linear(f"{at}.output.dense"),
            output_norm=norm(f"{at}.output.LayerNorm"),
        )

    return Parameters(
        words=array("embeddings.word_embeddings.weight"),
        positions=array("embeddings.position_embeddings.weight"),
        types=array("embeddings.token_type_embeddings.weight"),
        norm=norm("embeddings.LayerNorm"),
        layers=tuple(layer(i) for i in range(config.num_hidden_layers)),
    )
