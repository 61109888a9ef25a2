"""The cross entropy of hidden states through a model's head, over the devices of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

import vishwamai
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import head_matrix, in_dtype
from vishwamai.models.config import ModelConfig
from vishwamai.training.packing import IGNORED


def head_operands(
    config: ModelConfig, arrays: Mapping[str, PyTree], hidden: AnyArray, axes: MeshAxes = ONE_DEVICE
) -> tuple[AnyArray, AnyArray]:
    """Hidden states `[batch, seq, features]` after the last norm and the head `[vocab, features]`, whose product are
    the logits: a bias of the head is its last column, and the last feature is then 1.

    Args:
      config: the model.
      arrays: the parameters outside of the layers by name.
      hidden: hidden states of the model's features.
      axes: mesh axes over which the model is split.
    """
    head = arrays["embed" if config.tie_embeddings else "head"]
    if axes.features is not None and (config.head_bias or config.head_norm):
        part = "a bias" if config.head_bias else "normalized rows"
        raise UnsupportedError(f"{config.family}: a head with {part} is not split by features; set mesh.fsdp=1.")
    head = head_matrix(config, head)
    if not config.head_bias:
        return hidden, head
    ones = jnp.ones_like(hidden[..., :1])
    bias = arrays["head_bias"][:, None].astype(head.dtype)
    return jnp.concatenate([hidden, ones], axis=-1), jnp.concatenate([head, bias], axis=1)


def cross_entropy(
    config: ModelConfig, hidden: AnyArray, head: AnyArray, labels: AnyArray, axes: MeshAxes = ONE_DEVICE, **options: Any
) -> AnyArray:
    """`linear_cross_entropy` of hidden states `[batch, seq, hidden]` after the last norm; the head is multiplied in
    their dtype, as it is for logits.

    Args:
      head: the device's part of `[vocab, hidden]`, as `axes` says.
      options: further options of `linear_cross_entropy`.
    """
    return vishwamai.linear_cross_entropy(
        hidden,
        head if axes.features else in_dtype(head, hidden.dtype),
        labels,
        softcap=config.final_logit_softcap,
        ignore_index=IGNORED,
        vocab_axis=axes.tensor,
        gather_axis=axes.features,
        **options,
    )
