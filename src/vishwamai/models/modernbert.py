"""ModernBERT: an encoder with rotations, layers that see a window, and gated networks.

Warner et al., "Smarter, Better, Faster, Longer" (2024): pre-norm blocks, the first without a norm before attention;
every third layer sees all tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.bert import Operations
from vishwamai.models.encoder_tensors import Linear, Norm, TensorReader, check_known
from vishwamai.models.shards import read_index
from vishwamai.models.values import check_value, read_json

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_SIZES = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "local_attention": 128,
}
_FLAGS = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
_KINDS = ("full_attention", "sliding_attention")
_IGNORED = frozenset(
    "_name_or_path architectures torch_dtype dtype transformers_version model_type pad_token_id bos_token_id "
    "eos_token_id cls_token_id sep_token_id mask_token_id unk_token_id attention_dropout embedding_dropout mlp_dropout "
    "classifier_dropout initializer_range initializer_cutoff_factor decoder_bias classifier_activation "
    "deterministic_flash_attn sparse_prediction sparse_pred_ignore_index tie_word_embeddings id2label label2id "
    "problem_type num_labels sentence_transformers reference_compile repad_logits_with_grad gradient_checkpointing "
    "layer_norm_eps position_embedding_type use_cache return_dict output_hidden_states output_attentions "
    "chunk_size_feed_forward is_encoder_decoder classifier_pooling sliding_window torchscript".split()
)
"""Keys of a `config.json` that do not change the encoder's numbers."""


class ModernBertLayer(NamedTuple):
    attention_norm: Norm | None
    qkv: Linear  # [hidden, 3 * hidden]
    output: Linear
    mlp_norm: Norm
    up: Linear  # [hidden, 2 * intermediate]: what is activated, then its gate
    down: Linear


class Parameters(NamedTuple):
    words: jax.Array  # [vocab, hidden]
    norm: Norm
    layers: tuple[ModernBertLayer, ...]
    final_norm: Norm


