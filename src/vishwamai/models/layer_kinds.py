"""The kinds of a decoder's layers, read from a Hugging Face `config.json` and written back: windows and rotations, in
the forms of transformers 4 and 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.families import Family
from vishwamai.models.values import check_value
from vishwamai.ops.rope import RopeScaling
from vishwamai.ops.rope.scaling import parse_scaling

_KINDS: Mapping[str, tuple[type, float | None]] = {
    "layer_types": (list, None),
    "max_window_layers": (int, 0),
    "original_max_position_embeddings": (int, None),
    "partial_rotary_factor": (float, None),
    "rope_local_base_freq": (float, None),
    "rope_parameters": (dict, None),
    "rope_scaling": (dict, None),
    "rope_theta": (float, None),
    "sliding_window": (int, None),
    "sliding_window_pattern": (int, None),
    "_sliding_window_pattern": (int, None),
    "use_sliding_window": (bool, None),
}
"""The type of each key that is read here, and the smallest number, as of `check_value`."""

_ROPE_KINDS: Mapping[str, type] = {
    "factor": float,
    "original_max_position_embeddings": int,
    "partial_rotary_factor": float,
    "rope_theta": float,
    "rope_type": str,
    "type": str,
}
"""The same of keys of `rope_parameters`; scalings check theirs."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """How a layer rotates queries and keys; see `vishwamai.apply_rope`.

    Attributes:
      theta: base of the frequencies.
      scaling: a scaling of `vishwamai`, or `RopeScaling()` for none.
      partial: share of a head's features that turn.
    """

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling()
    partial: float = 1.0


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """In what one layer differs from another.

    Attributes:
      window: how many tokens a token sees, its own included; None for all before it.
      rope: its rotation.
      experts: its feed-forward network is a mixture of experts.
    """

    window: int | None = None
    rope: Rope = Rope()
    experts: bool = False


def _rope(values: Mapping[str, Any], theta: Any, max_positions: Any, source: str) -> Rope:
    """One rotation, of the dictionary that transformers 5 calls `rope_parameters`."""
    values = {key: value for key, value in values.items() if value is not None}
    for key in values.keys() & _ROPE_KINDS.keys():
        check_value(f"rope_parameters.{key}", values[key], _ROPE_KINDS[key], source)
    theta = values.pop("rope_theta", theta)
    partial = values.pop("partial_rotary_factor", 1.0)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return Rope(float(theta), partial=float(partial))
    if kind in ("dynamic", "longrope", "yarn") and "original_max_position_embeddings" not in values:
        values["original_max_position_embeddings"] = max_positions
    if kind in ("longrope", "yarn") and "factor" not in values:
        values["factor"] = max_positions / values["original_max_position_embeddings"]
    try:
        return Rope(float(theta), parse_scaling(values), float(partial))
    except ShapeError as error:
        raise UnsupportedError(f"{source}: `rope_parameters` (or `rope_scaling`) is not supported: {error}") from error


def _ropes(values: Mapping[str, Any], source: str) -> dict[str, Rope]:
    """The rotation of each type of layer, from either form of the file."""
    given = values.get("rope_parameters") or {}
    old = values.get("rope_scaling") or {}
    theta, longest = values.get("rope_theta") or 10000.0, values.get("max_position_embeddings")
    shared = {
        key: values[key]
        for key in ("partial_rotary_factor", "original_max_position_embeddings")
        if values.get(key) is not None
    }

    def rope(parameters: Mapping[str, Any], theta: float) -> Rope:
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        extra = {k: v for k, v in shared.items() if k == "partial_rotary_factor" or kind in ("longrope", "su")}
        renamed = {"rope_type": "longrope"} if kind == "su" else {}
        return _rope({**extra, **parameters, **renamed}, theta, longest, source)

    if any(isinstance(value, Mapping) for value in given.values()):
        for kind, parameters in given.items():
            check_value(f"rope_parameters.{kind}", parameters, dict, source)
        return {kind: rope(parameters, 10000.0) for kind, parameters in given.items()}
    full = rope(given or old, theta)
    if values["model_type"] == "gemma3_text":
        full = rope(given or old, values.get("rope_theta") or 1_000_000.0)
        return {"full_attention": full, "sliding_attention": Rope(values.get("rope_local_base_freq") or 10000.0)}
    return {"full_attention": full, "sliding_attention": full}


def read_layers(family: Family, values: Mapping[str, Any], count: int, source: str) -> tuple[LayerKind, ...]:
    """The kind of every layer, as the values of a `config.json` say it, in either form.

    Raises:
      ShapeError: the number of types is not that of the layers, or a value has another type than its key.
      UnsupportedError: a rotation or a type of layer is not one that the decoder computes.
    """
    for key, (kind, least) in _KINDS.items():
        if values.get(key) is not None:
            check_value(key, values[key], kind, source, least)
    ropes = _ropes(values, source)
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    types = values.get("layer_types") if family.layer_types == "list" else None
    if types is None:
        period = values.get("sliding_window_pattern") or values.get("_sliding_window_pattern") or family.window_period
        first = values.get("max_window_layers", 0) if "use_sliding_window" in values else 0

        def slides(i: int) -> bool:
            return window is not None and i >= first and (period is None or (i + 1) % period != 0)

        sliding = family.layer_types != "none"
        types = ["sliding_attention" if sliding and slides(i) else "full_attention" for i in range(count)]
    if len(types) != count:
        raise ShapeError(f"{source}: `layer_types` has {len(types)} entries; expected num_hidden_layers = {count}.")
    for kind in types:
        if kind not in ropes:
            raise UnsupportedError(f"{source}: `layer_types` has {kind!r}; the decoder has {', '.join(ropes)}.")
    return tuple(LayerKind(window if kind == "sliding_attention" else None, ropes[kind]) for kind in types)


def _rope_to_dict(rope: Rope) -> dict[str, Any]:
    scaling = rope.scaling
    names = {"original_max_positions": "original_max_position_embeddings"}
    values = {names.get(key, key): value for key, value in dataclasses.asdict(scaling).items() if value is not None}
    for key in ("mscale", "mscale_all_dim"):
        if not values.get(key, True):
            del values[key]
    kind = type(scaling).__name__.removesuffix("Scaling").lower()
    kind = {"rope": "default", "ntk": "dynamic"}.get(kind, kind)
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    partial = {} if rope.partial == 1.0 else {"partial_rotary_factor": rope.partial}
    return {"rope_type": kind, "rope_theta": rope.theta, **partial, **values}


def write_layers(layers: Sequence[LayerKind], model_type: str, family: Family) -> dict[str, Any]:
    """What a `config.json` says of the layers, in the form of transformers 5."""
    types = ["full_attention" if kind.window is None else "sliding_attention" for kind in layers]
    windows = [kind.window for kind in layers if kind.window is not None]
    ropes = {kind: _rope_to_dict(layer.rope) for kind, layer in zip(types, layers)}
    if model_type == "gemma3_text":
        missing = {kind: next(iter(ropes.values())) for kind in ("full_attention", "sliding_attention")}
        values: dict[str, Any] = {"rope_parameters": {**missing, **ropes}}
    else:
        values = {"rope_parameters": next(iter(ropes.values()))}
    original = values["rope_parameters"].get("original_max_position_embeddings")
    if model_type == "phi3" and original is not None:
        values["original_max_position_embeddings"] = original
    if family.layer_types != "none":
        values["sliding_window"] = windows[0] if windows else None
    if family.layer_types == "list":
        values["layer_types"] = types
    if "use_sliding_window" in family.defaults:
        values["use_sliding_window"] = bool(windows)
    return values
