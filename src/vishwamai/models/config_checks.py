"""Checks of the keys and counts of a `config.json` before a `ModelConfig` is made of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.families import FAMILIES, IDLE, IGNORED, Family
from vishwamai.models.families.family import MOST_LAYERS

_MOST = {"num_layers": MOST_LAYERS, "experts.count": 100_000}
"""Counts that would take memory before a weight is read, and what no model exceeds."""


def family_of(values: Mapping[str, object], source: str) -> Family:
    """The family that `model_type` names.

    Raises:
      UnsupportedError: there is none.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        near = difflib.get_close_matches(str(kind), FAMILIES, n=3)
        similar = f", such as {' and '.join(near)}" if near else ""
        raise UnsupportedError(
            f"{source}: `model_type` is {_brief(kind)}; the decoder computes {len(FAMILIES)} others{similar}. "
            "docs/models-families.md lists them."
        )
    return FAMILIES[kind]


def check_keys(family: Family, values: Mapping[str, object], required: list[str], source: str) -> None:
    """Checks that every key is one that the family has, all of them in one error."""
    reads = {*family.keys, *family.choices, *family.ignored, *family.reads(), *IGNORED}
    absent = {key for key, field in family.keys.items() if field in required and key not in values}
    kind, problems = values["model_type"], []
    for key, value in values.items():
        allowed = family.fixed.get(key)
        if key in family.choices:
            allowed = tuple(family.choices[key][1])
        if allowed is None and key in IDLE and key not in reads:
            allowed = (*IDLE[key], None)
        if allowed is not None and value not in allowed:
            allowed = IDLE[key] if allowed[-1] is None and key not in family.fixed else allowed
            choices = " or ".join(map(repr, allowed))
            problems.append(f"`{key}` is {value!r}; the decoder computes {kind} with {choices} only.")
        elif allowed is None and key not in reads:
            near = difflib.get_close_matches(key, sorted(absent), n=1, cutoff=0.8)
            hint = f"`{near[0]}` is missing; if that is meant, write it. " if near else ""
            problems.append(
                f"`{key}` = {_brief(value)} is not known for {kind}; it may change what the model computes. {hint}"
                "Remove the key if it does not."
            )
    if problems:
        raise UnsupportedError(f"{source}: {' '.join(problems)}")


def _brief(value: object) -> str:
    """A value as an error shows it, in one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_counts(family: Family, fields: Mapping[str, Any], source: str) -> None:
    """Checks counts and groups of experts before anything is made of them."""
    names = {field: key for key, field in family.keys.items()}
    for field, most in _MOST.items():
        if fields.get(field, 0) > most:
            raise ShapeError(f"{source}: `{names[field]}` is {fields[field]}; expected {most} at most.")
    heads, shared = fields.get("num_heads"), fields.get("num_kv_heads")
    if heads and shared and heads % shared:
        raise ShapeError(
            f"{source}: `{names['num_heads']}` is {heads}, which is not a multiple of `{names['num_kv_heads']}` = "
            f"{shared}; each head of keys serves a whole number of heads of queries."
        )
    count, top = fields.get("experts.count"), fields.get("experts.top_k")
    if count is None or top is None:
        return
    chosen = f"`{names['experts.top_k']}` is {top}, of `{names['experts.count']}` = {count} experts"
    groups, top_groups = fields.get("experts.num_groups"), fields.get("experts.top_groups")
    if groups and top_groups:
        chosen += f" in `{names['experts.num_groups']}` = {groups} groups"
        chosen += f", `{names['experts.top_groups']}` = {top_groups} of which a token may reach"
        if count % groups or top_groups > groups:
            raise ShapeError(f"{source}: {chosen}; expected groups of one size, and no more than there are.")
        count = count // groups * top_groups
    if top > count:
        raise ShapeError(f"{source}: {chosen}; expected {count} at most.")
