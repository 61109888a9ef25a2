"""`ModelConfig`: what a decoder computes, read from a Hugging Face `config.json` and written back."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.config_checks import check_counts, check_keys, family_of
from vishwamai.models.families import FAMILIES, Family
from vishwamai.models.gguf import model_directory
from vishwamai.models.layer_kinds import read_layers, write_layers
from vishwamai.models.layers.altup import AltUp
from vishwamai.models.layers.latent import Latent
from vishwamai.models.layers.layer import LayerKind
from vishwamai.models.layers.mixture import Experts
from vishwamai.models.parameters import LayerEmbedding, NextToken
from vishwamai.models.text_part import text_values
from vishwamai.models.tied import has_own_head
from vishwamai.models.values import check_value, read_json
from vishwamai.ops.rope import YarnScaling

_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
}
_LEAST = {
    "altup.active": 0,
    "dense_layers": 0,
    "experts.margin": 0,
    "experts.shared": 0,
    "hybrid.uses": 0,
    "initializer_range": 0,
    "linear_attention.least_step": 0,
    "norm_eps": 0,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), -1),
}
"""Fields whose numbers may be 0, or -1 for no token; the others are above 0."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      family: the `model_type` of Hugging Face, a key of `families.FAMILIES`.
      norms: place of the blocks' norms: "pre" (their input), "post" (their output) or "both"; with "parallel" both
        blocks read the stream, each with a norm of its own, and with "shared" after one norm; with "stream" the
        normalized input is the stream from there on (MiniMax).
      layer_norm: norms subtract the mean (`vishwamai.layer_norm`); False for `vishwamai.rms_norm`.
      norm_scale, norm_bias: norms of the stream have scales; layer norms have biases.
      norm_offset: scales of norms are stored minus one (Gemma).
      qk_norm: normalize queries and keys: "head" (each head), "heads" (each head, with a scale of its own), "rotated"
        (each head after the rotation), "turning" (the same without a scale, in layers that rotate), "all" (all heads as
        one vector), or None.
      attention_bias: the products that make queries, keys and values have biases.
      output_bias: attention's last product has one; None for the same as `attention_bias`.
      mlp_bias: the products of the feed-forward network have biases.
      mlp_multipliers: factors of a gated unit's gate and of its output (Falcon-H1).
      mlp_stream_scale, mlp_block_scale: factors, with norms "stream", of the stream and of the feed-forward network's
        output.
      query_scalar: attention's logits are divided by its root; None for that of `head_dim`.
      attention_softcap, final_logit_softcap: bounds of attention's logits and of the model's; None for none.
      scale_embeddings: embeddings are multiplied by the root of `hidden_size` (Gemma).
      embedding_multiplier, residual_multiplier: factors of embeddings, and of each block's output (Granite).
      attention_multiplier: factor of attention's logits; None for that of `query_scalar`.
      logit_divisor, logit_multiplier: the model's logits are divided by the one and multiplied by the other.
      residual_depth: each block's output is multiplied by it and divided by the root of the number of layers (MiniCPM).
      logit_base: the model's logits are divided by the share of `hidden_size` in it (MiniCPM).
      head_bias: the head has a bias.
      head_norm: the head's rows are divided by their lengths (Baichuan 2).
      learned_positions: a row of a learned table is added to each embedding by its position (GPT-2).
      position_offset: rows of that table before the one of position 0 (OPT).
      embedding_norm: embeddings are normalized (Bloom).
      alibi: attention's logits fall with the distance, by ALiBi's slopes (Bloom).
      rope_interleaved: rotations turn neighbouring features, not the two halves of a head.
      tie_embeddings: the head is the embedding table.
      initializer_range: standard deviation of random weights.
      layers: the kind of every layer.
      value_dim: features of a head's value; None for `head_dim`.
      key_scale, value_scale: factors of keys and values.
      attention_gate: attention's output is multiplied by the sigmoid of a product of the layer's input (AFMoE).
      head_gate: the same with one number for each head (Step 3.5).
      value_norm: values are normalized by head, without a scale (Gemma 4).
      layer_scale: the stream after each layer is multiplied by a number that is not trained (Gemma 4).
      output_gate: attention's output is multiplied by the sigmoid of a gate, which the product of queries makes too.
      sinks: each head has a logit that enters attention's denominator only.
      bidirectional: tokens see those behind them too; layers with a window see half of it on each side
        (EmbeddingGemma).
      experts: the mixture of experts, or None; the first `dense_layers` layers have none.
      latent: latent attention, or None.
      layer_embedding: per-layer embeddings, or None.
      altup: the streams that layers predict and correct, or None for one stream.
      next_token: form of a head that predicts the token after the next one (`next_token.head_config`); None of a model.

    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    ...     "max_position_embeddings": 512, "rope_theta": 500000.0})
    >>> config.head_dim, config.layers[0].mixer.rope.theta, config.to_dict()["architectures"]
    (16, 500000.0, ['LlamaForCausalLM'])
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    layers: tuple[LayerKind, ...]
    activation: str = "silu"
    norm_eps: float = 1e-6
    norms: str = "pre"
    layer_norm: bool = False
    norm_scale: bool = True
    norm_bias: bool = False
    norm_offset: bool = False
    qk_norm: str | None = None
    attention_bias: bool = False
    output_bias: bool | None = None
    mlp_bias: bool = False
    mlp_multipliers: tuple[float, ...] = (1.0, 1.0)
    mlp_stream_scale: float = 1.0
    mlp_block_scale: float = 1.0
    query_scalar: float | None = None
    attention_softcap: float | None = None
    final_logit_softcap: float | None = None
    scale_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logit_divisor: float = 1.0
    logit_multiplier: float = 1.0
    residual_depth: float | None = None
    logit_base: int | None = None
    head_bias: bool = False
    head_norm: bool = False
    learned_positions: bool = False
    position_offset: int = 0
    embedding_norm: bool = False
    alibi: bool = False
    value_dim: int | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    attention_gate: bool = False
    head_gate: bool = False
    rope_interleaved: bool = False
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    value_norm: bool = False
    layer_scale: bool = False
    output_gate: bool = False
    sinks: bool = False
    bidirectional: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    layer_embedding: LayerEmbedding | None = None
    altup: AltUp | None = None
    dense_layers: int = 0
    next_token: NextToken | None = None

    def __post_init__(self) -> None:
        if self.latent is not None and self.num_kv_heads != self.num_heads:
            raise ShapeError(
                f"ModelConfig: `num_key_value_heads` is {self.num_kv_heads}; latent attention has keys for each of "
                f"`num_attention_heads` = {self.num_heads}. Leave it out."
            )
        if self.altup is not None and self.altup.active >= self.altup.count:
            raise ShapeError(
                f"ModelConfig: `altup_active_idx` is {self.altup.active}; expected one of `altup_num_inputs` = "
                f"{self.altup.count} streams, counted from 0."
            )
        if self.latent is not None and self.latent.index_keys and self.latent.index_dim < self.latent.rope_dim:
            raise ShapeError(
                f"ModelConfig: `index_head_dim` is {self.latent.index_dim}, but the indexer rotates `qk_rope_head_dim` "
                f"= {self.latent.rope_dim} features of it; expected at least as many."
            )
        if len(self.layers) != self.num_layers:
            raise ShapeError(
                f"ModelConfig: `layers` has {len(self.layers)} kinds, but num_layers is {self.num_layers}; give one "
                "kind for each layer."
            )
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"ModelConfig: num_heads is {self.num_heads}, which is not a multiple of num_kv_heads = "
                f"{self.num_kv_heads}; each head of keys serves a whole number of heads of queries."
            )

    @property
    def attention_scale(self) -> float:
        """Factor of attention's logits."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        if self.latent is None:
            return float(self.query_scalar or self.head_dim) ** -0.5
        scale = float(self.latent.nope_dim + self.latent.rope_dim) ** -0.5
        scaling = self.layers[0].mixer.rope.scaling
        if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim and scaling.factor > 1:
            scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
        return scale

    @property
    def block_multiplier(self) -> float:
        """Factor of each block's output."""
        if self.residual_depth is None:
            return self.residual_multiplier
        return self.residual_multiplier * self.residual_depth / math.sqrt(self.num_layers)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """The configuration that a `config.json` describes.

        Args:
          values: its keys and values, in the form of transformers 4 or 5.
          source: the file's name, for errors.

        Raises:
          UnsupportedError: the family, a key or a value is not one that the decoder computes; the text names it.
          ShapeError: a key is missing, its value has another type, or values contradict one another.
        """
        nested = "text_config" in values
        values = text_values(values, source)
        family = family_of(values, source)
        values = {**(family.sizes if nested else {}), **values}
        for alias, key in family.aliases.items():
            if alias in values and values.get(key, values[alias]) != values[alias]:
                raise UnsupportedError(
                    f"{source}: `{alias}` is {values[alias]!r}, but `{key}` is {values[key]!r}; the two are names of "
                    "one value. Remove one."
                )
        values = {family.aliases.get(key, key): value for key, value in values.items()}
        values = values if family.derive is None else dict(family.derive(values, source))
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        check_keys(family, values, required, source)
        values = {**family.defaults, **values}
        fields: dict[str, Any] = dict(family.fields)
        for key, field in family.keys.items():
            if key in values and (value := _read(family, key, field, values[key], source)) is not None:
                fields[field] = value
        for key, (field, meanings) in family.choices.items():
            if key in values:
                fields[field] = meanings[values[key]]
        check_counts(family, fields, source)
        fields, sizes = _nested(family, fields, source)
        fields["num_kv_heads"] = fields.get("num_kv_heads") or fields.get("num_heads")
        if fields.get("latent"):
            fields["head_dim"] = fields["latent"].rope_dim
        elif not fields.get("head_dim") and fields.get("num_heads"):
            hidden, heads = fields.get("hidden_size", 0), fields["num_heads"]
            if hidden % heads:
                names = {field: key for key, field in family.keys.items()}
                raise ShapeError(
                    f"{source}: `{names['hidden_size']}` is {hidden}, which is not a multiple of "
                    f"`{names['num_heads']}` = {heads}; expected a multiple"
                    f"{', or `head_dim`' if 'head_dim' in family.keys else ''}."
                )
            fields["head_dim"] = hidden // heads
        for name in required:
            if name not in ("family", "layers") and fields.get(name) is None:
                key = next((key for key, field in family.keys.items() if field == name), name)
                raise ShapeError(f"{source}: `{key}` is missing; a {values['model_type']} model needs it.")
        count = fields["num_layers"]
        dense = fields.get("dense_layers", 0) if fields.get("experts") else count
        fields["layers"] = read_layers(family, values, sizes, count, dense, source)
        if family.feed_forwards and not any(kind.experts for kind in fields["layers"]):
            fields["experts"] = None
        return cls(family=values["model_type"], **fields)

    def to_dict(self) -> dict[str, object]:
        """The `config.json` that transformers loads this model with."""
        family = FAMILIES[self.family]
        values: dict[str, object] = {
            "architectures": [family.architecture],
            "model_type": self.family,
            **family.constants,
        }
        names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
        for key, field in family.keys.items():
            outer, _, inner = field.partition(".")
            section = self._section(outer) if inner else self
            if section is None:
                continue
            value = getattr(section, inner or outer)
            values[key] = list(value) if isinstance(value, tuple) else value
            if field == "activation":  # by the family's own name of it, whose rounding may be another
                name = str(family.defaults.get(key))
                values[key] = name if _ACTIVATIONS.get(name) == value else names[str(value)]
        for key, (field, meanings) in family.choices.items():
            outer, _, inner = field.partition(".")
            value = getattr(self._section(outer) if inner else self, inner or outer)
            values[key] = next(choice for choice, meaning in meanings.items() if meaning == value)
        further = {} if family.further is None else family.further(self)
        return {**values, **write_layers(self.layers, family), **further}

    def _section(self, name: str) -> Any:
        """The field of that name, or the first mixer of that layer type; None where the model has no such layer."""
        if name in _SECTIONS:
            return getattr(self, name)
        mixers = [kind.mixer for kind in self.layers]
        return next((mixer for mixer in mixers if name in (mixer.layer_type, mixer.sizes_of)), None)


