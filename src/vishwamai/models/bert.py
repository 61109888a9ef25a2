"""BERT, RoBERTa and XLM-R, as a function of a tree of parameters, on the public operations.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (2019): post-norm
blocks, learned positions, exact GELU. RoBERTa's positions begin behind the id of its padding (Liu et al., 2019). The
three operations that it needs are an argument, so the same code runs on ours or on plain jax.numpy (`PLAIN`), for
comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.models.encoder_tensors import Linear, Norm, TensorReader, check_known
from vishwamai.models.shards import Stored, read_index
from vishwamai.models.values import read_json

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Bool, Float, Int


_IGNORED = frozenset(
    "_name_or_path architectures torch_dtype dtype transformers_version model_type attention_probs_dropout_prob "
    "hidden_dropout_prob classifier_dropout gradient_checkpointing initializer_range use_cache pad_token_id "
    "bos_token_id eos_token_id sep_token_id return_dict output_hidden_states output_attentions id2label label2id "
    "problem_type torchscript is_encoder_decoder tie_word_embeddings pooler_fc_size pooler_num_attention_heads "
    "pooler_num_fc_layers pooler_size_per_head pooler_type sentence_transformers finetuning_task num_labels".split()
)
"""Keys of a `config.json` that do not change the encoder's numbers."""

_REQUIRED: dict[str, object] = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
}
"""Keys that must have this value where they are given."""


_DERIVED = ("model_type", "first_position")
"""Fields of `BertConfig` that are not sizes."""

PREFIXES = {"bert": "bert.", "camembert": "roberta.", "roberta": "roberta.", "xlm-roberta": "roberta."}
"""What comes before the tensors' names in a model with a head, by `model_type`."""


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of the encoder, by the names of Hugging Face's `config.json`.

    Attributes:
      model_type: family, a key of `PREFIXES`.
      first_position: row of the table of positions that a text's first token has.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    model_type: str = "bert"
    first_position: int = 0

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text."""
        return self.max_position_embeddings - self.first_position

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_file(cls, path: Path) -> BertConfig:
        """Reads a Hugging Face `config.json`.

        Raises:
          ShapeError: a size is missing or is not a positive number; the text names the key.
          UnsupportedError: it is not of this encoder, or has a key that the encoder does not know.
        """
        values = read_json(path)
        kind = values.get("model_type")
        if kind not in PREFIXES:
            raise vishwamai.UnsupportedError(
                f"{path}: `model_type` is {kind!r}; the encoder computes {', '.join(map(repr, PREFIXES))}."
            )
        sizes = {field.name: values.get(field.name) for field in dataclasses.fields(cls) if field.name not in _DERIVED}
        for name, expected in _REQUIRED.items():
            if values.get(name, expected) != expected:
                raise vishwamai.UnsupportedError(
                    f"{path}: `{name}` is {values[name]!r}; the encoder computes {expected!r} only."
                )
        check_known(values, {*sizes, *_REQUIRED, *_IGNORED}, path)
        for name, value in sizes.items():
            integer = name != "layer_norm_eps"
            if isinstance(value, bool) or not isinstance(value, int if integer else int | float) or value <= 0:
                kind = "a positive whole number" if integer else "a positive number"
                raise vishwamai.ShapeError(f"{path}: `{name}` is {value!r}; expected {kind}.")
        first = 0
        if kind != "bert":
            padding = values.get("pad_token_id", 1)
            if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
                raise vishwamai.ShapeError(f"{path}: `pad_token_id` is {padding!r}; expected a token id.")
            first = padding + 1
        config = cls(**sizes, model_type=kind, first_position=first)  # pyright: ignore[reportArgumentType]  (checked above)
        if config.hidden_size % config.num_attention_heads:
            raise vishwamai.ShapeError(
                f"{path}: `hidden_size` is {config.hidden_size}; expected a multiple of `num_attention_heads`, "
                f"{config.num_attention_heads}."
            )
        if config.max_tokens < 1:
            raise vishwamai.ShapeError(
                f"{path}: `max_position_embeddings` is {config.max_position_embeddings}; a {kind} model with "
                f"`pad_token_id` = {first - 1} needs more than {first}."
            )
        return config

    def read(self, directory: Path, dtype: DTypeLike = jnp.float32) -> Parameters:
        """The parameters in a directory; see `from_hugging_face`."""
        return from_hugging_face(read_index(directory), self, dtype)

    def encode(
        self, parameters: Parameters, tokens: jax.Array, mask: jax.Array, types: jax.Array, operations: Operations
    ) -> jax.Array:
        """The states of tokens; see `encode`."""
        return encode(parameters, self, tokens, mask, operations, types)


class BertLayer(NamedTuple):
    """One block; query, key and value are one product."""

    qkv: Linear  # [hidden, 3 * hidden]
    output: Linear
    attention_norm: Norm
    up: Linear  # [hidden, intermediate]
    down: Linear
    output_norm: Norm


class Parameters(NamedTuple):
    words: jax.Array  # [vocabulary, hidden]
    positions: jax.Array  # [max positions, hidden]
    types: jax.Array  # [types, hidden]
    norm: Norm
    layers: tuple[BertLayer, ...]


class Operations(NamedTuple):
    """What the encoder is made of; `vishwamai`'s own unless another set is passed."""

    attention: Callable[
        ..., Any
    ]  # (query, key, value, mask) -> out, all [batch, heads, seq, head_dim], mask [batch, 1, 1, seq]
    linear: Callable[..., jax.Array]  # (x, weight, bias, activation) -> [rows, out]
    add_norm: Callable[..., jax.Array]  # (x, residual, scale, offset, eps) -> [rows, hidden]


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    return vishwamai.flash_attention(query, key, value, mask=mask)


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array, activation: str | None = None) -> jax.Array:
    return vishwamai.gemm(x, weight, bias=bias, activation=activation)