@dataclasses.dataclass(frozen=True)
class ModernBertConfig:
    """Sizes of the encoder, by the names of Hugging Face's `config.json`.

    Attributes:
      layer_types: "full_attention" or "sliding_attention" for each layer.
      thetas: base of the rotations by layer type.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    local_attention: int
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    classifier_bias: bool
    layer_types: tuple[str, ...]
    thetas: tuple[tuple[str, float], ...]
    model_type: str = "modernbert"

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text."""
        return self.max_position_embeddings

    @classmethod
    def from_file(cls, path: Path) -> ModernBertConfig:
        """Reads a Hugging Face `config.json`.

        Raises:
          ShapeError: a value has another type; the text names the key.
          UnsupportedError: a key or a value is not one that the encoder computes.
        """
        values = read_json(path)
        fields: dict[str, Any] = {}
        for key, default in {**_SIZES, "norm_eps": 1e-5, **dict.fromkeys(_FLAGS, False)}.items():
            fields[key] = default if values.get(key) is None else values[key]
            check_value(key, fields[key], type(default), str(path))
        if values.get("hidden_activation", "gelu") != "gelu":
            raise UnsupportedError(
                f"{path}: `hidden_activation` is {values['hidden_activation']!r}; the encoder computes 'gelu' only."
            )
        if fields["hidden_size"] % fields["num_attention_heads"]:
            raise ShapeError(
                f"{path}: `hidden_size` is {fields['hidden_size']}; expected a multiple of `num_attention_heads`, "
                f"{fields['num_attention_heads']}."
            )
        count = fields["num_hidden_layers"]
        period = values.get("global_attn_every_n_layers", 3)
        check_value("global_attn_every_n_layers", period, int, str(path))
        kinds = values.get("layer_types") or [_KINDS[bool(i % period)] for i in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or not {*kinds} <= {*_KINDS}:
            raise ShapeError(f"{path}: `layer_types` is {kinds!r:.100}; expected {count} of {', '.join(_KINDS)}.")
        read = {*fields, "hidden_activation", "global_attn_every_n_layers", "layer_types", "rope_parameters"}
        check_known(values, {*read, *_IGNORED, "global_rope_theta", "local_rope_theta"}, path)
        return cls(**fields, layer_types=tuple(kinds), thetas=_thetas(values, path))

    def read(self, directory: Path, dtype: DTypeLike = jnp.float32) -> Parameters:
        """The parameters in a directory with a `transformers.ModernBertModel`, or a model that has one.

        Raises:
          ShapeError: a tensor is missing, or has another shape than the configuration says; the text names it.
        """
        tensors = read_index(directory)
        prefix = "model." if any(name.startswith("model.embeddings.") for name in tensors) else ""
        reader = TensorReader(tensors, prefix, dtype)
        hidden, inner = self.hidden_size, self.intermediate_size

        def layer(i: int) -> ModernBertLayer:
            name = f"layers.{i}"
            return ModernBertLayer(
                reader.norm(f"{name}.attn_norm", hidden, self.norm_bias) if i else None,
                reader.linear(hidden, 3 * hidden, f"{name}.attn.Wqkv", bias=self.attention_bias),
                reader.linear(hidden, hidden, f"{name}.attn.Wo", bias=self.attention_bias),
                reader.norm(f"{name}.mlp_norm", hidden, self.norm_bias),
                reader.linear(hidden, 2 * inner, f"{name}.mlp.Wi", bias=self.mlp_bias),
                reader.linear(inner, hidden, f"{name}.mlp.Wo", bias=self.mlp_bias),
            )

        return Parameters(
            reader.table("embeddings.tok_embeddings", self.vocab_size, hidden),
            reader.norm("embeddings.norm", hidden, self.norm_bias),
            tuple(layer(i) for i in range(self.num_hidden_layers)),
            reader.norm("final_norm", hidden, self.norm_bias),
        )

    def encode(
        self, parameters: Parameters, tokens: jax.Array, mask: jax.Array, types: jax.Array, operations: Operations
    ) -> jax.Array:
        """The last hidden state of every token, `[batch, seq, hidden]`; `types` and `operations` have no effect."""
        batch, seq = tokens.shape
        heads, reach = self.num_attention_heads, self.local_attention // 2
        x = self._norm(parameters.words[tokens].reshape(batch * seq, -1), parameters.norm)
        for layer, kind in zip(parameters.layers, self.layer_types):
            inner = x if layer.attention_norm is None else self._norm(x, layer.attention_norm)
            qkv = layer.qkv(inner).reshape(batch, seq, 3, heads, -1)
            query, key, value = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))  # [batch, heads, seq, head_dim]
            query, key = vishwamai.apply_rope((query, key), theta=dict(self.thetas)[kind])
            window = (reach, reach) if kind == "sliding_attention" else None
            mixed = vishwamai.flash_attention(query, key, value, mask=mask[:, None, None, :], window=window)
            x = x + layer.output(mixed.swapaxes(1, 2).reshape(batch * seq, -1))
            wide, gate = jnp.split(layer.up(self._norm(x, layer.mlp_norm)), 2, axis=-1)
            x = x + layer.down(jax.nn.gelu(wide, approximate=False) * gate)
        return self._norm(x, parameters.final_norm).reshape(batch, seq, -1)

    def _norm(self, x: jax.Array, norm: Norm) -> jax.Array:
        return vishwamai.layer_norm(x, norm.scale, norm.offset, eps=self.norm_eps)


def _thetas(values: Mapping[str, Any], path: Path) -> tuple[tuple[str, float], ...]:
    """Bases of the rotations, in the form of transformers 4 or 5."""
    older = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
    rotations = values.get("rope_parameters") or {}
    thetas = {}
    for kind, (key, default) in older.items():
        rotation = rotations.get(kind) if isinstance(rotations, Mapping) else None
        rotation = {} if rotation is None else rotation
        if not isinstance(rotation, Mapping) or rotation.get("rope_type", "default") != "default":
            raise UnsupportedError(
                f"{path}: `rope_parameters` are {rotations!r:.100}; the encoder computes the type 'default' only."
            )
        theta = rotation.get("rope_theta") or values.get(key) or default
        check_value(key, theta, float, str(path))
        thetas[kind] = float(theta)
    return tuple(thetas.items())