@checked
def read_config(directory: str | Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face directory.

    Raises:
      ShapeError: `config.json` is missing, is not JSON, or lacks a key.
      UnsupportedError: it describes what the decoder does not compute.
    """
    path = model_directory(Path(directory)) / "config.json"
    config = ModelConfig.from_dict(read_json(path), str(path))
    if config.tie_embeddings and has_own_head(path.parent, config.family):
        return dataclasses.replace(config, tie_embeddings=False)
    return config


_SECTIONS: Mapping[str, type] = {
    "altup": AltUp,
    "experts": Experts,
    "latent": Latent,
    "layer_embedding": LayerEmbedding,
}
"""Fields of `ModelConfig` that have fields of their own."""


@functools.cache
def _kinds(owner: type) -> dict[str, tuple[type, bool]]:
    """The type of each field of a class that a file gives, and whether it may be a list of them."""
    kinds = {}
    names = {field.name for field in dataclasses.fields(owner)}
    for name, hint in typing.get_type_hints(owner).items():
        if name in names:
            members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            lists = [typing.get_args(member)[0] for member in members if typing.get_origin(member) is tuple]
            kinds[name] = lists[0] if len(members) == len(lists) else members[0], bool(lists)
    return kinds


def _kind(family: Family, field: str) -> tuple[type, bool]:
    """The same of one field: of `ModelConfig`, of "experts.count" and the like, or of "LAYER_TYPE.FIELD"."""
    outer, _, inner = field.partition(".")
    if not inner:
        return _kinds(ModelConfig)[outer]
    return _kinds(_SECTIONS[outer] if outer in _SECTIONS else family.mixers[outer])[inner]


def _read(family: Family, key: str, field: str, value: Any, source: str) -> Any:
    """The value of a field; None where the file has null, as if it had no such key."""
    if field == "activation":
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise UnsupportedError(f"{source}: `{key}` is {value!r}; the decoder has {', '.join(_ACTIVATIONS)}.")
        return _ACTIVATIONS[value]
    kind, many = _kind(family, field)
    if value is None and kind is not bool:
        return None
    for number in value if many and isinstance(value, list) else [value]:
        check_value(key, number, kind, source, _LEAST.get(field))
    return tuple(value) if isinstance(value, list) else value


def _nested(
    family: Family, fields: dict[str, object], source: str
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Fields with the parts of "experts.count" and the like put together, and the fields of mixers by layer type."""
    flat = {name: value for name, value in fields.items() if "." not in name}
    sizes: dict[str, dict[str, object]] = {}
    for outer, kind in {**_SECTIONS, **family.mixers}.items():
        inner = {name.split(".")[1]: v for name, v in fields.items() if name.startswith(f"{outer}.") and v is not None}
        if not inner:
            continue
        absent = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in inner]
        if absent:
            key = next((key for key, field in family.keys.items() if field == f"{outer}.{absent[0]}"), absent[0])
            raise ShapeError(f"{source}: `{key}` is missing; a model with {outer} needs it.")
        if outer in _SECTIONS:
            flat[outer] = kind(**inner)
        else:
            sizes[outer] = inner
    return flat, sizes
