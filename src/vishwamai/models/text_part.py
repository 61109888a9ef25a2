"""The text part of a model that also reads images: its keys within `config.json`, and its tensors among the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.families.family import MOST_LAYERS

Entry = TypeVar("Entry")

WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "step3p7": "step3p5",
}
"""The `model_type` of `text_config` where it has none, by the `model_type` around it."""

_QWEN2_VL = {"bos_token_id": 151643, "eos_token_id": 151645, "max_window_layers": 80, "num_key_value_heads": 8}
_QWEN2_VL |= {"rms_norm_eps": 1e-5}

RENAMED: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "bailing_moe_v2": ("bailing_moe", {"score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
    "kimi_k2": ("deepseek_v3", {}),
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_vl_text"), ("qwen2", _QWEN2_VL)),
    "qwen3_vl_text": ("qwen3", {"rope_theta": 500000.0}),
}
"""Families that are another one under a name of their own, with keys whose defaults differ."""

_FLAT = ("qwen2_5_vl", "qwen2_vl", "step3p7")
"""Those whose published files have the keys of the decoder next to these:"""
_AROUND = ("model_type", "text_config", "vision_config", "image_token_id", "video_token_id", "vision_token_id")
_AROUND += ("vision_start_token_id", "vision_end_token_id")

_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
_NEXT_TOKEN = "mtp."  # Qwen's head that predicts a further token
_TOWER = "visual."  # where a tower lies next to a decoder under its plain names (Qwen2-VL)
_BARE = {
    "embed_tokens.weight": "model.",
    "wte.weight": "transformer.",
    "word_embeddings.weight": "transformer.",
}
"""Where names lack it, their start, by the name of the embedding table."""
_PLACES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))


def text_values(values: Mapping[str, object], source: str) -> dict[str, object]:
    """The keys of the decoder: those of `text_config` where a file nests them there.

    Raises:
      ShapeError: `text_config` is not an object.
      UnsupportedError: the decoder does not compute the text part of such a model; the text names its `model_type`.
    """
    kind, inner = values.get("model_type"), values.get("text_config")
    flat = dict(values)
    if isinstance(kind, str) and kind in WRAPPERS:
        if inner is None and kind in _FLAT:
            inner = {key: value for key, value in values.items() if key not in _AROUND}
        if not isinstance(inner, Mapping):
            raise ShapeError(f"{source}: `text_config` is {inner!r}; expected an object with the keys of the decoder.")
        flat = {"model_type": WRAPPERS[kind], **inner}
        flat |= {key: values[key] for key in _SHARED if flat.get(key) is None and values.get(key) is not None}
        older = values.get("tie_embedding") if kind == "lfm2_vl" else None
        tied = values.get("tie_word_embeddings") if older is None else older
        if tied is not None:
            flat["tie_word_embeddings"] = tied
            flat.pop("tie_embedding", None)
        for key in ("rope_scaling", "rope_parameters"):
            flat[key] = _one_coordinate(flat.get(key))
    elif inner is not None:
        nested = inner.get("model_type") if isinstance(inner, Mapping) else None
        raise UnsupportedError(
            f"{source}: `model_type` is {kind!r} with a `text_config` of model_type {nested!r}; the decoder computes "
            f"the text part of {', '.join(WRAPPERS)} only."
        )
    name = flat.get("model_type")
    if name == "gemma4_text":
        flat = _gemma4(flat, source)
    renamed = RENAMED.get(name) if isinstance(name, str) else None
    return flat if renamed is None else {**renamed[1], **flat, "model_type": renamed[0]}


_GEMMA4_EMBEDDING = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
_GEMMA4_EXPERTS = ("moe_intermediate_size", "num_experts", "top_k_experts")


def _gemma4(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys of Gemma 4 with the sizes of its global layers under names of their own, as published files have them,
    and in the form that transformers computes: the last layer is global.

    Raises:
      UnsupportedError: layers of one type differ in size.
    """
    values = {**_GEMMA4_EMBEDDING, **values}
    if values["hidden_size_per_layer_input"] in (0, None):
        values = {key: value for key, value in values.items() if key not in _GEMMA4_EMBEDDING}
    if values.get("enable_moe_block") in (None, False):  # the sizes of experts then change nothing
        values = {key: value for key, value in values.items() if key not in _GEMMA4_EXPERTS}
    types, count = values.get("layer_types"), values.get("num_hidden_layers")
    if types is None and isinstance(count, int) and count <= MOST_LAYERS:
        types = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(count)]
    if isinstance(types, list) and types:
        values["layer_types"] = types = [*types[:-1], "full_attention"]
    heads, layers = values.get("num_key_value_heads", 4), values.pop("per_layer_config", None)
    if layers is None:
        if not values.get("attention_k_eq_v") or values.get("num_global_key_value_heads") is None:
            values["num_global_key_value_heads"] = heads
        return values
    full = {str(i) for i, kind in enumerate(types or ()) if kind == "full_attention"}
    sizes = next(iter(layers.values()), {}) if isinstance(layers, Mapping) else None
    if layers == {}:  # all layers have the sizes of the other keys
        full, sizes = set(), {}
    if (
        not isinstance(layers, Mapping)
        or not isinstance(sizes, Mapping)
        or {*layers} != full
        or any(entry != sizes for entry in layers.values())
    ):
        raise UnsupportedError(
            f"{source}: `per_layer_config` is {layers!r:.100}; the decoder computes one size for all layers that "
            "`layer_types` calls 'full_attention', and the sizes of the other keys for the others."
        )
    values["global_head_dim"] = sizes.get("head_dim", values.get("head_dim"))
    values["num_global_key_value_heads"] = sizes.get("num_key_value_heads", heads)
    return values


def _one_coordinate(rotation: Any) -> Any:
    """A rotation without its sections for images: a text's positions have three equal coordinates."""
    if not isinstance(rotation, Mapping) or "mrope_section" not in rotation:
        return rotation
    plain = {key: value for key, value in rotation.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}


def text_tensors(index: Mapping[str, Entry]) -> dict[str, Entry]:
    """The tensors of the text part under the names of a plain decoder; all of them where nothing is around it. Names
    without `model.`, as transformers' classes without a head write them, get it.

    >>> sorted(text_tensors({"language_model.model.norm.weight": 1, "vision_tower.conv.weight": 2}))
    ['model.norm.weight']
    """
    if not any(name.startswith(place) for name in index for place, _ in _PLACES):
        index = {name: entry for name, entry in index.items() if not name.startswith(_TOWER)}
        start = next((start for table, start in _BARE.items() if table in index), None)
        bare = start is not None and not any(name.startswith(start) for name in index)
        return {f"{start}{name}" if bare and name != "lm_head.weight" else name: entry for name, entry in index.items()}
    outside = ("lm_head.weight", _NEXT_TOKEN)
    renamed = {name: entry for name, entry in index.items() if name.startswith(outside)}
    for name, entry in index.items():
        for place, plain in _PLACES:
            if name.startswith(place):
                renamed[plain + name.removeprefix(place)] = entry
                break
    return renamed
