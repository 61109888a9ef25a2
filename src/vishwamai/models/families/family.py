"""What a family of decoders is, as data: the keys of its `config.json`, their defaults, and its tensors' names.

A `Family` says how a Hugging Face directory maps to `ModelConfig` and to the decoder's parameters. Reading and writing
both follow it, so nothing is stated twice. A key means what the family's class in transformers computes with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.feed_forward import FeedForward, Gated
from vishwamai.models.layers.mixer import Mixer
from vishwamai.models.layers.mixture import Mixture
from vishwamai.models.parameters import NextToken, Tensor

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

ATTENTION: Mapping[str, type[Mixer]] = {"full_attention": Attention, "sliding_attention": Attention}


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
      architecture: the class of transformers, as `config.json` names it.
      keys: a key of `config.json` for each field of `ModelConfig` ("experts.count": a field of a field).
      fields: fields of `ModelConfig` that the family fixes.
      defaults: values of keys that a file may leave out, as the family's class in transformers has them.
      sizes: the same of sizes, which a `text_config` within another file may leave out; a file of its own has them.
      choices: fields of another type than their key: the field, and its value for each value of the key.
      fixed: keys whose value must be one of these, for the decoder computes nothing else.
      ignored: keys without an effect, besides `IGNORED`.
      aliases: other names of keys.
      derive: `(values, source) -> values` of a file, where some keys follow from others; None where none does.
      constants: keys that every file gets when it is written.
      further: more keys of a file that is written, from the configuration; None where there are none.
      layer_types: "none", "all" (`sliding_window` holds for every layer), "list" (`layer_types` says which), or "types"
        (the same in a family without windows).
      types_key: the key of `layer_types` in files; None where files do not give them.
      layer_keys: further keys that say what the layers are: `use_sliding_window`, `mlp_only_layers` and the like.
      window_period: number of layers of which one attends to everything, where the file has no `layer_types`.
      theta: base of the rotations where the file gives none. theta_key: the key that gives it, besides
        `rope_parameters`.
      partial: share of a head's features that rotate where the file gives none; None: the family has no such key.
      local_theta: base of layers with a window where they have a rotation of their own; None where they share it.
      global_rope: layers without a window rotate; False: only in a model without windows; None: never.
      mixers: classes of the mixers, by layer type.
      norms: `ModelConfig.norms` of layers of a type, where it is not that of the model.
      feed_forward, mixture: feed-forward networks of layers without and with experts.
      feed_forwards: the same by layer type, where the type says which network a layer has.
      unread: starts of the names of tensors that the decoder leaves out, such as those of layers that draft.
      renamed: parts of the names of tensors that some files write otherwise, and what `tensors` has in their place.
      tensors: names that differ from the common ones, by parameter; None where the common one is absent.
      norm_tensors: names that differ from these with some of `ModelConfig.norms`.
      next_token: the head that predicts the token after the next one, where checkpoints have it; None: it is not
        computed.
    """

    architecture: str
    keys: Mapping[str, str]
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    choices: Mapping[str, tuple[str, Mapping[Any, Any]]] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    derive: Callable[[Mapping[str, object], str], Mapping[str, object]] | None = None
    constants: Mapping[str, object] = dataclasses.field(default_factory=dict)
    further: Callable[[ModelConfig], Mapping[str, object]] | None = None
    layer_types: str = "none"
    types_key: str | None = "layer_types"
    layer_keys: tuple[str, ...] = ()
    window_period: int | None = None
    theta: float = 10000.0
    theta_key: str = "rope_theta"
    partial: float | None = None
    local_theta: float | None = None
    global_rope: bool | None = True
    mixers: Mapping[str, type[Mixer]] = dataclasses.field(default_factory=lambda: ATTENTION)
    norms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    feed_forward: FeedForward = Gated()
    mixture: FeedForward = Mixture()
    feed_forwards: Mapping[str, FeedForward] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    norm_tensors: Mapping[str, Mapping[str, Tensor]] = dataclasses.field(default_factory=dict)
    next_token: NextToken | None = None

    def reads(self) -> frozenset[str]:
        """Keys that say what the layers are: windows, rotations, experts."""
        windows = {"none": (), "all": ("sliding_window",), "list": ("sliding_window", "layer_types")}
        windows = {**windows, "types": ("layer_types" if self.types_key is None else self.types_key,)}[self.layer_types]
        partial = () if self.partial is None else ("partial_rotary_factor",)
        return frozenset((*_ROTATION, self.theta_key, *windows, *partial, *self.layer_keys))


