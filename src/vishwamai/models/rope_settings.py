"""Rotations of a decoder's layers, read from a Hugging Face `config.json` and written back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.families import Family
from vishwamai.models.rotation import Rope
from vishwamai.models.values import check_value
from vishwamai.ops.rope.scaling import parse_scaling

_ROPE_KINDS: Mapping[str, type] = {
    "alpha": float,
    "factor": float,
    "llama_4_scaling_beta": float,
    "original_max_position_embeddings": int,
    "partial_rotary_factor": float,
    "rope_theta": float,
    "rope_type": str,
    "type": str,
}
"""The type of each key of `rope_parameters`; scalings check theirs."""

_STRETCHED = ("llama3", "longrope", "yarn")
"""Rotations that know the length of the original context, which a key outside of their object may give."""


def _rope(family: Family, parameters: Mapping[str, Any], values: Mapping[str, Any], theta: float, source: str) -> Rope:
    """One rotation.

    Args:
      parameters: the object that transformers 5 calls `rope_parameters`, or the older `rope_scaling`.
      values: the file's keys.
      theta: base where `parameters` has none.
    """
    parameters = {key: value for key, value in parameters.items() if value is not None}
    for key in parameters.keys() & _ROPE_KINDS.keys():
        least = 0 if key == "llama_4_scaling_beta" else None
        check_value(f"rope_parameters.{key}", parameters[key], _ROPE_KINDS[key], source, least)
    theta = parameters.pop("rope_theta", theta)
    share = values.get("partial_rotary_factor") or family.partial or 1.0
    if "rotary_dim" in family.reads() and values.get("rotary_dim") and not values.get("partial_rotary_factor"):
        check_value("head_dim", values.get("head_dim"), int, source)  # which null would not be
        share = values["rotary_dim"] / values["head_dim"]
    partial = parameters.pop("partial_rotary_factor", share)
    growth = parameters.pop("llama_4_scaling_beta", 0.0) if "llama_4_scaling_beta" in family.reads() else 0.0
    if growth:
        parameters.pop("max_position_embeddings", None)
    if family.partial is None and partial != 1.0:
        raise UnsupportedError(
            f"{source}: `partial_rotary_factor` is {partial!r}; the decoder rotates all features of "
            f"{values['model_type']} heads, as transformers does. Remove the key."
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "proportional" and "proportional" in family.reads() and parameters.keys() <= {"rope_type", "type"}:
        return Rope(float(theta), partial=float(partial), proportional=True)
    if kind == "su" or (kind == "yarn" and "short_factor" in parameters):  # older names of LongRoPE
        kind = parameters["rope_type"] = "longrope"
    if kind == "default":
        if growth:
            raise UnsupportedError(f"{source}: `rope_parameters` has llama_4_scaling_beta, but no original context.")
        return Rope(float(theta), partial=float(partial))
    positions = values["max_position_embeddings"]
    original = values.get("original_max_position_embeddings")
    if kind == "dynamic" and "alpha" in family.reads() and parameters.get("alpha"):  # bases that lengths do not change
        dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        return Rope(float(theta) * parameters["alpha"] ** (dim / (dim - 2)), partial=float(partial))
    if kind == "dynamic":
        parameters["original_max_position_embeddings"] = positions
    elif kind in _STRETCHED and original is not None:
        parameters["original_max_position_embeddings"] = original
    elif kind in _STRETCHED:
        parameters.setdefault("original_max_position_embeddings", positions)
    if kind in ("longrope", "yarn") and "factor" not in parameters:
        parameters["factor"] = positions / parameters["original_max_position_embeddings"]
    try:
        return Rope(float(theta), parse_scaling(parameters), float(partial), query_growth=float(growth))
    except (ShapeError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{source}: `rope_parameters` (or `rope_scaling`) is not supported: {error}") from error


def read_ropes(family: Family, values: Mapping[str, Any], source: str) -> dict[str, Rope]:
    """The rotation of each type of layer, from either form of the file."""
    new = values.get("rope_parameters") or family.defaults.get("rope_parameters") or {}
    old = values.get("rope_scaling") or {}
    theta = values.get(family.theta_key) or family.theta
    if old and family.local_theta is not None and "rope_type" not in old:  # transformers leaves its `type` out
        raise UnsupportedError(f"{source}: `rope_scaling` is {old!r}; expected a `rope_type` in it.")
    if new and family.local_theta is not None and not any(isinstance(value, Mapping) for value in new.values()):
        raise UnsupportedError(
            f"{source}: `rope_parameters` is {new!r}; {values['model_type']} has one object for each type of layer: "
            "'full_attention' and 'sliding_attention'."
        )
    if not any(isinstance(value, Mapping) for value in new.values()):
        base = (old or new).get("rope_theta") or theta
        if old and new.get("rope_theta") not in (None, base):
            raise UnsupportedError(
                f"{source}: `rope_scaling` replaces `rope_parameters`, whose rope_theta = {new['rope_theta']!r} is "
                f"then {base!r}; move the keys of `rope_scaling` into `rope_parameters`."
            )
        full = _rope(family, old or new, values, theta, source)
        if family.local_theta is None:
            return {"full_attention": full, "sliding_attention": full}
        local = Rope(values.get("rope_local_base_freq") or family.local_theta)
        return {"full_attention": full, "sliding_attention": local}
    for kind, parameters in new.items():
        check_value(f"rope_parameters.{kind}", parameters, dict, source)
    bases = {"sliding_attention": values.get("rope_local_base_freq") or family.local_theta or theta}
    ropes = {}
    for kind in ("full_attention", "sliding_attention"):
        parameters = {**new.get(kind, {}), **(old if kind == "full_attention" else {})}
        ropes[kind] = _rope(family, parameters, values, bases.get(kind, theta), source)
    return ropes


def unrotated(values: Mapping[str, Any], reads: frozenset[str], theta: float) -> Rope:
    """The rotation of a layer without one; Llama 4 scales queries there."""
    if "attn_temperature_tuning" not in reads or not values.get("attn_temperature_tuning"):
        return Rope(theta, partial=0.0)
    growth, length = float(values.get("attn_scale") or 0.0), values.get("floor_scale")
    return Rope(theta, partial=0.0, query_growth=growth, growth_length=length if growth else None)


def rope_to_dict(rope: Rope) -> dict[str, object]:
    """A rotation as `rope_parameters` of transformers 5."""
    scaling = rope.scaling
    names = {"original_max_positions": "original_max_position_embeddings"}
    values = {names.get(key, key): value for key, value in dataclasses.asdict(scaling).items() if value is not None}
    for key in ("mscale", "mscale_all_dim"):
        if not values.get(key, True):
            del values[key]
    kind = type(scaling).__name__.removesuffix("Scaling").lower()
    kind = {"rope": "default", "ntk": "dynamic"}.get(kind, kind)
    kind = "proportional" if rope.proportional else kind
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    partial = {} if rope.partial == 1.0 else {"partial_rotary_factor": rope.partial}
    if rope.query_growth:
        partial["llama_4_scaling_beta"] = rope.query_growth
    return {"rope_type": kind, "rope_theta": rope.theta, **partial, **values}
