"""The kinds of a decoder's layers, read from a Hugging Face `config.json` and written back: windows and rotations, in
the forms of transformers 4 and 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.families import Family
from vishwamai.models.families.gemma import LAYER_WIDTHS
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.feed_forward import Gated
from vishwamai.models.layers.layer import LayerKind
from vishwamai.models.rope_settings import read_ropes, rope_to_dict, unrotated
from vishwamai.models.values import check_value

_OLDER = {"attention": "full_attention", "mamba": "linear_attention"}
"""Types of layers by their names in files of transformers 4."""

_KINDS: Mapping[str, tuple[type, float | None]] = {
    "attention_chunk_size": (int, None),
    "attn_scale": (float, 0),
    "attn_temperature_tuning": (bool, None),
    "enable_moe_block": (bool, None),
    "floor_scale": (int, None),
    "interleave_moe_layer_step": (int, None),
    "decoder_sparse_step": (int, None),
    "full_attention_interval": (int, None),
    "indexer_types": (list, None),
    "layer_types": (list, None),
    "layers_block_type": (list, None),
    "no_rope_layer_interval": (int, None),
    "num_kv_shared_layers": (int, 0),
    "rotary_dim": (int, None),
    "max_window_layers": (int, 0),
    "moe_layer_end_index": (int, -1),
    "moe_layer_interval": (int, None),
    "original_max_position_embeddings": (int, None),
    "partial_rotary_factor": (float, None),
    "position_embedding_type": (str, None),
    "rope_local_base_freq": (float, None),
    "rope_parameters": (dict, None),
    "rope_scaling": (dict, None),
    "rope_theta": (float, None),
    "rotary_emb_base": (float, None),
    "sliding_window": (int, None),
    "sliding_window_pattern": (int, None),
    "use_double_wide_mlp": (bool, None),
    "use_mem_rope": (bool, None),
    "use_sliding_window": (bool, None),
}
"""The type of each key that is read here, and the smallest number, as of `check_value`."""


def read_layers(
    family: Family,
    values: Mapping[str, Any],
    sizes: Mapping[str, Mapping[str, Any]],
    count: int,
    dense: int,
    source: str,
) -> tuple[LayerKind, ...]:
    """The kind of every layer, as the values of a `config.json` say it, in either form.

    Args:
      family: the model's family.
      values: keys and values of the file.
      sizes: fields of the mixers, by layer type.
      count: number of layers.
      dense: number of layers at the start without experts.
      source: the file's name, for errors.

    Raises:
      ShapeError: the number of types is not that of the layers, or a value has another type than its key.
      UnsupportedError: a rotation or a type of layer is not one that the decoder computes.
    """
    reads = family.reads()
    types_key = family.types_key or "layer_types"
    types = values.get(types_key) if types_key in reads else None
    unused = {"sliding_window"} if "use_sliding_window" in reads and not values.get("use_sliding_window") else set()
    unused |= {"full_attention_interval", "sliding_window_pattern"} if types is not None else set()
    for key, (kind, least) in _KINDS.items():
        if values.get(key) is not None and key not in unused:
            check_value(key, values[key], kind, source, least)
    ropes = read_ropes(family, values, source)
    window = values.get("sliding_window") if "sliding_window" in reads - unused else None
    windows = {"sliding_attention": window, "chunked_attention": values.get("attention_chunk_size")}
    rotated = _rotated(family, values, count, source)
    if types is None and "attention_chunk_size" in reads:
        blocks = windows["chunked_attention"] is not None
        types = ["chunked_attention" if turns and blocks else "full_attention" for turns in rotated]
    if "attn_layer_period" in reads:
        attends = _periodic(values, "attn_layer", count, source)
        types = ["full_attention" if flag else "linear_attention" for flag in attends]
    if types is None:
        period = values.get("sliding_window_pattern") if "sliding_window_pattern" in reads else None
        period = period or family.window_period
        first = (values.get("max_window_layers") or 0) if "max_window_layers" in reads else 0
        slides = [window is not None and i >= first and (period is None or (i + 1) % period != 0) for i in range(count)]
        if "no_rope_layers" in reads:
            slides = [window is not None and not flag for flag in rotated]
        types = ["sliding_attention" if value else "full_attention" for value in slides]
        if "full_attention_interval" in reads:
            interval = values.get("full_attention_interval") or 4
            types = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
        if "attn_layer_indices" in reads:
            chosen = values.get("attn_layer_indices") or []
            if not isinstance(chosen, list) or not all(isinstance(i, int) for i in chosen):
                raise ShapeError(f"{source}: `attn_layer_indices` is {chosen!r}; expected a list of numbers of layers.")
            types = ["full_attention" if i in chosen else "linear_attention" for i in range(count)]
    types = [_OLDER.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    if len(types) != count:
        raise ShapeError(f"{source}: `{types_key}` has {len(types)} entries; expected num_hidden_layers = {count}.")
    for kind in types:
        if kind not in family.mixers:
            names = ", ".join(family.mixers)
            raise UnsupportedError(f"{source}: `{types_key}` has {kind!r}; the decoder has {names}.")
        if kind in windows and windows[kind] is None:
            size = "sliding_window" if kind == "sliding_attention" else "attention_chunk_size"
            raise UnsupportedError(
                f"{source}: `layer_types` has {kind!r}, but `{size}` is null or not in use; give the window's size, or "
                "make all types 'full_attention'."
            )
    kinds = []
    mixtures = _mixtures(family, values, count, dense, source)
    for layer, (kind, turns, sparse) in enumerate(zip(types, rotated, mixtures)):
        slides = kind == "sliding_attention"
        rope = ropes.get(kind, ropes["full_attention"])
        if not turns or not (family.global_rope or slides or (family.global_rope is False and window is None)):
            rope = unrotated(values, reads, rope.theta)
        further = sizes.get(family.mixers[kind].sizes_of or kind, {})
        mixer = family.mixers[kind].read({**further, **sizes.get(kind, {})}, windows.get(kind), rope)
        mixer = mixer.placed(layer, count)
        network = family.mixture if sparse else family.feed_forward
        kinds.append(LayerKind(mixer, family.feed_forwards.get(kind, network), family.norms.get(kind)))
    if "activation_sparsity_pattern" in reads:
        kinds = _sparse(kinds, values, source)
    shared = (values.get("num_kv_shared_layers") or 0) if "num_kv_shared_layers" in reads else 0
    return tuple(_sharing(kinds, shared, values, source) if shared else kinds)


def _sparse(kinds: list[LayerKind], values: Mapping[str, Any], source: str) -> list[LayerKind]:
    """The layers with the widths and sparsities that Gemma 3n gives for each of them."""
    count = len(kinds)
    shares = values.get("activation_sparsity_pattern")
    if shares is None:
        shares = [0.95 if i < 10 < count else 0.0 for i in range(count)]
    numbers = isinstance(shares, list) and all(type(share) in (int, float) and 0 <= share < 1 for share in shares)
    if not numbers or len(shares) != count:
        raise ShapeError(
            f"{source}: `activation_sparsity_pattern` is {shares!r:.100}; expected a number from 0 to below 1 for each "
            f"of the {count} layers."
        )
    widths = values.get(LAYER_WIDTHS) or [None] * count
    return [
        dataclasses.replace(kind, feed_forward=Gated(width, float(share)))
        for kind, width, share in zip(kinds, widths, shares, strict=True)
    ]


def _sharing(kinds: list[LayerKind], count: int, values: Mapping[str, Any], source: str) -> list[LayerKind]:
    """The layers where the last `count` ones read keys and values of the last layer of their type before them."""
    first = len(kinds) - count
    types = [kind.mixer.layer_type for kind in kinds]
    absent = sorted(set(types[max(first, 0) :]) - set(types[: max(first, 0)]))
    if absent:
        raise UnsupportedError(
            f"{source}: `num_kv_shared_layers` is {count}; none of the first {max(first, 0)} layers is of type "
            f"{absent[0]!r} by `layer_types`, whose keys and values later ones would read."
        )
    writers = {kind: index for index, kind in enumerate(types[:first])}
    wide = "use_double_wide_mlp" in values and values["use_double_wide_mlp"]
    if wide and any(kind.experts for kind in kinds):
        raise UnsupportedError(
            f"{source}: `use_double_wide_mlp` is True; the decoder computes layers with experts without it."
        )
    layers = []
    for index, kind in enumerate(kinds):
        assert isinstance(kind.mixer, Attention)
        network = kind.feed_forward
        sharing = "writes" if index in writers.values() else "reads" if index >= first else None
        if wide and sharing == "reads":
            network = Gated(2 * values["intermediate_size"])
        mixer = dataclasses.replace(kind.mixer, sharing=sharing)
        layers.append(dataclasses.replace(kind, mixer=mixer, feed_forward=network))
    return layers


def _rotated(family: Family, values: Mapping[str, Any], count: int, source: str) -> list[bool]:
    """For every layer whether it rotates queries and keys, by the keys of Granite 4 and SmolLM3."""
    if "position_embedding_type" in family.reads() and values.get("position_embedding_type") != "rope":
        return [False] * count
    if "alibi" in family.reads() and values.get("alibi"):
        return [False] * count
    if "use_mem_rope" in family.reads() and not values.get("use_mem_rope"):
        return [False] * count
    if "no_rope_layers" not in family.reads():
        return [True] * count
    flags = values.get("no_rope_layers")
    if flags is None or flags == []:
        period = values.get("no_rope_layer_interval") or count + 1
        return [(i + 1) % period != 0 for i in range(count)]
    if not isinstance(flags, list) or len(flags) < count or not all(isinstance(flag, int) for flag in flags):
        raise ShapeError(f"{source}: `no_rope_layers` is {flags!r}; expected 0 or 1 for each of the {count} layers.")
    return [bool(flag) for flag in flags[:count]]


def _mixtures(family: Family, values: Mapping[str, Any], count: int, dense: int, source: str) -> list[bool]:
    """For every layer whether its feed-forward network is a mixture of experts; the first `dense` ones have none."""
    reads = family.reads()
    if "enable_moe_block" in reads and not values.get("enable_moe_block"):
        return [False] * count
    if "moe_layers" in reads and (numbers := values.get("moe_layers")) is not None:
        if not isinstance(numbers, list) or not all(isinstance(i, int) for i in numbers):
            raise ShapeError(f"{source}: `moe_layers` is {numbers!r}; expected a list of the numbers of layers.")
        return [i in numbers for i in range(count)]
    if "expert_layer_period" in reads:
        return _periodic(values, "expert_layer", count, source) if dense < count else [False] * count
    if "mlp_layer_types" in reads and (types := values.get("mlp_layer_types")) is not None:
        if not isinstance(types, list) or len(types) != count or set(types) - {"dense", "sparse"}:
            raise ShapeError(f"{source}: `mlp_layer_types` is {types!r}; expected 'dense' or 'sparse' for each layer.")
        return [kind == "sparse" for kind in types]
    skipped = values.get("mlp_only_layers") if "mlp_only_layers" in reads else None
    skipped = [] if skipped is None else skipped
    if not isinstance(skipped, list) or not all(isinstance(i, int) for i in skipped):
        raise ShapeError(f"{source}: `mlp_only_layers` is {skipped!r}; expected a list of the numbers of layers.")
    steps = [values.get(key) for key in _STEPS if key in reads]
    step = next((value for value in steps if value), 1)
    last = values.get("moe_layer_end_index") if "moe_layer_end_index" in reads else None
    end = count if last in (None, -1) else last + 1
    return [dense <= i < end and i not in skipped and (i + 1) % step == 0 for i in range(count)]


def _periodic(values: Mapping[str, Any], key: str, count: int, source: str) -> list[bool]:
    """For every layer whether it is one of those every `KEY_period` layers from `KEY_offset` on (Jamba)."""
    period, offset = (values.get(f"{key}_{part}") for part in ("period", "offset"))
    check_value(f"{key}_period", period, int, source, 1)
    check_value(f"{key}_offset", offset, int, source, 0)
    assert period is not None and offset is not None
    if offset >= period:
        raise ShapeError(
            f"{source}: `{key}_offset` is {offset}, but `{key}_period` {period}; expected an offset below the period."
        )
    return [i % period == offset for i in range(count)]


def _period(flags: Sequence[bool]) -> tuple[int, int]:
    """The period and the offset of flags, as `_periodic` reads them."""
    places = [i for i, flag in enumerate(flags) if flag]
    if len(places) > 1:
        return places[1] - places[0], places[0]
    return len(flags) + 1, places[0] if places else len(flags)


_STEPS = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
"""Keys by which every so many layers one is a mixture of experts."""


def write_layers(layers: Sequence[LayerKind], family: Family) -> dict[str, Any]:
    """What a `config.json` says of the layers, in the form of transformers 5."""
    mixers = [kind.mixer for kind in layers]
    types = [mixer.layer_type for mixer in mixers]
    windows = [mixer.window for mixer in mixers if mixer.window is not None]
    ropes = {kind: rope_to_dict(mixer.rope) for kind, mixer in zip(types, mixers) if mixer.rope.partial}
    values: dict[str, Any] = {"rope_parameters": next(iter(ropes.values()), {"rope_type": "default"})}
    if not ropes and family.global_rope is None:
        values = {}
    if family.local_theta is not None and ropes:
        missing = {kind: next(iter(ropes.values())) for kind in ("full_attention", "sliding_attention")}
        values = {"rope_parameters": {**missing, **ropes}}
    original = values.get("rope_parameters", {}).get("original_max_position_embeddings")
    if "original_max_position_embeddings" in family.defaults and original is not None:
        values["original_max_position_embeddings"] = original
    reads = family.reads()
    if "sliding_window" in reads:
        values["sliding_window"] = windows[0] if windows else None
    if family.types_key in reads:
        values[family.types_key] = types
    if "attn_layer_indices" in reads:
        values["attn_layer_indices"] = [i for i, kind in enumerate(types) if kind == "full_attention"]
    if "position_embedding_type" in reads:
        values["position_embedding_type"] = "rope" if ropes else None
    if "use_mem_rope" in reads:
        values["use_mem_rope"] = bool(ropes)
    if "num_kv_shared_layers" in reads:
        values["num_kv_shared_layers"] = sum(kind.sharing == "reads" for kind in layers)
    networks = [kind.feed_forward for kind in layers if isinstance(kind.feed_forward, Gated)]
    if "use_double_wide_mlp" in reads:
        values["use_double_wide_mlp"] = any(network.inner_size for network in networks)
    if "activation_sparsity_pattern" in reads:
        values["activation_sparsity_pattern"] = [network.sparsity for network in networks]
    if "use_sliding_window" in reads:
        values["use_sliding_window"] = bool(windows)
    if "no_rope_layers" in reads:
        values["no_rope_layers"] = [int(mixer.rope.partial > 0) for mixer in mixers]
    if "mlp_layer_types" in reads:
        values["mlp_layer_types"] = ["sparse" if kind.experts else "dense" for kind in layers]
    if "moe_layer_interval" in reads:
        mixtures = [i for i, kind in enumerate(layers) if kind.experts]
        values["moe_layer_interval"] = mixtures[1] - mixtures[0] if len(mixtures) > 1 else 1
        values["moe_layer_end_index"] = mixtures[-1] if mixtures else -1
    if "enable_moe_block" in reads:
        values["enable_moe_block"] = any(kind.experts for kind in layers)
    if "moe_layers" in reads:
        values["moe_layers"] = [i for i, kind in enumerate(layers) if kind.experts]
    if "attention_chunk_size" in reads:
        values["attention_chunk_size"] = windows[0] if windows else None
    if "attn_temperature_tuning" in reads:
        grown = next((mixer.rope for mixer in mixers if mixer.rope.growth_length is not None), None)
        values["attn_temperature_tuning"] = grown is not None
        if grown is not None:
            values |= {"attn_scale": grown.query_growth, "floor_scale": grown.growth_length}
    for key, flags in (
        ("attn_layer", [kind == "full_attention" for kind in types]),
        ("expert_layer", [kind.experts for kind in layers]),
    ):
        if f"{key}_period" in reads:
            values |= dict(zip((f"{key}_period", f"{key}_offset"), _period(flags)))
    if "mlp_only_layers" in reads:
        values["mlp_only_layers"] = [i for i, kind in enumerate(layers) if not kind.experts]
    return values