EXTRA_LAYER = NextToken(
    "model.layers.{layers}.",
    "",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
"""The head of DeepSeek V3 and GLM-4.5: a layer after the last one. DeepSeek-AI, "DeepSeek-V3 Technical Report"."""

_ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
_GENERATION = (
    *("bad_words_ids", "begin_suppress_tokens", "do_sample", "diversity_penalty", "early_stopping", "epsilon_cutoff"),
    *("encoder_no_repeat_ngram_size", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id"),
    *("forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "min_p"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "penalty_alpha"),
    *("remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature"),
    *("top_k", "top_p", "typical_p", "use_cache", "cache_implementation"),
)
IGNORED = frozenset(
    {
        *("_name_or_path", "name_or_path", "_model_name_or_path", "model_name", "_commit_hash", "architectures"),
        *("auto_map", "dtype", "torch_dtype", "model_type", "transformers_version", "transformers.js_config"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "experts_implementation"),
        *("unsloth_fixed", "unsloth_version", "torchscript", "tf_legacy_loss", "use_bfloat16", "base_model_tp_plan"),
        *("attention_dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout", "resid_pdrop", "residual_dropout"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "router_aux_loss_coef"),
        *("router_jitter_noise", "router_z_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "pruned_heads"),
        *("chunk_size_feed_forward", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type"),
        *("is_encoder_decoder", "tie_encoder_decoder", "task_specific_params", "tokenizer_class", "prefix"),
        *("cls_token_id", "decoder_start_token_id", "mask_token_id", "sep_token_id", "unk_token_id"),
        *("gradient_checkpointing", "model_max_length", "initial_context_length", "quantization_config"),
        *("num_nextn_predict_layers", "num_mtp_layers", "max_window_layers", "cross_attention_hidden_size"),
        *_GENERATION,
    }
)
"""Keys that change no logits of any family, and the ones that the readers of quantized tensors and of sampling take."""

IDLE: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("attention_bias", "lm_head_bias", "mlp_bias", "qkv_bias", "use_mrope"), (False,)),
    **dict.fromkeys(("use_sliding_window", "rope_interleaved", "add_cross_attention", "is_decoder"), (False,)),
    **dict.fromkeys(("sliding_window", "rope_local_base_freq", "clip_qkv", "head_dim", "quantization"), (None,)),
    **dict.fromkeys(("full_attn_mod", "interpolate_factor", "moe_layer_freq", "pretraining_tp"), (1,)),
    "is_llama_config": (True,),
    "partial_rotary_factor": (1.0,),
    "shared_expert_intermediate_size": (0, None),
}
"""Values, besides null, of keys by which a family without that key computes what it does anyway."""

COMMON: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "initializer_range",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "num_key_value_heads": "num_kv_heads",
}
WITHOUT_EPS = {key: field for key, field in COMMON.items() if field != "norm_eps"}
MOST_LAYERS = 10_000
"""More are declined with the other sizes, before anything is made of them."""
SILU = {"hidden_act": "activation"}
HEADS = {"head_dim": "head_dim"}
BIASES = {"attention_bias": "attention_bias"}
MULTIPLIERS = {
    "attention_multiplier": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier",
    "logits_scaling": "logit_divisor",
    "residual_multiplier": "residual_multiplier",
}
MULTIPLIER_DEFAULTS: Mapping[str, float] = dict.fromkeys(MULTIPLIERS, 1.0)
EXPERTS = {"num_experts_per_tok": "experts.top_k"}
INNER = {"moe_intermediate_size": "experts.inner_size"}
CORRECTED = {
    **EXPERTS,
    **INNER,
    "first_k_dense_replace": "dense_layers",
    "n_group": "experts.num_groups",
    "n_routed_experts": "experts.count",
    "n_shared_experts": "experts.shared",
    "norm_topk_prob": "experts.normalize",
    "routed_scaling_factor": "experts.scale",
    "topk_group": "experts.top_groups",
}
"""Routing by sigmoid and correction, in groups, with shared experts (DeepSeek V3)."""


def sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, positions: int) -> dict[str, int]:
    """Sizes of a family's class in transformers."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values = (vocab, hidden, inner, layers, heads, positions)
    return dict(zip((*names, "max_position_embeddings"), values, strict=True))


def tokens(bos: int | None, eos: object, pad: int | None = None) -> dict[str, object]:
    """Defaults of the special tokens."""
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
