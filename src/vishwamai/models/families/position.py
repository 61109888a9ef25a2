"""GPT-2 and its relatives: layer norms with biases, no gate, and positions that are learned, by ALiBi or rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vishwamai.core.errors import UnsupportedError
from vishwamai.models.families.family import COMMON, SILU, Family, tokens
from vishwamai.models.layers.feed_forward import Ungated
from vishwamai.models.parameters import PREFIX, Tensor

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

_FIELDS = {"layer_norm": True, "norm_bias": True, "mlp_bias": True}
_TOKENS = {key: key for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
_SHARED = {
    "vocab_size": "vocab_size",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    **_TOKENS,
}
_GPT = {
    **_SHARED,
    "activation_function": "activation",
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_layers",
    "n_positions": "max_positions",
}
_GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_GPT_DEFAULTS = {"layer_norm_epsilon": 1e-5, **tokens(50256, 50256)}
_GPT_IGNORED = (
    *("attn_pdrop", "embd_pdrop", "intermediate_size", "n_ctx", "num_key_value_heads", "reorder_and_upcast_attn"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size"),
    *("max_sequence_length", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input", "head_dim"),
)
_ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def _inner(values: Mapping[str, object], size: str, inner: str) -> dict[str, object]:
    """The values without a rotation, which these families do not read, and with an inner width of four times the
    model's where the file has none.
    """
    values = {key: value for key, value in values.items() if key not in _ROTATION}
    if values.get(inner) is None and isinstance(hidden := values.get(size), int):
        values[inner] = 4 * hidden
    return values


def _gpt(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    return _inner(values, "n_embd", "n_inner")


def _gptj(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    values = _inner(values, "n_embd", "n_inner")
    hidden, heads = values.get("n_embd"), values.get("n_head")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        values["head_dim"] = hidden // heads
        if "rotary_dim" in values and not values["rotary_dim"]:
            raise UnsupportedError(
                f"{source}: `rotary_dim` is {values['rotary_dim']!r}; the decoder computes gptj with a number of "
                "features of each head that turn."
            )
    return {"rotary_dim": 64, **values}


def _rotary_dim(config: ModelConfig) -> dict[str, object]:
    return {"rotary_dim": int(config.head_dim * config.layers[0].mixer.rope.partial)}


def _bloom(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    values = {key: value for key, value in values.items() if key != "n_inner"}
    return _inner(values, "hidden_size", "n_inner")


def _opt(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    values, width = dict(values), values.get("word_embed_proj_dim")
    if width is not None and width != values.get("hidden_size"):
        raise UnsupportedError(
            f"{source}: `word_embed_proj_dim` is {width!r}; the decoder computes opt with embeddings of `hidden_size` "
            f"= {values.get('hidden_size')!r} features only."
        )
    values.pop("word_embed_proj_dim", None)
    return {key: value for key, value in values.items() if key not in _ROTATION}


def _falcon(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The keys of Falcon with the heads of keys and the norms that its flags mean."""
    values = dict(values)
    if values.get("ffn_hidden_size") is None and isinstance(hidden := values.get("hidden_size"), int):
        values["ffn_hidden_size"] = 4 * hidden
    new, single, parallel = (values.get(key, flag) for key, flag in _FLAGS.items())
    norms, heads = values.get("num_ln_in_parallel_attn"), values.get("num_attention_heads")
    if not new and single:
        values["num_kv_heads"] = 1
    elif not new and values.get("num_kv_heads", heads) not in (None, heads):
        raise UnsupportedError(
            f"{source}: `num_kv_heads` is {values['num_kv_heads']!r}; without `new_decoder_architecture` and "
            f"`multi_query` the decoder computes falcon with `num_attention_heads` = {heads} only."
        )
    if new and not parallel:
        raise UnsupportedError(
            f"{source}: `parallel_attn` is {parallel!r}; with `new_decoder_architecture` the decoder computes "
            "True only."
        )
    if not new and norms not in (None, 1):
        raise UnsupportedError(
            f"{source}: `num_ln_in_parallel_attn` is {norms!r}; the decoder computes 1 without "
            "`new_decoder_architecture`."
        )
    if new and norms is None:
        norms = 2
    values["num_ln_in_parallel_attn"] = (norms if new else 1) if parallel else 0
    values["mlp_bias"] = values.get("bias", False)
    return values


_FLAGS = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}


def _falcon_flags(config: ModelConfig) -> dict[str, object]:
    """The flags of a model's Falcon, in the older form where it has one."""
    old = config.norms != "parallel" and config.num_kv_heads in (1, config.num_heads)
    return {
        "new_decoder_architecture": not old,
        "multi_query": config.num_kv_heads == 1,
        "parallel_attn": config.norms != "pre",
        "num_ln_in_parallel_attn": None if old else 2 if config.norms == "parallel" else 1,
    }


