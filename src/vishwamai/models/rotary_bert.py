"""GTE and Nomic BERT: BERT's post-norm blocks with rotations in place of learned positions, and gated networks.

Zhang et al., "mGTE: Generalized Long-Context Text Representation and Reranking Models" (2024); Nussbaum et al., "Nomic
Embed: Training a Reproducible Long Context Text Embedder" (2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.bert import Operations
from vishwamai.models.encoder_tensors import Linear, Norm, TensorReader, check_known
from vishwamai.models.shards import read_index
from vishwamai.models.values import check_value, read_json

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gte": {
        "vocab_size": 250048,
        "intermediate_size": 3072,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
    },
    "nomic_bert": {
        "vocab_size": 30528,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
        "type_vocab_size": 2,
        "hidden_act": "silu",
    },
}
"""Values of keys that a file may leave out, by `model_type`, as the classes of transformers have them."""

_COMMON = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_THETAS = {"gte": 160_000.0, "nomic_bert": 1000.0}
_ACTIVATIONS = {"gelu": lambda x: jax.nn.gelu(x, approximate=False), "silu": jax.nn.silu}
_IGNORED = frozenset(
    "_name_or_path architectures torch_dtype dtype transformers_version model_type pad_token_id bos_token_id "
    "eos_token_id attention_probs_dropout_prob hidden_dropout_prob classifier_dropout initializer_range "
    "tie_word_embeddings id2label label2id problem_type num_labels sentence_transformers gradient_checkpointing "
    "return_dict output_hidden_states output_attentions chunk_size_feed_forward is_encoder_decoder torchscript".split()
)
"""Keys of a `config.json` that do not change the encoder's numbers."""


class RotaryBertLayer(NamedTuple):
    qkv: Linear  # [hidden, 3 * hidden]
    output: Linear
    attention_norm: Norm
    gate: Linear  # [hidden, intermediate], activated
    up: Linear
    down: Linear
    output_norm: Norm


class Parameters(NamedTuple):
    words: Any  # [vocab, hidden]
    types: Any  # [types, hidden], or None
    norm: Norm
    layers: tuple[RotaryBertLayer, ...]


