"""Floating-point operations of training, and the share of the chips' peak that a run reaches."""

from __future__ import annotations

import math

from vishwamai.core.config import ambient_target
from vishwamai.models.config import ModelConfig
from vishwamai.models.layers.feed_forward import matched_numbers
from vishwamai.models.layers.layer import LayerKind
from vishwamai.models.parameters import top_parameters


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Operations of a step for each token: 6 for each parameter of a product that the token meets, and attention's.

    Chowdhery et al., "PaLM" (2022), appendix B: attention counts `12 * heads * head_dim * length` in every layer, with
    the window where that is shorter; causality is not subtracted, nor is recomputation added. Of experts, those that a
    token is sent to count.

    Args:
      config: configuration of the model.
      length: tokens in a row.

    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16,
    ...     "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64})
    >>> flops_per_token(config, 10) == 6 * (100 * 8 + 4 * 8 * 8 + 3 * 8 * 16) + 12 * 8 * 10
    True
    """
    head = math.prod(top_parameters(config)["embed"].shape)
    return 6.0 * head + sum(_layer(config, kind, length) for kind in config.layers)


def peak_flops(dtype: str) -> float | None:
    """FLOP/s of one device for products of `dtype`; None where the chip's peak is not known."""
    target = ambient_target()
    if target.tpu is not None:
        return target.tpu.peak_per_device(dtype)
    return None if target.gpu is None else target.gpu.peak(dtype)


def _layer(config: ModelConfig, kind: LayerKind, length: int) -> float:
    table = kind.parameters(config).items()
    numbers = sum(matched_numbers(kind.feed_forward, config, name, parameter) for name, parameter in table)
    return 6.0 * numbers + 3.0 * kind.mixer.mixing_flops(config, length)