def _multi_query(config: ModelConfig) -> dict[str, object]:
    return {"multi_query": config.num_kv_heads == 1}


def _bigcode(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    values = {key: value for key, value in values.items() if key != "num_key_value_heads"}
    if values.get("multi_query", True):
        values["num_key_value_heads"] = 1
    return _gpt(values, source)


def _tensors(places: Mapping[str, tuple[str, str | None]], matrices: bool = True) -> dict[str, Tensor]:
    """The weight and the bias of each module.

    Args:
      places: the module, and the part of it, by parameter.
      matrices: weights of products are stored `[out, in]`.
    """
    return {
        f"{name}{suffix}": Tensor(
            f"{module}.{kind}", matrices and kind == "weight" and "norm" not in name and name != "positions", part
        )
        for name, (module, part) in places.items()
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    }


_H = "transformer.h.{layer}."
_PARTS = ("query", "key", "value")


def _gpt_places(attention: str, names: Mapping[str, str], parts: str | None = "") -> dict[str, tuple[str, str | None]]:
    """Modules of GPT-2's names."""
    qkv = {name: (f"{_H}attn.{attention}", f"{parts}{name}") for name in _PARTS}
    if parts is None:
        qkv = {name: (f"{_H}attn.{name[0]}_proj", None) for name in _PARTS}
    return {**qkv, **{name: (f"{_H}{module}", None) for name, module in names.items()}}


_GPT2_NAMES = {
    "output": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
}
_ENDS = {
    "embed": Tensor("transformer.wte.weight"),
    "positions": Tensor("transformer.wpe.weight"),
    "norm": Tensor("transformer.ln_f.weight"),
    "norm_bias": Tensor("transformer.ln_f.bias"),
}
_GPTJ_NAMES = {"output": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out", "attention_norm": "ln_1"}
_BLOOM_ATTENTION = {
    **{name: (f"{_H}self_attention.query_key_value", f"group_{name}") for name in _PARTS},
    "output": (f"{_H}self_attention.dense", None),
    "up": (f"{_H}mlp.dense_h_to_4h", None),
    "down": (f"{_H}mlp.dense_4h_to_h", None),
    "attention_norm": (f"{_H}input_layernorm", None),
    "mlp_norm": (f"{_H}post_attention_layernorm", None),
    "embed_norm": ("transformer.word_embeddings_layernorm", None),
}
_BLOOM_ENDS = {**_ENDS, "embed": Tensor("transformer.word_embeddings.weight")}
_OPT_LAYER = "model.decoder.layers.{layer}."

POSITION: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT,
        fields={**_FIELDS, "attention_bias": True, "learned_positions": True},
        defaults={**_GPT_DEFAULTS, "activation_function": "gelu_new", "tie_word_embeddings": True},
        fixed={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        ignored=_GPT_IGNORED,
        aliases=_GPT_ALIASES,
        derive=_gpt,
        global_rope=None,
        feed_forward=Ungated(),
        tensors={**_tensors(_gpt_places("c_attn", _GPT2_NAMES), matrices=False), **_ENDS},
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        {**_GPT, "num_key_value_heads": "num_kv_heads"},
        fields={**_FIELDS, "attention_bias": True, "learned_positions": True},
        defaults={**_GPT_DEFAULTS, "activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        fixed={"scale_attn_weights": (True,)},
        ignored=(*_GPT_IGNORED, "multi_query"),
        aliases=_GPT_ALIASES,
        derive=_bigcode,
        further=_multi_query,
        global_rope=None,
        feed_forward=Ungated(),
        tensors={**_tensors(_gpt_places("c_attn", _GPT2_NAMES, "group_")), **_ENDS},
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        _GPT,
        fields={**_FIELDS, "norms": "shared", "head_bias": True, "rope_interleaved": True},
        defaults={**_GPT_DEFAULTS, "activation_function": "gelu_new", "tie_word_embeddings": False},
        fixed={"scale_attn_weights": (True,)},
        ignored=_GPT_IGNORED,
        aliases=_GPT_ALIASES,
        derive=_gptj,
        further=_rotary_dim,
        layer_keys=("rotary_dim",),
        partial=1.0,
        feed_forward=Ungated(),
        tensors={**_tensors(_gpt_places("", _GPTJ_NAMES, None)), **_ENDS},
    ),
    "opt": Family(
        "OPTForCausalLM",
        {
            **{key: field for key, field in _SHARED.items() if key not in ("initializer_range", "layer_norm_epsilon")},
            "activation_function": "activation",
            "ffn_dim": "intermediate_size",
            "hidden_size": "hidden_size",
            "init_std": "initializer_range",
            "max_position_embeddings": "max_positions",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
        },
        fields={**_FIELDS, "attention_bias": True, "learned_positions": True, "position_offset": 2, "norm_eps": 1e-5},
        defaults={"activation_function": "relu", "tie_word_embeddings": True, **tokens(2, 2, 1)},
        fixed={
            "_remove_final_layer_norm": (False,),
            "do_layer_norm_before": (True,),
            "enable_bias": (True,),
            "layer_norm_elementwise_affine": (True,),
        },
        ignored=("dropout", "initializer_range", "intermediate_size", "layerdrop", "num_key_value_heads"),
        derive=_opt,
        global_rope=None,
        feed_forward=Ungated(),
        tensors={
            **_tensors(
                {
                    **{name: (f"{_OPT_LAYER}self_attn.{name[0]}_proj", None) for name in _PARTS},
                    "output": (f"{_OPT_LAYER}self_attn.out_proj", None),
                    "up": (f"{_OPT_LAYER}fc1", None),
                    "down": (f"{_OPT_LAYER}fc2", None),
                    "attention_norm": (f"{_OPT_LAYER}self_attn_layer_norm", None),
                    "mlp_norm": (f"{_OPT_LAYER}final_layer_norm", None),
                    "norm": ("model.decoder.final_layer_norm", None),
                }
            ),
            "embed": Tensor("model.decoder.embed_tokens.weight"),
            "positions": Tensor("model.decoder.embed_positions.weight"),
        },
    ),
    "bloom": Family(
        "BloomForCausalLM",
        {
            **_SHARED,
            "hidden_size": "hidden_size",
            "n_head": "num_heads",
            "n_inner": "intermediate_size",
            "n_layer": "num_layers",
            "seq_length": "max_positions",
        },
        fields={**_FIELDS, "attention_bias": True, "embedding_norm": True, "alibi": True, "activation": "gelu_tanh"},
        defaults={"layer_norm_epsilon": 1e-5, "seq_length": 2048, "tie_word_embeddings": True, **tokens(1, 2)},
        fixed={"apply_residual_connection_post_layernorm": (False,)},
        ignored=(
            *("attention_softmax_in_fp32", "bias_dropout_fusion", "intermediate_size", "masked_softmax_fusion"),
            *("num_key_value_heads", "pretraining_tp", "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv"),
        ),
        aliases={
            "max_position_embeddings": "seq_length",
            "n_embed": "hidden_size",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        derive=_bloom,
        global_rope=None,
        feed_forward=Ungated(),
        tensors={**_tensors(_BLOOM_ATTENTION), **_BLOOM_ENDS},
    ),
    "falcon": Family(
        "FalconForCausalLM",
        {
            **_SHARED,
            "activation": "activation",
            "bias": "attention_bias",
            "ffn_hidden_size": "intermediate_size",
            "hidden_size": "hidden_size",
            "max_position_embeddings": "max_positions",
            "mlp_bias": "mlp_bias",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "num_kv_heads": "num_kv_heads",
        },
        fields={"layer_norm": True, "norm_bias": True},
        choices={"num_ln_in_parallel_attn": ("norms", {0: "pre", 1: "shared", 2: "parallel"})},
        defaults={
            "activation": "gelu",
            "bias": False,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            **tokens(11, 11),
        },
        fixed={"alibi": (False, None)},
        ignored=(*_FLAGS, "intermediate_size", "num_key_value_heads", "head_dim", "ffn_hidden_dim"),
        aliases={"n_embed": "hidden_size"},
        derive=_falcon,
        further=_falcon_flags,
        feed_forward=Ungated(),
        tensors={**_tensors(_BLOOM_ATTENTION), **_BLOOM_ENDS},
        norm_tensors={
            "parallel": _tensors({"attention_norm": (f"{_H}ln_attn", None), "mlp_norm": (f"{_H}ln_mlp", None)})
        },
    ),
    "phi": Family(
        "PhiForCausalLM",
        {
            **{key: field for key, field in COMMON.items() if field != "norm_eps"},
            **SILU,
            "layer_norm_eps": "norm_eps",
        },
        fields={**_FIELDS, "norms": "shared", "attention_bias": True, "head_bias": True},
        defaults={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, **tokens(1, 2)},
        fixed={"qk_layernorm": (False,)},
        partial=0.5,
        feed_forward=Ungated(),
        tensors=_tensors(
            {
                "output": (PREFIX + "self_attn.dense", None),
                "up": (PREFIX + "mlp.fc1", None),
                "down": (PREFIX + "mlp.fc2", None),
                "norm": ("model.final_layernorm", None),
            }
        ),
    ),
}
