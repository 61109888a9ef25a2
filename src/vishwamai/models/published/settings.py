"""`quantization_config` of a checkpoint, checked where a decoder of its weights needs it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import ShapeError, UnsupportedError

_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION")
"""Algorithms of modelopt whose weights are read."""

_COMPRESSED = ("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_COMPRESSED += ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision")
"""Formats of compressed-tensors that are read."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the weights of a checkpoint are quantized.

    Attributes:
      values: `quantization_config` of `config.json`.
      source: name of that file, for errors.
    """

    values: Mapping[str, Any]
    source: str

    @property
    def method(self) -> Any:
        """`quant_method`, or "modelopt" or "mlx" where their keys are there without it."""
        method = self.values.get("quant_method")
        if method is None and self.values.get("quant_algo") is not None:
            return "modelopt"
        return "mlx" if method is None and {"bits", "group_size"} <= self.values.keys() else method

    def unsupported(self, key: str, value: object, expected: str) -> UnsupportedError:
        """The error for a value that is not read."""
        return UnsupportedError(
            f"{self.source}: `quantization_config.{key}` is {value!r:.200}; the loader reads {expected}."
        )

    @functools.cached_property
    def groups(self) -> Mapping[str, Mapping[str, Any]]:
        """`config_groups` by name; none where the file has none."""
        groups = self.values.get("config_groups")
        if groups is None:
            return {}
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise self.unsupported("config_groups", groups, "an object of groups")
        return groups

    def check(self) -> None:
        """Checks what holds for all weights, before any is looked at.

        Raises:
          UnsupportedError: a format, or a part of one, is not read; the text names it.
        """
        self.groups  # noqa: B018 (checks them)
        values = self.values
        algorithms = {"quant_algo": values.get("quant_algo"), "moe_quant_algo": values.get("moe_quant_algo")}
        layers = values.get("quantized_layers")
        if isinstance(layers, Mapping):
            entries = {f"quantized_layers.{name}": entry for name, entry in layers.items()}
            algorithms |= {k: e.get("quant_algo") if isinstance(e, Mapping) else e for k, e in entries.items()}
        for key, algorithm in algorithms.items():
            if algorithm is not None and algorithm not in _MODELOPT:
                raise self.unsupported(key, algorithm, ", ".join(_MODELOPT))
        if self.method == "compressed-tensors":
            self._check_compressed()
        if any(group.get("input_activations") for group in self.groups.values()):
            self.log_activations()

    def _check_compressed(self) -> None:
        formats = {"format": self.values.get("format")}
        formats |= {f"config_groups.{name}.format": group.get("format") for name, group in self.groups.items()}
        for key, form in formats.items():
            if form is not None and form not in _COMPRESSED:
                raise self.unsupported(key, form, ", ".join(_COMPRESSED))
        sparsity = self.values.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping) or sparsity.get("format") not in (None, "dense"):
            raise self.unsupported("sparsity_config", sparsity, "dense weights")
        if self.values.get("transform_config"):
            raise self.unsupported("transform_config", self.values["transform_config"], "weights without transforms")

    def log_activations(self) -> None:
        """Says once that activations stay as they are."""
        _log(f"{self.source}: activations, keys and values are quantized there; here the weights alone are.")

    def weights(self, module: str) -> Mapping[str, Any]:
        """How the weights of a module are rounded: `weights` of its group.

        A group names modules, regular expressions of them, and classes, and the first of these decides.

        Raises:
          UnsupportedError: there are several groups, and none names the module.
        """
        if len(self.groups) < 2:
            group: Mapping[str, Any] | None = next(iter(self.groups.values()), {})
        else:
            group = None
            for names in (lambda t: t == module, lambda t: _expression(t, module), lambda t: t == "Linear"):
                fits = [g for g in self.groups.values() if any(map(names, g.get("targets") or ()))]
                group = fits[0] if fits else None
                if group is not None:
                    break
        if group is None:
            targets = [g.get("targets") for g in self.groups.values()]
            raise self.unsupported("config_groups.*.targets", targets, f"groups of which one names {module}")
        weights = group.get("weights") or {}
        return weights if isinstance(weights, Mapping) else {}

    def check_zero_points(self, rounding: Mapping[str, object], zeros: object, module: str) -> None:
        """Raises ShapeError where a weight of a group that is not symmetric has no zero points."""
        if zeros is None and not rounding.get("symmetric", True):
            raise ShapeError(
                f"{self.source}: `symmetric` of the weights of `{module}` is false, but tensor "
                f"`{module}.weight_zero_point` is missing; download the checkpoint again."
            )


def _expression(target: Any, module: str) -> bool:
    if not isinstance(target, str) or not target.startswith("re:"):
        return False
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error:
        return False


@functools.lru_cache(maxsize=64)
def _log(text: str) -> None:
    logging.getLogger("vishwamai.models.published").warning("%s", text)
