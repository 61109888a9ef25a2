"""LoRA adapters out, in the form of the library peft: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vishwamai.core import caches
from vishwamai.core.errors import UnsupportedError
from vishwamai.models.adapters import Place, Thin
from vishwamai.models.config import ModelConfig
from vishwamai.models.saving import drafted
from vishwamai.models.tensors import Piece, piece


def write_adapter(
    directory: Path, config: ModelConfig, matrices: Mapping[Place, Thin], alpha: float, base: str | None
) -> None:
    """Writes an adapter that peft, and `read_adapter`, load onto the model.

    Products that a checkpoint has in one tensor, such as Phi 3's query, key and value, get one adapter of the sum of
    their ranks, whose second matrix is zero where a product is another one's.

    Args:
      directory: folder to write into.
      config: the model that it adapts.
      matrices: `[in, rank]` and `[rank, out]` by layer and parameter; all of one rank.
      alpha: float, the product of both is multiplied by alpha / rank.
      base: directory or name of the model, for `base_model_name_or_path`.

    Raises:
      UnsupportedError: a parameter is not the matrix of a linear layer; the text names it.
      DeviceError: a file cannot be written.
    """
    modules: dict[str, list[tuple[Piece, tuple[int, ...], Thin]]] = {}
    for (layer, name), thin in matrices.items():
        parameter = config.layers[layer].parameters(config)[name]
        where = piece(config, name, parameter, layer)
        if len(parameter.shape) != 2 or where.stacked or where.row or not where.tensors[0].endswith(".weight"):
            raise UnsupportedError(
                f"write_adapter: `{name}` of layer {layer} is not the matrix of a linear layer, for which peft has "
                "adapters; take the merged model."
            )
        modules.setdefault(where.tensors[0].removesuffix(".weight"), []).append((where, parameter.shape, thin))
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for module, parts in modules.items():
        down, up = _joined(parts)
        ranks[module] = down.shape[0]
        for half, matrix in (("A", down), ("B", up)):
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = matrix
    rank = min(ranks.values())
    higher = {module: count for module, count in ranks.items() if count != rank}
    settings: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": not next(iter(modules.values()))[0][0].transpose,  # GPT-2's weights are [in, out]
        "target_modules": sorted(modules),
        "rank_pattern": higher,
        "alpha_pattern": {module: alpha * count / rank for module, count in higher.items()},
    }
    weights = directory / "adapter_model.safetensors"
    with caches.writing(weights, "write_adapter"), drafted(tensors.items(), weights):
        caches.write(directory / "adapter_config.json", json.dumps(settings, indent=2) + "\n")


def _joined(parts: list[tuple[Piece, tuple[int, ...], Thin]]) -> Thin:
    """peft's `[rank, in]` and `[out, rank]` of the products that lie in one tensor."""
    where, shape, _ = parts[0]
    outer = 0 if where.transpose else 1
    up = np.zeros((where.shape(shape)[outer], sum(thin[1].shape[0] for *_, thin in parts)), np.float32)
    downs, start = [], 0
    for where, shape, (down, rows) in parts:
        downs.append(np.asarray(down, np.float32).T)
        columns = slice(start, start + rows.shape[0])
        up[where.index((slice(None), slice(None)), shape)[outer], columns] = np.asarray(rows, np.float32).T
        start = columns.stop
    return np.ascontiguousarray(np.concatenate(downs)), up
