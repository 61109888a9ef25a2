"""Names of parameters by their paths in a tree: the last key of a weight, or an adapter below it."""

from __future__ import annotations

from typing import Any

import jax

LAYERS = "layers"
"""Key of the layers in a tree of parameters."""


def parameter_name(path: jax.tree_util.KeyPath) -> str:
    """The name of the parameter at a path of a tree, the last of its keys; what is below a parameter, such as the parts
    of a quantized moment, has no keys. The arrays of an adapter are below the path of its weight: "query/down".
    """
    keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    _, inside, weight = keys[-2].rpartition("/") if len(keys) > 1 else ("", "", "")
    return f"{weight}/{keys[-1]}" if inside else keys[-1] if keys else ""


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias by the last name of its path; those of experts have an axis for the experts.

    >>> is_bias("expert_down_bias"), is_bias("expert_down")
    (True, False)
    """
    return name.endswith("_bias")


def in_layers(key: Any) -> bool:
    """Whether a key of a dictionary is that of layers, or the path of a parameter of theirs."""
    return key == LAYERS or (isinstance(key, str) and key.startswith(f"{LAYERS}/"))


def of_layers(path: jax.tree_util.KeyPath) -> bool:
    """Whether a leaf belongs to layers."""
    return any(in_layers(getattr(entry, "key", None)) for entry in path)