@dataclasses.dataclass(frozen=True)
class RotaryBertConfig:
    """Sizes of the encoder, by the names of Hugging Face's `config.json`.

    Attributes:
      model_type: "gte" or "nomic_bert".
      rope_theta: base of the rotations.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    hidden_act: str
    rope_theta: float

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text."""
        return self.max_position_embeddings

    @classmethod
    def from_file(cls, path: Path) -> RotaryBertConfig:
        """Reads a Hugging Face `config.json`.

        Raises:
          ShapeError: a value has another type; the text names the key.
          UnsupportedError: a key or a value is not one that the encoder computes.
        """
        values = read_json(path)
        kind = str(values.get("model_type"))
        fields: dict[str, Any] = {}
        for key, default in {**_COMMON, **_DEFAULTS[kind], "layer_norm_eps": 1e-12}.items():
            fields[key] = default if values.get(key) is None else values[key]
            if key != "type_vocab_size" or fields[key] != 0:  # GTE's English models have no types
                check_value(key, fields[key], type(default), str(path))
        if fields["hidden_act"] not in _ACTIVATIONS:
            raise UnsupportedError(
                f"{path}: `hidden_act` is {fields['hidden_act']!r}; the encoder computes {', '.join(_ACTIVATIONS)}."
            )
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        if hidden % heads or hidden // heads % 2 or values.get("head_dim") not in (None, hidden // heads):
            raise ShapeError(
                f"{path}: `hidden_size` is {hidden} with {heads} heads of {values.get('head_dim', 'equal size')}; "
                "expected heads of an even size that make up the hidden size."
            )
        check_known(values, {*fields, "rope_parameters", "rope_theta", "head_dim", *_IGNORED}, path)
        rotation = values.get("rope_parameters") or {}
        if not isinstance(rotation, Mapping) or rotation.get("rope_type", "default") != "default":
            raise UnsupportedError(
                f"{path}: `rope_parameters` are {rotation!r:.100}; the encoder computes the type 'default' only."
            )
        theta = rotation.get("rope_theta") or values.get("rope_theta") or _THETAS[kind]
        check_value("rope_theta", theta, float, str(path))
        return cls(kind, **fields, rope_theta=float(theta))

    def read(self, directory: Path, dtype: Any = jnp.float32) -> Parameters:
        """The parameters in a directory with the model, or one that has it.

        Raises:
          ShapeError: a tensor is missing, or has another shape than the configuration says; the text names it.
        """
        tensors = read_index(directory)
        prefixes = ("", "new.", "gte.", "nomic_bert.")
        table = "embeddings.word_embeddings.weight"
        prefix = next((start for start in prefixes if start + table in tensors), "")
        reader = TensorReader(tensors, prefix, dtype)
        hidden, inner = self.hidden_size, self.intermediate_size

        def gte(i: int) -> RotaryBertLayer:
            name = f"encoder.layer.{i}"
            fused = reader.linear(hidden, 2 * inner, f"{name}.mlp.up_gate_proj", bias=False).weight
            return RotaryBertLayer(
                reader.linear(hidden, 3 * hidden, f"{name}.attention.qkv_proj"),
                reader.linear(hidden, hidden, f"{name}.attention.o_proj"),
                reader.norm(f"{name}.attn_ln", hidden),
                Linear(fused[:, inner:], None),
                Linear(fused[:, :inner], None),
                reader.linear(inner, hidden, f"{name}.mlp.down_proj"),
                reader.norm(f"{name}.mlp_ln", hidden),
            )

        def nomic(i: int) -> RotaryBertLayer:
            name = f"encoder.layers.{i}"
            return RotaryBertLayer(
                reader.linear(hidden, 3 * hidden, f"{name}.attn.Wqkv", bias=False),
                reader.linear(hidden, hidden, f"{name}.attn.out_proj", bias=False),
                reader.norm(f"{name}.norm1", hidden),
                reader.linear(hidden, inner, f"{name}.mlp.fc12", bias=False),
                reader.linear(hidden, inner, f"{name}.mlp.fc11", bias=False),
                reader.linear(inner, hidden, f"{name}.mlp.fc2", bias=False),
                reader.norm(f"{name}.norm2", hidden),
            )

        layer, norm = (gte, "embeddings.LayerNorm") if self.model_type == "gte" else (nomic, "emb_ln")
        kinds = self.type_vocab_size
        return Parameters(
            reader.table("embeddings.word_embeddings", self.vocab_size, hidden),
            reader.table("embeddings.token_type_embeddings", kinds, hidden) if kinds else None,
            reader.norm(norm, hidden),
            tuple(layer(i) for i in range(self.num_hidden_layers)),
        )

    def encode(self, parameters: Parameters, tokens: Any, mask: Any, types: Any, operations: Operations) -> Any:
        """The last hidden state of every token, `[batch, seq, hidden]`; `operations` has no effect."""
        batch, seq = tokens.shape
        x = parameters.words[tokens]
        if parameters.types is not None:
            x = x + (parameters.types[0] if types is None else parameters.types[types])
        x = self._norm(x.reshape(batch * seq, -1), parameters.norm)
        activate = _ACTIVATIONS[self.hidden_act]
        for layer in parameters.layers:
            qkv = layer.qkv(x).reshape(batch, seq, 3, self.num_attention_heads, -1)
            query, key, value = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))  # [batch, heads, seq, head_dim]
            query, key = vishwamai.apply_rope((query, key), theta=self.rope_theta)
            mixed = vishwamai.flash_attention(query, key, value, mask=mask[:, None, None, :])
            mixed = mixed.swapaxes(1, 2).reshape(batch * seq, -1)
            x = self._norm(x + layer.output(mixed), layer.attention_norm)
            wide = activate(layer.gate(x)) * layer.up(x)
            x = self._norm(x + layer.down(wide), layer.output_norm)
        return x.reshape(batch, seq, -1)

    def _norm(self, x: Any, norm: Norm) -> Any:
        return vishwamai.layer_norm(x, norm.scale, norm.offset, eps=self.layer_norm_eps)


FAMILIES = tuple(_DEFAULTS)
"""Values of `model_type`."""