def _add_norm(x: jax.Array, residual: jax.Array, scale: jax.Array, offset: jax.Array, eps: float) -> jax.Array:
    return vishwamai.layer_norm(x, scale, offset, eps=eps, residual=residual)[0]


OURS = Operations(_attention, _linear, _add_norm)


def _plain_attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    swapped = (x.swapaxes(1, 2) for x in (query, key, value))
    return jax.nn.dot_product_attention(*swapped, mask=mask).swapaxes(1, 2)


def _plain_linear(x: jax.Array, weight: jax.Array, bias: jax.Array, activation: str | None = None) -> jax.Array:
    y = x @ weight + bias
    return jax.nn.gelu(y, approximate=False) if activation == "gelu" else y


def _plain_add_norm(x: jax.Array, residual: jax.Array, scale: jax.Array, offset: jax.Array, eps: float) -> jax.Array:
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
    types: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq hidden"]:
    """The last hidden state of every token.

    Args:
      tokens: `[batch, seq]`, ids in the vocabulary.
      mask: `[batch, seq]`, True for a token, False for padding, which nothing attends to.
      operations: functions for attention, products and norms.
      types: `[batch, seq]`, 1 for the tokens of a pair's second text; None: 0 for all.
    """
    batch, seq = tokens.shape
    rows = batch * seq
    positions = parameters.positions[config.first_position : config.first_position + seq]
    embedded = (parameters.words[tokens] + positions).reshape(rows, config.hidden_size)
    kinds = jnp.broadcast_to(parameters.types[0], embedded.shape)
    if types is not None:
        kinds = parameters.types[types].reshape(rows, config.hidden_size)
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


def from_hugging_face(tensors: Mapping[str, Stored], config: BertConfig, dtype: DTypeLike = jnp.float32) -> Parameters:
    """The tree of parameters from a checkpoint of `transformers.BertModel`, or of a model that has one as its `bert`
    (`roberta`).

    The pooler and the heads of other tasks are not read: no embedding needs them.

    Args:
      tensors: index of the checkpoint's tensors by name (`shards.read_index`); products are stored `[out, in]` there.
      dtype: dtype of the result.

    Raises:
      ShapeError: a tensor is missing, or has another shape than the configuration says; the text names it.
    """
    before = PREFIXES[config.model_type]
    inside = any(name.startswith(f"{before}embeddings.") for name in tensors)
    reader = TensorReader(tensors, before if inside else "", dtype)
    hidden, inner = config.hidden_size, config.intermediate_size

    def layer(i: int) -> BertLayer:
        prefix = f"encoder.layer.{i}"
        names = (f"{prefix}.attention.self.{name}" for name in ("query", "key", "value"))
        return BertLayer(
            qkv=reader.linear(hidden, hidden, *names),
            output=reader.linear(hidden, hidden, f"{prefix}.attention.output.dense"),
            attention_norm=reader.norm(f"{prefix}.attention.output.LayerNorm", hidden),
            up=reader.linear(hidden, inner, f"{prefix}.intermediate.dense"),
            down=reader.linear(inner, hidden, f"{prefix}.output.dense"),
            output_norm=reader.norm(f"{prefix}.output.LayerNorm", hidden),
        )

    rows = {"word": config.vocab_size, "position": config.max_position_embeddings}
    rows["token_type"] = config.type_vocab_size
    return Parameters(
        *(reader.table(f"embeddings.{name}_embeddings", count, hidden) for name, count in rows.items()),
        norm=reader.norm("embeddings.LayerNorm", hidden),
        layers=tuple(layer(i) for i in range(config.num_hidden_layers)),
    )
