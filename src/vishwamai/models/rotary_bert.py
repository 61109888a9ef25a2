"""GTE, Nomic BERT and Jina Embeddings v3: BERT's post-norm blocks with rotations in place of learned positions; the
networks of the first two are gated, and the last one has adapters by task.

Zhang et al., "mGTE: Generalized Long-Context Text Representation and Reranking Models" (2024); Nussbaum et al., "Nomic
Embed: Training a Reproducible Long Context Text Embedder" (2024); Sturua et al., "jina-embeddings-v3: Multilingual
Embeddings With Task LoRA" (2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import vishwamai
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models.adapters import Thin
from vishwamai.models.bert import Operations
from vishwamai.models.encoder_tensors import Linear, Norm, TensorReader, check_known
from vishwamai.models.shards import read_index
from vishwamai.models.values import check_value, read_json

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_DEFAULTS: Mapping[str, Mapping[str, object]] = {
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
    "jina_embeddings_v3": {
        "vocab_size": 250002,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "layer_norm_eps": 1e-5,
    },
}
"""Values of keys that a file may leave out, by `model_type`, as the classes of transformers have them."""

_COMMON = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "layer_norm_eps": 1e-12}
_THETAS = {"gte": 160_000.0, "nomic_bert": 1000.0, "jina_embeddings_v3": 20_000.0}
_ACTIVATIONS = {"gelu": lambda x: jax.nn.gelu(x, approximate=False), "silu": jax.nn.silu}
_IGNORED = frozenset(
    "_name_or_path architectures torch_dtype dtype transformers_version model_type pad_token_id bos_token_id "
    "eos_token_id attention_probs_dropout_prob hidden_dropout_prob classifier_dropout initializer_range "
    "tie_word_embeddings id2label label2id problem_type num_labels sentence_transformers gradient_checkpointing "
    "return_dict output_hidden_states output_attentions chunk_size_feed_forward is_encoder_decoder torchscript "
    "use_cache".split()
)
"""Keys of a `config.json` that do not change the encoder's numbers."""


class Adapted(NamedTuple):
    """A product or a table with the matrices of an adapter: `x W + (x A) B`."""

    base: Any
    enter: jax.Array  # [in, rank]
    leave: jax.Array  # [rank, out]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.base(x) + vishwamai.gemm(vishwamai.gemm(x, self.enter), self.leave)


class RotaryBertLayer(NamedTuple):
    qkv: Linear  # [hidden, 3 * hidden]
    output: Linear
    attention_norm: Norm
    gate: Linear | None  # [hidden, intermediate], activated; None: `up` is
    up: Linear
    down: Linear
    output_norm: Norm


class Parameters(NamedTuple):
    words: jax.Array  # [vocab, hidden]
    types: jax.Array | None  # [types, hidden], or None
    norm: Norm
    layers: tuple[RotaryBertLayer, ...]


@dataclasses.dataclass(frozen=True)
class RotaryBertConfig:
    """Sizes of the encoder, by the names of Hugging Face's `config.json`.

    Attributes:
      model_type: a key of `_DEFAULTS`.
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
        for key, default in {**_COMMON, **_DEFAULTS[kind]}.items():
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

    def read(self, directory: Path, dtype: DTypeLike = jnp.float32) -> Parameters:
        """The parameters in a directory with the model, or one that has it.

        Raises:
          ShapeError: a tensor is missing, or has another shape than the configuration says; the text names it.
        """
        tensors = read_index(directory)
        prefixes = ("", "new.", "gte.", "nomic_bert.", "roberta.")
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

        def jina(i: int) -> RotaryBertLayer:
            name = f"encoder.layers.{i}"
            return RotaryBertLayer(
                reader.linear(hidden, 3 * hidden, f"{name}.mixer.Wqkv"),
                reader.linear(hidden, hidden, f"{name}.mixer.out_proj"),
                reader.norm(f"{name}.norm1", hidden),
                None,
                reader.linear(hidden, inner, f"{name}.mlp.fc1"),
                reader.linear(inner, hidden, f"{name}.mlp.fc2"),
                reader.norm(f"{name}.norm2", hidden),
            )

        layer = {"gte": gte, "nomic_bert": nomic, "jina_embeddings_v3": jina}[self.model_type]
        norm = "embeddings.LayerNorm" if self.model_type == "gte" else "emb_ln"
        kinds = self.type_vocab_size
        return Parameters(
            reader.table("embeddings.word_embeddings", self.vocab_size, hidden),
            reader.table("embeddings.token_type_embeddings", kinds, hidden) if kinds else None,
            reader.norm(norm, hidden),
            tuple(layer(i) for i in range(self.num_hidden_layers)),
        )

    def adapted(self, parameters: Parameters, matrices: Mapping[str, Thin], source: Path) -> Parameters:
        """The parameters with an adapter next to them.

        Args:
          parameters: arrays of the model.
          matrices: `[in, rank]` and `[rank, out]` by the names of the modules.
          source: the adapter's folder, for errors.

        Raises:
          UnsupportedError: the model has no adapters, or a module that is not one of its products and tables.
        """
        rest = {name.removeprefix("roberta."): pair for name, pair in matrices.items()}
        rest = {name: pair for name, pair in rest.items() if not name.startswith("pooler.")}  # which is not computed

        def extended(base: PyTree, names: Sequence[str]) -> PyTree:
            pairs = [rest.pop(name, None) for name in names]
            if not any(pairs):
                return base
            width = next(pair[1].shape[1] for pair in pairs if pair is not None)
            enter = np.concatenate([pair[0] for pair in pairs if pair is not None], axis=1)
            leave = [
                np.pad(p[1], ((0, 0), (i * width, (len(pairs) - 1 - i) * width))) for i, p in enumerate(pairs) if p
            ]
            arrays = (jnp.asarray(x, parameters.words.dtype) for x in (enter, np.concatenate(leave)))
            return Adapted(base, *arrays)

        if self.model_type != "jina_embeddings_v3":
            raise UnsupportedError(f"{source}: {self.model_type} has no adapters by task; Jina Embeddings v3 has.")
        layers = [
            layer._replace(
                **{field: extended(getattr(layer, field), names) for field, names in _jina_products(i).items()}
            )
            for i, layer in enumerate(parameters.layers)
        ]
        words = extended(parameters.words, ["embeddings.word_embeddings"])
        types = extended(parameters.types, ["embeddings.token_type_embeddings"])
        if rest:
            raise UnsupportedError(
                f"{source}: the adapter has matrices of `{min(rest)}`, which is not one of the model's products and "
                "tables."
            )
        return Parameters(words, types, parameters.norm, tuple(layers))

    def encode(
        self, parameters: Parameters, tokens: jax.Array, mask: jax.Array, types: jax.Array, operations: Operations
    ) -> jax.Array:
        """The last hidden state of every token, `[batch, seq, hidden]`; `operations` has no effect."""
        batch, seq = tokens.shape
        x = _rows(parameters.words, tokens)
        if parameters.types is not None:
            x = x + _rows(parameters.types, jnp.zeros_like(tokens) if types is None else types)
        x = self._norm(x.reshape(batch * seq, -1), parameters.norm)
        activate = _ACTIVATIONS[self.hidden_act]
        for layer in parameters.layers:
            qkv = layer.qkv(x).reshape(batch, seq, 3, self.num_attention_heads, -1)
            query, key, value = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))  # [batch, heads, seq, head_dim]
            query, key = vishwamai.apply_rope((query, key), theta=self.rope_theta)
            mixed = vishwamai.flash_attention(query, key, value, mask=mask[:, None, None, :])
            mixed = mixed.swapaxes(1, 2).reshape(batch * seq, -1)
            x = self._norm(x + layer.output(mixed), layer.attention_norm)
            wide = activate(layer.up(x)) if layer.gate is None else activate(layer.gate(x)) * layer.up(x)
            x = self._norm(x + layer.down(wide), layer.output_norm)
        return x.reshape(batch, seq, -1)

    def _norm(self, x: jax.Array, norm: Norm) -> jax.Array:
        return vishwamai.layer_norm(x, norm.scale, norm.offset, eps=self.layer_norm_eps)


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of a table, `[batch, seq, hidden]`."""
    if isinstance(table, Adapted):
        return table.base[tokens] + jnp.matmul(table.enter[tokens], table.leave, precision="highest")
    return table[tokens]


def _jina_products(layer: int) -> dict[str, tuple[str, ...]]:
    """Names of the modules in adapters, which are transformers' own, by fields of `RotaryBertLayer`."""
    name = f"layers.{layer}"
    return {
        "qkv": tuple(f"{name}.self_attn.{x}_proj" for x in "qkv"),
        "output": (f"{name}.self_attn.o_proj",),
        "up": (f"{name}.mlp.fc1",),
        "down": (f"{name}.mlp.fc2",),
    }


FAMILIES = tuple(_DEFAULTS)
"""Values of `model_type`."""
